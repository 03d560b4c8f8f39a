"""What a config says in vain: refused where it would only seem to guard something, else told."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.proxy.config import ProxyConfig, ZeroMeans, notices
from ppd.proxy.errors import ConfigError

CURVE = {"curve_server_key_file": "k", "curve_clients_dir": "c"}


@pytest.mark.parametrize(
    ("guard", "guarded"),
    [
        ({"kv_events_allow": ("10.0.0.0/8",)}, {"kv_events_bind": "tcp://0.0.0.0:5557"}),
        ({"curve_server_key_file": "k"}, {"curve_port": 30002, **CURVE}),
        ({"curve_clients_dir": "c"}, {"curve_port": 30002, **CURVE}),
        ({"share_prefixes": ("acme",)}, {"keys_file": "keys.toml"}),
        ({"tls_client_ca_file": "ca"}, {"tls_cert_file": "c", "tls_key_file": "k"}),
    ],
)
def test_a_guard_without_what_it_guards_is_refused(guard: dict[str, Any], guarded: dict[str, Any]) -> None:
    ((name, value),) = guard.items()
    with pytest.raises(ConfigError, match=f"^{name} = .*: must be set with {next(iter(guarded))}") as caught:
        ProxyConfig(**guard)
    assert caught.value.param == name
    assert getattr(ProxyConfig(**(guarded | guard)), name) == value


PICKER = {"picker_port": 9002}


@pytest.mark.parametrize(
    ("idle", "needed"),
    [
        ({"picker_host": "10.0.0.1"}, PICKER),
        ({"picker_health_port": 9003}, PICKER),
        ({"picker_shadow": True}, PICKER),
        ({"picker_fallbacks": 1}, PICKER),
        ({"picker_workers_file": "workers.json"}, PICKER),
        ({"heartbeat_allow": ("10.0.0.0/8",), "heartbeat_port": 0}, {"curve_port": 30002, **CURVE}),
        ({"heartbeat_open": True}, {"heartbeat_host": "0.0.0.0"}),
        ({"heartbeat_open": True, "heartbeat_host": "0.0.0.0", "heartbeat_port": 0}, {"heartbeat_port": 30001}),
        ({"tokenizer_wait_s": 0.1}, {"tokenizer": "folder"}),
        ({"zero_means": ZeroMeans.NEVER}, {"epp_config": "epp.yaml"}),
    ],
)
def test_a_key_that_does_nothing_alone_is_told(idle: dict[str, Any], needed: dict[str, Any]) -> None:
    (told,) = notices(ProxyConfig(**idle))
    assert told.startswith(f"{next(iter(idle))} = ")
    assert next(iter(needed)) in told
    assert notices(ProxyConfig(**(idle | needed))) == []


def test_nothing_is_told_of_defaults() -> None:
    assert notices(ProxyConfig()) == []


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
    told = notices(ProxyConfig(prefill_timeout_s=prefill_timeout_s, handoff_max_age_s=handoff_max_age_s))
    assert bool(told) is is_told
    for notice in told:
        assert f"prefill_timeout_s = {prefill_timeout_s:g} " in notice
        assert f"handoff_max_age_s = {handoff_max_age_s:g}," in notice
