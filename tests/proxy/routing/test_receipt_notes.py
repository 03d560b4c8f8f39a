"""What a receipt says of the ways that were judged, and how much room that takes."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ppd.proxy.beliefs.held import BeliefEvidence, Held
from ppd.proxy.config import Mode
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.laws.prediction import Prediction
from ppd.proxy.laws.profiles import Profiles
from ppd.proxy.laws.worker_laws import WorkerLaws
from ppd.proxy.policy import Decision, Route
from ppd.proxy.policy.decision import Candidate
from ppd.proxy.routing.receipt_notes import JudgedWays, note_decision, note_errors
from ppd.proxy.telemetry.receipts import CandidatesRecord, CellRecord, Receipt
from tests.support.decisions import D1, D2, NEXT, P1, rules, run, view

LAWS = WorkerLaws(Profiles("h100-llama-3.1-8b"))
ROOM_BYTES = 1024  # that these may take in a receipt
NEW_MEMBERS = ("candidates", "predicted_ttft_s", "predicted_tpot_s", "laws", "ttft_error", "tpot_error")
CELL = CellRecord(
    table="t", lookup="nearest", cell="c", evidence="inside", score=0.1, d_ttft=0.2, d_tpot=0.1, w_ttft=1.0, w_tpot=1.0
)
TERMS = ("ttft", "tpot", "streams", "batch", "queue", "work", "moved")


def receipt() -> Receipt:
    return Receipt(
        id="r", at="", endpoint="/v1/chat/completions", model="m", stream=True, session="s", turn=2, kind="next"
    )


def way(decode: WorkerView = D1, ttft_s: float = 0.1, **fields: Any) -> Candidate:
    prediction = Prediction(ttft_s=ttft_s, tpot_s=0.0123456, prefill_s=0.1, ready_s=0.0)
    terms = {"ttft": ttft_s, "tpot": 0.00012345}
    plain = {"route": Route.LOCAL, "prediction": prediction, "terms": terms, "score": sum(terms.values())}
    return Candidate(decode=decode, **plain | fields)  # type: ignore[arg-type]


def decision(*ways: Candidate, chosen: int = 0) -> Decision:
    taken = ways[chosen]
    return Decision(
        route=taken.route,
        reason="slo",
        wanted=taken.route,
        decode=taken.decode,
        prefill=taken.prefill,
        source=taken.source,
        prediction=taken.prediction,
        candidates=ways,
    )


def noted(made: Decision, turn: Any = NEXT) -> CandidatesRecord:
    return JudgedWays.of(turn, made).record()


def test_a_way_is_told_with_its_workers_its_prediction_and_its_terms() -> None:
    split = way(D2, 0.234567, route=Route.SPLIT, prefill=P1, source=D1, fetched_tokens=700)
    found = noted(decision(split, way(D2, 12345.6789)))
    assert found == CandidatesRecord(
        route=["SPLIT", "LOCAL"],
        decode=["D2", "D2"],
        prefill=["P1", ""],
        source=["D1", ""],
        fetched_tokens=[700, 0],
        ttft_s=[0.2346, 12350.0],
        tpot_s=[0.01235, 0.01235],
        terms={"ttft": [0.2346, 12350.0], "tpot": [0.0001, 0]},
        chosen=0,
        held={"own_turns": {"D2": 1000}},
    )


def test_a_way_that_is_forbidden_says_why_and_predicts_nothing() -> None:
    found = noted(decision(way(), way(D2, prediction=None, terms={}, score=math.inf, excluded="evicts_live")))
    assert found.excluded == ["", "evicts_live"]
    assert found.ttft_s == [0.1, None]
    assert found.terms == {"ttft": [0.1, 0], "tpot": [0.0001, 0]}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_left_out(value: float) -> None:
    odd = way(
        prediction=Prediction(ttft_s=value, tpot_s=0.0, prefill_s=0.0, ready_s=0.0), terms={"ttft": value, "tpot": 0.5}
    )
    found = noted(decision(odd))
    assert (found.ttft_s, found.tpot_s) == ([None], [0.0])
    assert found.terms["ttft"] == [None]
    assert msgspec.json.decode(msgspec.json.encode(found), type=CandidatesRecord) == found


def test_eight_ways_are_told_and_the_chosen_one_is_among_them() -> None:
    ways = [way(view("D", number), number / 10) for number in range(1, 12)]
    found = noted(decision(*ways, chosen=9))
    assert found.decode == ["D1", "D2", "D3", "D4", "D5", "D6", "D7", "D10"]
    assert found.chosen == 7


def test_a_decision_without_a_prediction_says_nothing_of_one_even_after_one_with() -> None:
    written = receipt()
    note_decision(written, NEXT, decision(way()), rules(Mode.SLO, laws=LAWS))
    note_decision(written, NEXT, run(NEXT), rules())
    assert (written.predicted_ttft_s, written.predicted_tpot_s, written.laws) == (None, None, "")


def test_what_an_attempt_that_failed_had_noted_is_not_said_of_the_next_one() -> None:
    """The first was decided by the table, and P's answer was none that D could use."""
    written = receipt()
    written.cell, written.handoff_missing = CELL, "params_missing"
    note_decision(written, NEXT, decision(way()), rules(Mode.SLO, laws=LAWS))
    assert [written.cell, written.handoff_missing] == [None, None]


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "errors"),
    [(0.15, 0.01, (0.5, -0.2)), (0.1, None, (0.0, None)), (0.05, 0.0125, (-0.5, 0.0))],
)
def test_at_the_end_the_error_is_told(ttft_s: float, tpot_s: float | None, errors: tuple[float, float | None]) -> None:
    written, predicted = receipt(), Prediction(ttft_s=0.1, tpot_s=0.0125, prefill_s=0.1, ready_s=0.0)
    note_decision(written, NEXT, decision(way(prediction=predicted)), rules(Mode.SLO, laws=LAWS))
    written.tpot_s = tpot_s
    note_errors(written, predicted, ttft_s)
    assert (written.predicted_ttft_s, written.laws) == (0.1, LAWS.version)
    assert (written.ttft_error, written.tpot_error) == errors


