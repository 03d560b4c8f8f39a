"""What a decision says of its turn's times, and what it is compared with."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ppd.proxy.decision_table.score import CellKey, Evidence, Verdict
from ppd.proxy.laws.corrections import Figure, Measured
from ppd.proxy.laws.prediction import Prediction
from ppd.proxy.laws.profiles import Profiles
from ppd.proxy.laws.worker_laws import TurnTimes, WorkerLaws, likes_of
from ppd.proxy.policy import Decision, Route
from ppd.proxy.routing.foresight import LEAST_OUTPUT_TOKENS, Foreseen, came_to, foresee
from tests.support.decisions import D1, D2, NEXT, P1, R1, TABLE, by_table

SHIPPED = "h100-llama-3.1-8b"
PREDICTION = Prediction(ttft_s=0.2, tpot_s=0.02, ready_s=0.0, prefill_s=0.1)
LOCAL = Decision(route=Route.LOCAL, reason="", decode=D2, wanted=Route.LOCAL, prediction=PREDICTION)
SPLIT = replace(LOCAL, route=Route.SPLIT, decode=D1, prefill=P1)
CELL = TABLE.cells[0]
INSIDE = Verdict(True, 1.0, 0.1, 0.1, CellKey(CELL.context, CELL.workload, CELL.qps), Evidence.INSIDE)


def laws(factor: float = 1.0, profile: str = SHIPPED) -> WorkerLaws:
    """Whose P and D are known to be slower than the profile by as much."""
    made = WorkerLaws(Profiles(profile))
    for number in range(300 if factor != 1.0 else 0):
        for view in (P1, D1, D2):
            likes = likes_of(SHIPPED, view.worker)
            both = [Measured(view.id, "i", likes, figure, 0.1, 1.0, 0.1 * factor) for figure in Figure]
            made.learn(TurnTimes(0, both), float(number))
    return made


def seen(decision: Decision, known: WorkerLaws | None = None, **turn: Any) -> Foreseen:
    found = foresee(decision, replace(NEXT, **turn), known or laws(), None)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("decision", "workers", "new"),
    [
        (LOCAL, ("d2:80", "d2:80"), 40),
        (SPLIT, ("p1:80", "d1:80"), 1040),
        (replace(SPLIT, prefill=D2), ("d2:80", "d1:80"), 40),  # which lends itself
        (replace(LOCAL, decode=D1, source=D2, fetched_tokens=1000), ("d1:80", "d1:80"), 40),
        (replace(SPLIT, source=D2, fetched_tokens=1000), ("p1:80", "d1:80"), 40),
    ],
)
def test_ttft_is_that_of_the_engine_that_computes_the_prompt(
    decision: Decision, workers: tuple[str, str], new: int
) -> None:
    found = seen(decision)
    assert tuple(one.worker for one in found.times.by_profile) == workers
    assert tuple(one.figure for one in found.times.by_profile) == (Figure.TTFT, Figure.TPOT)
    assert found.new_tokens == new


@pytest.mark.parametrize("says", [True, False])
def test_the_correction_in_a_prediction_is_taken_out_again(says: bool) -> None:
    """Also where the decision has made a new worker look slower than its laws."""
    known = laws(2.0)
    own = known.of(D2)
    assert own is not None
    told = replace(PREDICTION, ttft_factor=3.0, tpot_factor=1.5) if says else PREDICTION
    ttft, tpot = seen(replace(LOCAL, prediction=told), known).times.by_profile
    assert (ttft.factor, tpot.factor) == (own.ttft_factor, own.tpot_factor) == pytest.approx((2.0, 2.0), rel=0.1)
    assert ttft.plain_s == pytest.approx(0.2 / (3.0 if says else own.ttft_factor))
    assert tpot.plain_s == pytest.approx(0.02 / (1.5 if says else own.tpot_factor))


@pytest.mark.parametrize(
    "decision",
    [
        replace(LOCAL, prediction=None),
        replace(LOCAL, prediction=None, verdict=INSIDE),
    ],
)
def test_nothing_is_foreseen_without_a_prediction_that_is_carried_out(decision: Decision) -> None:
    assert foresee(decision, NEXT, laws(), None) is None


def test_an_engine_without_a_profile_is_not_corrected() -> None:
    assert foresee(LOCAL, NEXT, WorkerLaws(), None) is None


@pytest.mark.parametrize(
    ("turn", "guess"), [({}, False), ({"prompt_tokens": 10**6}, True), ({"output_tokens": 10**6}, True)]
)
def test_a_turn_beyond_what_was_fitted_is_a_guess(turn: dict[str, int], guess: bool) -> None:
    assert seen(LOCAL, None, **turn).times.is_guess is guess


@pytest.mark.parametrize(
    ("route", "evidence", "means"),
    [
        (Route.LOCAL, Evidence.INSIDE, CELL.local),
        (Route.SPLIT, Evidence.INSIDE, CELL.split),
        (Route.REPLICA, Evidence.INSIDE, None),
        (Route.LOCAL, Evidence.EXTRAPOLATED, None),
        (Route.LOCAL, Evidence.INTERPOLATED, None),
    ],
)
def test_a_tables_cell_is_compared_with_the_turns_that_it_stands_for(
    route: Route, evidence: Evidence, means: Any
) -> None:
    decode = R1 if route is Route.REPLICA else D2
    made = Decision(
        route=route, reason="", decode=decode, wanted=route, verdict=replace_verdict(evidence), prediction=None
    )
    found = foresee(made, NEXT, laws(), by_table(1, 1).scored)
    said = () if found is None else tuple(one.expected_s for one in found.times.by_table)
    assert said == (() if means is None else (means.ttft_s.mean, means.tpot_s.mean))


def replace_verdict(evidence: Evidence) -> Verdict:
    return replace(INSIDE, evidence=evidence)


@pytest.mark.parametrize(
    ("changes", "figures"),
    [
        ({}, "ttft tpot"),
        ({"tpot_s": None}, "ttft"),
        ({"output_tokens": LEAST_OUTPUT_TOKENS - 1}, "ttft"),
        ({"choices": 2}, "ttft"),
        ({"computed_tokens": None}, "ttft tpot"),
        ({"computed_tokens": 40 + 64}, "ttft tpot"),
        ({"computed_tokens": 1040}, "tpot"),
    ],
)
def test_only_what_went_as_foreseen_is_compared(changes: dict[str, Any], figures: str) -> None:
    said: dict[str, Any] = {"tpot_s": 0.03, "computed_tokens": 40, "output_tokens": 50, "choices": 1}
    times = came_to(seen(LOCAL), 0.4, **(said | changes))
    assert {one.figure: one.measured_s for one in times.by_profile} == {
        Figure(name): {"ttft": 0.4, "tpot": 0.03}[name] for name in figures.split()
    }
