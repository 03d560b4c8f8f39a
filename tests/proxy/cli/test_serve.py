"""What `ppd serve` tells at its start."""

from __future__ import annotations

import socket

import pytest

from ppd.proxy.cli.serve import describe
from ppd.proxy.config import Mode, ProxyConfig
from ppd.proxy.downstream.serve import listen
from ppd.proxy.errors import ConfigError
from ppd.proxy.settings import Settings
from tests.support.announcements import needs_ipv6


@pytest.mark.parametrize(
    ("config", "port", "said"),
    [
        (ProxyConfig(port=8000), 0, "http://127.0.0.1:8000; "),
        (ProxyConfig(port=0), 43210, "http://127.0.0.1:43210; "),  # the one that the system gave
        (ProxyConfig(port=8000, host="::1"), 0, "http://[::1]:8000; "),
        (ProxyConfig(heartbeat_host="::1"), 0, "; heartbeats [::1]:30001; "),
    ],
)
def test_the_addresses_that_it_names_are_those_that_take_clients(config: ProxyConfig, port: int, said: str) -> None:
    assert said in describe(Settings(config), port)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ProxyConfig(), "; mode table, table h100-llama-3.1-8b-2P_2D (nearest), w_ttft 1, w_tpot 1; "),
        (
            ProxyConfig(mode=Mode.SLO, profile="h100-llama-3.1-8b"),
            "; mode slo, profile h100-llama-3.1-8b, TTFT 0.25 s or 3 x idle, TPOT 0.025 s; ",
        ),
        (
            ProxyConfig(mode=Mode.WEIGHTS, profile="h100-llama-3.1-8b", w_tpot=3.0),
            "; mode weights, profile h100-llama-3.1-8b, w_ttft 1, w_tpot 3; ",
        ),
        (ProxyConfig(mode=Mode.LEAST_TTFT, profile="h100-llama-3.1-8b"), "; mode least_ttft, profile h100-"),
        (ProxyConfig(mode=Mode.ALWAYS_LOCAL), "; mode always_local; "),
    ],
)
def test_it_says_what_it_decides_by(config: ProxyConfig, said: str) -> None:
    assert said in describe(Settings(config))


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("127.0.0.1", "port = {port}: must be a free port on 127.0.0.1 (Address already in use)"),
        ("192.0.2.1", "host = '192.0.2.1': must be a name or an address of this machine (Cannot assign"),
        ("a..b", "host = 'a..b': must be a name or an address of this machine ("),
    ],
)
def test_what_keeps_the_port_from_being_bound_is_named(host: str, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            listen(ProxyConfig(host=host, port=port))
    assert caught.value.message.startswith(said.format(port=port))


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_host_may_have_brackets(host: str) -> None:
    with listen(ProxyConfig(host=host, port=0)) as listening:
        assert listening.getsockname()[0] == "::1"
