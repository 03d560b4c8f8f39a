"""What `ppd serve` tells at its start."""

from __future__ import annotations

import logging

import pytest

from ppd.proxy.cli.serve import describe, prefill_notice
from ppd.proxy.config import ProxyConfig
from ppd.proxy.settings import Settings


@pytest.mark.parametrize(
    ("prefill_timeout_s", "handoff_max_age_s", "level"),
    [
        (ProxyConfig().prefill_timeout_s, 20.0, logging.INFO),  # nobody has asked for it
        (60.0, 20.0, logging.WARNING),
        (60.0, 2.5, logging.WARNING),
        (20.0, 20.0, None),
        (60.0, 200.0, None),
    ],
)
def test_a_prefill_that_may_take_longer_than_its_handoff_is_good_for_is_told(
    prefill_timeout_s: float, handoff_max_age_s: float, level: int | None
) -> None:
    config = ProxyConfig(prefill_timeout_s=prefill_timeout_s, handoff_max_age_s=handoff_max_age_s)
    notice = prefill_notice(config)
    assert (notice and notice[0]) == level
    if notice is not None:
        assert f"prefill_timeout_s = {prefill_timeout_s:g} " in notice[1]
        assert f"handoff_max_age_s = {handoff_max_age_s:g}," in notice[1]


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
