"""What `ppd serve` tells at its start."""

from __future__ import annotations

import pytest

from ppd.proxy.cli.serve import describe, prefill_notice
from ppd.proxy.config import Mode, ProxyConfig
from ppd.proxy.settings import Settings


@pytest.mark.parametrize(
    ("prefill_timeout_s", "handoff_max_age_s", "is_told"),
    [
        (ProxyConfig().prefill_timeout_s, ProxyConfig().handoff_max_age_s, False),  # nobody has asked for it
        (ProxyConfig().prefill_timeout_s, 2.5, True),
        (60.0, 20.0, True),
        (60.0, 2.5, True),
        (20.0, 20.0, False),
        (60.0, 200.0, False),
    ],
)
def test_a_prefill_that_may_take_longer_than_its_handoff_is_good_for_is_told(
    prefill_timeout_s: float, handoff_max_age_s: float, is_told: bool
) -> None:
    config = ProxyConfig(prefill_timeout_s=prefill_timeout_s, handoff_max_age_s=handoff_max_age_s)
    notice = prefill_notice(config)
    assert (notice is not None) is is_told
    if notice is not None:
        assert f"prefill_timeout_s = {prefill_timeout_s:g} " in notice
        assert f"handoff_max_age_s = {handoff_max_age_s:g}," in notice


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
