"""Targets of a turn: what may be said of them, and whose word counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppd.proxy.config import ProxyConfig
from ppd.proxy.errors import ConfigError
from ppd.proxy.laws.targets import (
    ALLOWED_TARGETS,
    MOST,
    GivenTargets,
    SloTargets,
    TargetRules,
    given_targets,
    target_rules,
)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("ttft=0.5,tpot=0.03", GivenTargets(ttft=0.5, tpot=0.03)),
        (" tpot=1 ,\tttft_factor=2.50", GivenTargets(tpot=1.0, ttft_factor=2.5)),
        ("ttft=3600,ttft_factor=1000,tpot=60", GivenTargets(ttft=3600.0, ttft_factor=1000.0, tpot=60.0)),
        ("tpot=0.000000001", GivenTargets(tpot=1e-9)),
    ],
)
def test_targets_are_read_and_written_alike(text: str, given: GivenTargets) -> None:
    assert given_targets(text) == given
    assert given_targets(str(given)) == given


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", ",", "ttft", "ttft=", "=1", "ttft=1,", "ttft=1;tpot=1", "ttft=1 tpot=1", "ttft=1,ttft=1"),
        *("ttft=0", "ttft=0.0", "tpot=-1", "ttft=nan", "ttft=NaN", "ttft=inf", "ttft=1e-3", "ttft=1_0", "ttft=+1"),
        *("ttft=3600.1", "ttft_factor=1001", "tpot=60.5", "ttft=99999999999", "ttft=1" + "0" * 400),
        *("TTFT=1", "ttft_s=1", "e2e=1", "ttft=0x1", "ttft=.5", "ttft=1.", "ttft=٣", "ttft==1", "ttft=1=2"),
        *("ttft=1,\r\ntpot=1", "ttft=1\0", "ttft=" + "0" * 500 + "1", ",".join(["ttft=1"] * 10_000)),
    ],
)
def test_nothing_else_is_read(text: str) -> None:
    with pytest.raises(ValueError):
        given_targets(text)


def test_what_is_allowed_is_told_as_it_is() -> None:
    for name, most in MOST.items():
        assert name in ALLOWED_TARGETS
        assert f"above 0 to {most:g})" in ALLOWED_TARGETS
        assert given_targets(f"{name}={most:g}")


RULES = target_rules(
    ProxyConfig(slo_tpot_s=0.05, slo_by_priority=("0:ttft=1", "10:ttft=5,tpot=0.2", "-10:ttft_factor=2"))
)


@pytest.mark.parametrize(
    ("priority", "key", "request_", "ttft_s", "factor", "tpot_s"),
    [
        (-11, None, None, 0.25, 3.0, 0.05),
        (-10, None, None, 0.25, 2.0, 0.05),
        (9, None, None, 1.0, 3.0, 0.05),
        (1000, None, None, 5.0, 3.0, 0.2),
        (10, "tpot=0.1", None, 5.0, 3.0, 0.1),
        (10, "ttft=2,tpot=0.1", "ttft=0.5", 0.5, 3.0, 0.1),
        (10, None, "ttft_factor=1", 5.0, 1.0, 0.2),
    ],
)
def test_the_request_counts_before_its_key_its_class_and_the_config(
    priority: int, key: str | None, request_: str | None, ttft_s: float, factor: float, tpot_s: float
) -> None:
    said = (None if text is None else given_targets(text) for text in (key, request_))
    assert RULES.of(priority, *said) == SloTargets(ttft_s=ttft_s, ttft_factor=factor, tpot_s=tpot_s)


def test_without_a_word_the_usual_targets_are_not_made_again() -> None:
    rules = TargetRules()
    assert rules.of(0) is rules.usual
    assert target_rules(ProxyConfig()) == rules


@pytest.mark.parametrize(
    "entry", ["", "ttft=1", "x:ttft=1", "1001:ttft=1", "-1001:ttft=1", "1:", "1:ttft=0", "1.5:tpot=1"]
)
def test_a_class_that_cannot_be_read_is_named(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"slo_by_priority = .* must be PRIORITY:TARGETS") as caught:
        target_rules(replace(ProxyConfig(), slo_by_priority=(entry,)))
    assert caught.value.param == "slo_by_priority"


def test_a_class_is_named_once() -> None:
    with pytest.raises(ConfigError, match="named once"):
        target_rules(ProxyConfig(slo_by_priority=("1:ttft=1", "1:tpot=1")))
