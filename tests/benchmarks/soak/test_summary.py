from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from benchmarks.soak import summary
from benchmarks.soak.records import (
    ClientOutcome,
    Disturbance,
    Ending,
    FleetFault,
    ProcessSample,
    Records,
    RequestRecord,
    SoakHead,
    decode,
)
from benchmarks.soak.report import markdown
from ppd.offline.experiment.statistics import slope
from ppd.proxy.errors import FormatError

SECONDS = 300.0


def request(at_s: float, outcome: ClientOutcome = ClientOutcome.COMPLETED, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "id": "r",
        "conversation": 1,
        "endpoint": "chat",
        "move": "open",
        "stream": True,
        "sent_s": at_s,
        "first_text_s": at_s + 0.1,
        "ended_s": at_s + 0.2,
        "status": 200,
        "outcome": outcome,
        "route": "SPLIT",
        "detail": "",
    }
    return RequestRecord(**values | changes)


ENDING = Ending(
    leaked={}, quiet_after_s=1.0, descriptors_before=20, descriptors_after=22, log_defects=[], engine_counts={"a": 1.0}
)
GOOD = Records(
    head=SoakHead(seed=0, seconds=SECONDS, warm_up_s=60, clients=2, machine="m", started="2026-01-01T00:00:00+00:00"),
    requests=[request(at / 10) for at in range(3000)],
    disturbances=[Disturbance(kind=FleetFault.KILL, worker="D1", at_s=100, lasts_s=5)],
    samples=[ProcessSample(at_s=at, rss_kib=60_000 + at % 7 * 8, descriptors=30, sessions=9) for at in range(300)],
    ending=ENDING,
)


def test_a_soak_without_faults_of_the_proxy_passes() -> None:
    assert summary.problems(GOOD) == []
    assert "**Passed.**" in markdown(GOOD)
    assert "| success | 100.000% |" in markdown(GOOD)


@pytest.mark.parametrize("outcome", [ClientOutcome.WRONG, ClientOutcome.UNMARKED, ClientOutcome.UNANSWERED])
@pytest.mark.parametrize("at_s", [10.0, 102.0])
def test_one_such_answer_is_too_many_whatever_was_done(outcome: ClientOutcome, at_s: float) -> None:
    found = replace(GOOD, requests=[*GOOD.requests, request(at_s, outcome)])
    assert summary.problems(found) == [f"1 {outcome}"]
    assert f"- {outcome} `r`" in markdown(found)


@pytest.mark.parametrize(
    ("outcome", "at_s", "fails"),
    [
        (ClientOutcome.BROKEN, 102.0, False),
        (ClientOutcome.BROKEN, 10.0, True),
        (ClientOutcome.FAILED, 102.0, True),
        (ClientOutcome.TIMED_OUT, 102.0, True),
        (ClientOutcome.LEFT, 10.0, False),
        (ClientOutcome.REJECTED, 10.0, False),
    ],
)
def test_failures_must_have_a_cause(outcome: ClientOutcome, at_s: float, fails: bool) -> None:
    found = replace(GOOD, requests=[*GOOD.requests, *[request(at_s, outcome)] * 10])
    assert bool(summary.problems(found)) is fails
    if outcome in (ClientOutcome.LEFT, ClientOutcome.REJECTED):
        assert summary.failures(found) == []
    else:
        (failure,) = summary.failures(found)
        assert failure.during == ("kill D" if at_s > 100 else "nothing")
        assert (failure.count, failure.explained) == (10, not fails)


def test_a_few_failures_without_a_cause_are_tolerated() -> None:
    assert summary.problems(replace(GOOD, requests=[*GOOD.requests, *[request(10, ClientOutcome.FAILED)] * 3])) == []
    assert summary.problems(replace(GOOD, requests=[*GOOD.requests, *[request(10, ClientOutcome.FAILED)] * 4]))


def test_a_soak_that_served_nobody_fails() -> None:
    assert summary.problems(replace(GOOD, requests=[])) == ["no request was completed"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"leaked": {"ppd_inflight_legs": 1.0}}, "leaked: ppd_inflight_legs = 1"),
        ({"log_defects": ["Traceback (most recent call last):"]}, "the proxy's log: Traceback"),
        ({"descriptors_after": 90}, "descriptors: 20 before, 90 after"),
    ],
)
def test_what_is_left_over_fails_it(change: dict[str, Any], said: str) -> None:
    (problem,) = summary.problems(replace(GOOD, ending=msgspec.structs.replace(ENDING, **change)))
    assert problem.startswith(said)


def test_a_disturbance_that_could_not_be_undone_fails_it() -> None:
    stuck = Disturbance(kind=FleetFault.DRAIN, worker="P1", at_s=5, lasts_s=30, problem="not whole")
    assert summary.problems(replace(GOOD, disturbances=[stuck])) == ["drain of P1 at 5 s: not whole"]


@pytest.mark.parametrize(
    ("stretch", "kib_a_second", "before_s", "fails"),
    [(5, 0.0, 0, False), (5, 0.1, 0, False), (5, 0.6, 0, True), (5, 20.0, 300, False), (1, 3.0, 0, False)],
    ids=["flat", "little", "grows", "warm-up", "short"],
)
def test_memory_may_grow_in_the_warm_up_and_is_not_judged_by_minutes(
    stretch: int, kib_a_second: float, before_s: int, fails: bool
) -> None:
    """120 requests a minute over 25: 100 bytes of each are 0.2 KiB a second."""
    head = msgspec.structs.replace(GOOD.head, seconds=300.0 * stretch, warm_up_s=60 * stretch)

    def grown(one: ProcessSample) -> ProcessSample:
        at_s = one.at_s * stretch
        kib = int(one.rss_kib + kib_a_second * min(at_s, before_s or at_s))
        return msgspec.structs.replace(one, at_s=at_s, rss_kib=kib)

    records = replace(GOOD, head=head, samples=[grown(one) for one in GOOD.samples])
    assert bool(summary.problems(records)) is fails


def test_a_slope_has_an_interval_that_noise_widens() -> None:
    times = [float(at) for at in range(240)]
    exact = slope(times, [2 * at + 5 for at in times])
    noisy = slope(times, [2 * at + 5 + (at * 7919 % 101) for at in times])
    assert exact is not None and noisy is not None
    assert (exact.low, exact.value, exact.high) == pytest.approx((2, 2, 2))
    assert noisy.low < 2 < noisy.high
    assert slope(times[:20], times[:20]) is None


def test_times_are_told_apart_by_what_was_done() -> None:
    late = request(102, first_text_s=103.0)
    calm, stormy = summary.first_text(replace(GOOD, requests=[request(10), late]))
    assert calm is not None and stormy is not None
    assert (calm.n, stormy.n) == (1, 1)
    assert (calm.p50_s, stormy.p99_s) == pytest.approx((0.1, 1.0))


def test_records_come_back_as_they_were_written() -> None:
    assert decode(GOOD.encode()) == GOOD
    with pytest.raises(FormatError, match="version"):
        decode(replace(GOOD, head=msgspec.structs.replace(GOOD.head, version=9)).encode())