def test_a_prediction_of_nothing_has_no_error() -> None:
    written, predicted = receipt(), Prediction(ttft_s=0.0, tpot_s=0.0, prefill_s=0.0, ready_s=0.0)
    note_decision(written, NEXT, decision(way(prediction=predicted)), rules(Mode.SLO, laws=LAWS))
    note_errors(written, predicted, 0.1)
    assert written.ttft_error is None


def room_taken(terms: dict[str, float], *, moves: bool) -> tuple[int, int]:
    """Bytes that candidates and what belongs to them take, and how many there are; names have two digits."""
    prefills, decodes = ([view(role, number) for number in range(11, 15)] for role in "PD")
    ways = [
        way(
            decodes[number % 4],
            route=Route.SPLIT,
            prefill=prefills[number // 2],
            source=decodes[(number + 1) % 4] if moves and number % 2 else None,
            fetched_tokens=23456 if moves and number % 2 else 0,
            prediction=Prediction(ttft_s=0.1234567 * (number + 1), tpot_s=0.01234567, prefill_s=0.1, ready_s=0.0),
            terms=terms,
        )
        for number in range(8)
    ]
    held = {each.id: Held(23456, BeliefEvidence.OWN_TURNS) for each in (*prefills[:1], *decodes[:2])}
    written, turn = receipt(), replace(NEXT, held=held, prompt_tokens=30_000)
    note_decision(written, turn, decision(*ways), rules(Mode.SLO, laws=LAWS))
    written.candidates = noted(decision(*ways), turn)
    assert ways[0].prediction is not None
    written.tpot_s = 0.0123
    note_errors(written, ways[0].prediction, 0.1711)
    told = {name: getattr(written, name) for name in NEW_MEMBERS}
    return len(msgspec.json.encode(told)), len(written.candidates.route)


@pytest.mark.parametrize(("moves", "ways"), [(False, 8), (True, 6)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 4321.0])
def test_eight_candidates_fit_the_room_that_they_have_and_fewer_where_all_have_much_to_say(
    scale: float, moves: bool, ways: int
) -> None:
    names = [name for name in TERMS if moves or name != "moved"]
    terms = {name: scale * 0.1234567 / 3**place for place, name in enumerate(names)}
    taken, count = room_taken(terms, moves=moves)
    assert taken <= ROOM_BYTES
    assert count >= ways


def test_of_candidates_with_more_to_say_there_are_fewer() -> None:
    taken, count = room_taken({f"a_term_with_a_long_name_{number}": 1.234 for number in range(20)}, moves=True)
    assert taken <= ROOM_BYTES
    assert 1 <= count < 8


def test_the_ways_that_a_mode_judges_come_with_their_evidence() -> None:
    by = rules(Mode.SLO, laws=LAWS)
    made = run(NEXT, by=by)
    found = noted(made)
    assert (found.route[0], found.decode[0], found.chosen) == (made.route, made.decode.name, 0)
    assert found.held["own_turns"]["D2"] == 1000
    scores = [sum(term[number] or 0.0 for term in found.terms.values()) for number in range(len(found.route))]
    assert scores == pytest.approx([candidate.score for candidate in made.candidates], rel=2e-3)
