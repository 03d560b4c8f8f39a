"""Which turns teach the laws, and what of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest

from ppd.proxy.assembly import new_state
from ppd.proxy.beliefs.held import BeliefEvidence, Held, Residency
from ppd.proxy.config import ProxyConfig
from ppd.proxy.connectors.leg import Handoff
from ppd.proxy.errors import Forbidden, NoWorkerError
from ppd.proxy.failures import Leg
from ppd.proxy.laws.corrections import Figure
from ppd.proxy.laws.prediction import Prediction
from ppd.proxy.laws.profiles import Profiles
from ppd.proxy.laws.worker_laws import WorkerLaws
from ppd.proxy.openai.answer import AnswerSummary
from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.peers.channels import Member
from ppd.proxy.policy import Decision, Route
from ppd.proxy.policy.decision import Candidate
from ppd.proxy.routing.attempt import Attempt
from ppd.proxy.routing.foresight import foresee
from ppd.proxy.routing.learning import Learner, SeenAnswer
from ppd.proxy.routing.receipt_notes import JudgedWays
from ppd.proxy.routing.state import State
from ppd.proxy.runtime.tasks import Drain
from ppd.proxy.sessions.table import TurnOutcome
from ppd.proxy.telemetry.receipts import LEGS_OF_ONE, LegRecord, Receipt, ReceiptLog
from tests.support.attempts import running
from tests.support.decisions import D1, D2, NEXT, P2
from tests.support.requests import parse

DECIDED_S, FIRST_S, LAST_S = 12.0, 12.4, 14.0
"""The turn came at 0 and queued for long. TTFT 0.4 s; with 41 tokens TPOT 0.04 s."""
PREDICTION = Prediction(ttft_s=0.2, tpot_s=0.02, ready_s=0.0, prefill_s=0.1)
LOCAL = Decision(route=Route.LOCAL, reason="", decode=D2, wanted=Route.LOCAL, prediction=PREDICTION)
SPLIT = replace(LOCAL, route=Route.SPLIT, decode=D1, prefill=P2)
READBACK = replace(SPLIT, route=Route.READBACK, source=D1, fetched_tokens=900)
HANDOFF = Handoff({}, 1040, 900)


def state_of() -> State:
    return new_state(ProxyConfig(), Member(), lambda: LAST_S, WorkerLaws(Profiles("h100-llama-3.1-8b")))


def attempt_of(state: State, decision: Decision) -> Attempt:
    made = running(decision)
    made.asked_s = DECIDED_S
    made.foreseen = foresee(decision, NEXT, state.laws, None)
    return made


def answered(cached: int = 1000) -> AnswerSummary:
    return AnswerSummary(prompt_tokens=1040, completion_tokens=41, cached_tokens=cached)


def complete(
    state: State,
    decision: Decision,
    summary: AnswerSummary,
    times_s: tuple[float, float] | None,
    handoff: Handoff | None = None,
) -> None:
    made = attempt_of(state, decision)
    made.handoff = handoff
    match = state.sessions.find(made.request.prompt, DECIDED_S)
    Learner(state, Drain(), None).completed(match, made, SeenAnswer(summary, ReplyKey(made.request), times_s), LAST_S)


def is_corrected(state: State) -> set[tuple[str, Figure]]:
    views = [replace(view, incarnation="i") for view in (P2, D1, D2)]
    return {(view.name, figure) for view in views for figure, one in state.laws.shown(view).items() if one.turns}


@pytest.mark.parametrize(
    ("decision", "handoff", "summary", "teaches"),
    [
        (LOCAL, None, answered(), {("D2", Figure.TTFT), ("D2", Figure.TPOT)}),
        (SPLIT, HANDOFF, answered(), {("P2", Figure.TTFT), ("D1", Figure.TPOT)}),
        (SPLIT, None, answered(), set()),
        (READBACK, HANDOFF, answered(), {("P2", Figure.TTFT), ("D1", Figure.TPOT)}),
        (READBACK, None, answered(), set()),
        (LOCAL, None, answered(cached=0), {("D2", Figure.TPOT)}),
        (replace(LOCAL, prediction=None), None, answered(), set()),
    ],
)
def test_a_whole_answer_teaches_what_went_as_foreseen(
    decision: Decision, handoff: Handoff | None, summary: AnswerSummary, teaches: set[tuple[str, Figure]]
) -> None:
    state = state_of()
    complete(state, decision, summary, (FIRST_S, LAST_S), handoff)
    assert is_corrected(state) == teaches


@pytest.mark.parametrize(
    ("held", "cached", "misses"),
    [
        (1000, 900, 0),
        (1000, 400, 1),
        (1000, 0, 1),
        (40, 0, 1),
        (30, 16, 0),
        (30, 0, 0),  # as a health check's "hi", which fills no block that could be found again
    ],
)
def test_a_prefix_of_fewer_tokens_than_two_blocks_is_not_missed(held: int, cached: int, misses: int) -> None:
    state = state_of()
    complete(state, replace(LOCAL, held=Held(held, BeliefEvidence.OWN_TURNS)), answered(cached), None)
    text = generate_latest(state.metrics.registry).decode()
    assert f"ppd_residency_misses_total {float(misses)}" in text


@pytest.mark.parametrize("cached", [None, 1000])
def test_what_is_not_told_is_not_learnt(cached: int | None, caplog: pytest.LogCaptureFixture) -> None:
    state = state_of()
    complete(state, LOCAL, AnswerSummary(cached_tokens=cached), (FIRST_S, LAST_S))
    assert ("D2", Figure.TPOT) not in is_corrected(state)
    assert not caplog.records


def test_ttft_counts_from_the_decision_and_not_from_the_queue() -> None:
    state = state_of()
    complete(state, LOCAL, answered(), (FIRST_S, LAST_S))
    assert [state.laws.shown(D2)[figure].median_error for figure in Figure] == pytest.approx([0.5, 0.5])


def test_errors_are_counted_by_route_worker_and_figure() -> None:
    state = state_of()
    complete(state, SPLIT, answered(), (FIRST_S, LAST_S), HANDOFF)
    text = generate_latest(state.metrics.registry).decode()
    for figure, worker in (("ttft", "P2"), ("tpot", "D1")):
        sample = f'ppd_prediction_error_sum{{figure="{figure}",route="SPLIT",worker="{worker}"}}'
        (line,) = [line for line in text.splitlines() if line.startswith(sample)]
        assert float(line.rpartition(" ")[2]) == pytest.approx(0.5)


ENDS: dict[str, Callable[[Learner, Any], None]] = {
    "cancelled": lambda learner, receipt: learner.cancelled(receipt, 1.0, is_answered=True),
    "broken": lambda learner, receipt: learner.broken(receipt, 1.0),
    "failed": lambda learner, receipt: learner.failed(receipt, 1.0),
}


@pytest.mark.parametrize("client", ["", "team"])
@pytest.mark.parametrize(
    ("end", "is_cut", "outcome", "status", "error"),
    [
        (lambda learner, one: learner.cancelled(one, 3.0, is_answered=True), False, "cancelled", 499, None),
        (lambda learner, one: learner.cancelled(one, 3.0, is_answered=False), False, "cancelled", 499, None),
        (lambda learner, one: learner.cancelled(one, 3.0, is_answered=True), True, "broken", 200, "draining"),
        (lambda learner, one: learner.cancelled(one, 3.0, is_answered=False), True, "failed", 503, "draining"),
        (lambda learner, one: learner.broken(one, 3.0), False, "broken", 200, None),
        (lambda learner, one: learner.failed(one, 3.0), False, "failed", 0, None),
        (lambda learner, one: learner.failed(one, 3.0, by_request=True), False, "rejected", 0, None),
    ],
)
def test_what_has_ended_is_said_once_and_by_every_leg(
    end: Callable[[Learner, Receipt], None],
    is_cut: bool,
    outcome: str,
    status: int,
    error: str | None,
    client: str,
) -> None:
    state, drain = state_of(), Drain()
    drain.is_cut = is_cut
    receipt = running(LOCAL, Leg.PREFILL, Leg.DECODE).receipt
    receipt.client, receipt.legs[0].ended_s = client, 1.0
    receipt.prompt_tokens, receipt.completion_tokens = 5, 2
    end(Learner(state, drain, None), receipt)
    assert (receipt.outcome, receipt.status, receipt.error, receipt.ended_s) == (outcome, status, error, 3.0)
    assert [leg.ended_s for leg in receipt.legs] == [1.0, 3.0], "the first had ended before"
    told = [line for line in generate_latest(state.metrics.registry).decode().splitlines() if 'key="team"' in line]
    assert sorted(told) == (
        [
            'ppd_key_tokens_total{key="team",kind="completion"} 2.0',
            'ppd_key_tokens_total{key="team",kind="prompt"} 5.0',
            f'ppd_key_turns_total{{key="team",outcome="{outcome}"}} 1.0',
        ]
        if client
        else []
    )


@pytest.mark.parametrize(
    ("decision", "completion", "tpot_s", "errors"),
    [
        (LOCAL, 41, 0.04, (1.0, 1.0)),
        (LOCAL, 1, None, (1.0, None)),
        (LOCAL, None, None, (1.0, None)),
        (replace(LOCAL, prediction=None), 41, 0.04, (None, None)),
    ],
)
def test_a_receipt_has_the_times_of_a_streamed_answer(
    decision: Decision, completion: int | None, tpot_s: float | None, errors: tuple[float | None, float | None]
) -> None:
    """From when the turn came; what was predicted counts from the decision."""
    state = state_of()
    made = attempt_of(state, decision)
    made.started_s = 2.0
    match = state.sessions.find(made.request.prompt, DECIDED_S)
    seen = SeenAnswer(replace_tokens(answered(), completion), ReplyKey(made.request), (FIRST_S, LAST_S))
    Learner(state, Drain(), None).completed(match, made, seen, LAST_S)
    receipt = made.receipt
    assert (receipt.ttft_s, receipt.tpot_s) == pytest.approx((FIRST_S - 2.0, tpot_s))
    assert (receipt.ttft_error, receipt.tpot_error, receipt.ended_s) == (*errors, LAST_S - 2.0)
    text = generate_latest(state.metrics.registry).decode()
    for figure, told in (("ttft", receipt.ttft_s), ("tpot", receipt.tpot_s)):
        sums = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"ppd_{figure}_seconds_sum")]
        assert sums == ([] if told is None else [pytest.approx(told)])


def replace_tokens(summary: AnswerSummary, completion: int | None) -> AnswerSummary:
    summary.completion_tokens = completion
    return summary


@pytest.mark.parametrize("decision", [LOCAL, SPLIT])
def test_an_answer_that_nobody_saw_goes_on_by_what_was_estimated(decision: Decision) -> None:
    state = state_of()
    made = attempt_of(state, decision)
    made.started_s = 2.0
    for view in filter(None, (decision.decode, decision.prefill)):
        state.registry.add_static(view.worker, 0.0)
        state.registry.probed(view.id, view.worker, None, 0.0)
    made.receipt.estimated_prompt_tokens, made.receipt.estimated_output_tokens = 700, 50
    prompt = made.request.prompt
    Learner(state, Drain(), None).assumed(state.sessions.find(prompt, DECIDED_S), made, None, LAST_S)
    receipt, found = made.receipt, state.sessions.find(prompt, LAST_S)
    ended = receipt.outcome, receipt.status, receipt.counts_evidence, receipt.ended_s
    assert ended == ("completed", 200, "estimate", LAST_S - 2.0)
    assert (found.held_tokens, found.decode and found.decode.tokens) == (700, 750)
    (session,) = state.sessions.all()
    prefill = session.prefill_residency
    assert (prefill and (prefill.worker, prefill.tokens)) == (None if decision is LOCAL else (P2.id, 700))


@pytest.mark.parametrize("end", ENDS)
def test_a_flood_of_turns_without_a_whole_answer_teaches_nothing(end: str) -> None:
    state = state_of()
    for _ in range(300):
        ENDS[end](Learner(state, Drain(), None), attempt_of(state, LOCAL).receipt)
    assert is_corrected(state) == set()


def test_an_answer_that_is_not_streamed_tells_no_times() -> None:
    state = state_of()
    complete(state, LOCAL, answered(), None)
    assert is_corrected(state) == set()


@pytest.mark.parametrize(
    ("exc", "outcome", "status", "error"),
    [
        (asyncio.CancelledError(), "cancelled", 499, None),
        (NoWorkerError("none"), "failed", 503, "NoWorkerError"),
        (Forbidden("not yours"), "rejected", 403, "Forbidden"),
        (ValueError("a defect"), "failed", 500, "internal_error"),
    ],
)
def test_whatever_ends_a_turn_without_an_answer_closes_its_receipt(
    exc: BaseException, outcome: str, status: int, error: str | None
) -> None:
    state = state_of()
    receipt = attempt_of(state, LOCAL).receipt
    Learner(state, Drain(), None).unanswered(receipt, exc, 1.0)
    assert (receipt.outcome, receipt.status, receipt.error, receipt.ended_s) == (outcome, status, error, 1.0)


async def test_the_log_tells_of_the_ways_that_were_judged(tmp_path: Path) -> None:
    state, log = state_of(), ReceiptLog(tmp_path / "receipts.jsonl")
    receipt = attempt_of(state, LOCAL).receipt
    state.receipts.open(receipt)
    state.receipts.judged(receipt, JudgedWays.of(NEXT, replace(LOCAL, candidates=[Candidate(Route.LOCAL, D2)])))
    Learner(state, Drain(), log).failed(receipt, 1.0)
    await log.close()
    (line,) = (tmp_path / "receipts.jsonl").read_bytes().splitlines()
    told = msgspec.json.decode(line, type=Receipt).candidates
    assert told is not None and (told.decode, told.chosen) == (["D2"], 0)


def test_answers_and_returns_make_forecasts() -> None:
    state = state_of()
    for _ in range(30):
        complete(state, LOCAL, answered(), None)
    learner = Learner(state, Drain(), None)
    match = replace(state.sessions.find(parse().prompt, LAST_S), turn=2, ended_s=LAST_S)
    before = chance_of_return(state, LAST_S + 3600.0)
    for _ in range(30):
        learner.began(match, NEXT.model, LAST_S + 9.0)
    assert chance_of_return(state, LAST_S + 3610.0) > before


def chance_of_return(state: State, now_s: float) -> float:
    return state.forecasts.chance_of_return(NEXT.model, 1, calls_tool=False, idle_s=1.0, now_s=now_s)


def test_an_answer_that_cannot_be_learnt_from_is_an_answer_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of()
    monkeypatch.setattr(state.forecasts, "learn", lambda *_: 1 / 0)
    made = attempt_of(state, LOCAL)
    match = state.sessions.find(made.request.prompt, DECIDED_S)
    Learner(state, Drain(), None).completed(match, made, SeenAnswer(answered(), ReplyKey(made.request), None), LAST_S)
    assert (made.receipt.outcome, made.receipt.prompt_tokens) == ("completed", 1040)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


def test_the_largest_counts_that_are_believed_can_be_kept() -> None:
    """A bit more is no count: `tests/fuzz/test_upstream.py`."""
    state, most, prompt = state_of(), 2**31 - 1, running(SPLIT).request.prompt
    held = Residency(D1.id, "i", 2 * most)
    outcome = TurnOutcome(prompt_tokens=most, completion_tokens=most, decode=held)
    state.sessions.finish(state.sessions.find(prompt, DECIDED_S), prompt, outcome, LAST_S)
    assert state.sessions.find(prompt, LAST_S).decode == held


def test_a_turn_of_many_legs_takes_the_places_of_several_receipts() -> None:
    state = new_state(ProxyConfig(receipts_kept=3), Member(), lambda: LAST_S, WorkerLaws(Profiles("h100-llama-3.1-8b")))
    attempts = [attempt_of(state, LOCAL) for _ in range(3)]
    for number, made in enumerate(attempts):
        made.receipt.id = str(number)
        state.receipts.open(made.receipt)
    last = attempts[-1].receipt
    last.legs = [LegRecord(kind=Leg.LOCAL, worker="D1", address="d:1", started_s=0.0)] * LEGS_OF_ONE
    Learner(state, Drain(), None).failed(last, LAST_S)
    assert [one.id for one in state.receipts.newest(5)] == ["2", "1"]
