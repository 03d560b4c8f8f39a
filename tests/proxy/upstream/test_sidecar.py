"""What a sidecar tells of its legs, and what of it is believed."""

from __future__ import annotations

import pytest

from ppd.proxy.failures import Cause, Leg, Phase
from ppd.proxy.upstream.sidecar import MOST_LEGS, NOT_ALLOWED, EndedLeg, SplitLegs, legs_told

FAILED = EndedLeg(kind=Leg.PREFILL, started_s=0.5, ended_s=1.5, status=500, phase=Phase.HEADERS, error=Cause.SERVER)


@pytest.mark.parametrize(
    "told",
    [
        SplitLegs(),
        SplitLegs(legs=[FAILED]),
        SplitLegs(legs=[FAILED] * MOST_LEGS, is_handed_over=True, cached_tokens=0),
        SplitLegs(legs=[EndedLeg(kind=Leg.PREFILL, status=200)], is_by_prefill=True),
    ],
)
def test_it_is_read_as_it_was_written(told: SplitLegs) -> None:
    assert legs_told(told.encode()) == told
    assert told.encode().isascii()


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x",
        "[]",
        "null",
        "{" * 100_000,
        "\xff",
        '{"legs":[{}]}',
        '{"legs":[{"kind":"third"}]}',
        '{"legs":[{"kind":"prefill","ended_s":-1}]}',
        '{"legs":[{"kind":"prefill","ended_s":1e300}]}',
        '{"legs":[{"kind":"prefill","phase":"never"}]}',
        '{"legs":[{"kind":"prefill","status":7}]}',
        '{"legs":[{"kind":"prefill","error":"' + "x" * 65 + '"}]}',
        '{"legs":[' + ",".join(['{"kind":"prefill"}'] * (MOST_LEGS + 1)) + "]}",
        '{"cached_tokens":-1}',
        '{"cached_tokens":1e30}',
    ],
)
def test_what_cannot_be_meant_is_as_if_nothing_were_told(header: str) -> None:
    assert legs_told(header) is None


@pytest.mark.parametrize(
    ("error", "is_lost"), [("", False), (Cause.REQUEST, False), (Cause.SERVER, True), (NOT_ALLOWED, True)]
)
def test_a_leg_is_lost_by_no_fault_of_the_request(error: str, is_lost: bool) -> None:
    assert EndedLeg(kind=Leg.PREFILL, error=error).is_lost is is_lost
