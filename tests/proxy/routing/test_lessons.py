"""Which book is told what of an answered turn: one row for each kind of turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ppd.proxy.admission.keys import Client
from ppd.proxy.beliefs.held import BeliefEvidence, Held, Residency
from ppd.proxy.connectors.leg import Handoff
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.laws.forecasts import AnswerEnded, SessionReturned
from ppd.proxy.openai.answer import AnswerSummary
from ppd.proxy.policy import Decision, Route
from ppd.proxy.routing.attempt import Attempt
from ppd.proxy.routing.learning import Learner, SeenAnswer
from ppd.proxy.runtime.tasks import Drain
from ppd.proxy.sessions.table import MatchKind, SessionMatch, TurnOutcome
from tests.support.attempts import running
from tests.support.decisions import D1, P2

NOW_S = 14.0
PROMPT, COMPLETION, ANSWER_CACHED, P_CACHED, HELD, CHARGED = 1040, 41, 1000, 900, 1010, 1100
ADDED = (("prose", 80),)
"""What the prompt adds to its session, by kinds of text."""
CLIENT = Client(name="k", tenant="t")
LOCAL = Decision(route=Route.LOCAL, reason="", decode=D1, wanted=Route.LOCAL, held=Held(HELD, BeliefEvidence.OWN_TURNS))
SPLIT = replace(LOCAL, route=Route.SPLIT, prefill=P2)
READBACK = replace(SPLIT, route=Route.READBACK, source=D1)
HANDOFF = Handoff({}, PROMPT, P_CACHED)
BOOKS = (
    "metrics receipts sessions tokens templates beliefs engine_caches rate_limits count_checks laws forecasts".split()
)
Told = dict[str, list[tuple[Any, ...]]]


@dataclass
class Book:
    """Notes what it is told."""

    name: str
    told: Told
    is_kept: bool = True
    found: Any = None  # what each of its answers is

    def __bool__(self) -> bool:
        return self.is_kept

    def __getattr__(self, verb: str) -> Any:
        def note(*what: Any, **also: Any) -> Any:
            self.told.setdefault(f"{self.name}.{verb}", []).append((*what, *also.values()))
            return self.found

        return note


@dataclass
class Turn:
    decision: Decision
    handoff: Handoff | None = None
    is_finished_on_prefill: bool = False
    has_events: bool = False
    choices: int = 1
    source: int | None = 5
    continues_response: bool = False
    is_counted: bool = True  # its prompt, by a tokenizer
    summary: AnswerSummary = field(
        default_factory=lambda: AnswerSummary(
            prompt_tokens=PROMPT, completion_tokens=COMPLETION, cached_tokens=ANSWER_CACHED, response_id="resp"
        )
    )


def held_by(worker: WorkerId, tokens: int) -> Residency:
    return Residency(worker, "i", tokens)


def told_of(turn: Turn) -> tuple[Told, Attempt, SessionMatch]:
    told = Told()
    made = running(turn.decision)
    made.client, made.charged_tokens, made.history = CLIENT, CHARGED, 77
    made.handoff, made.is_finished_on_prefill = turn.handoff, turn.is_finished_on_prefill
    made.touches, made.count = cast(Any, Book("touches", told)), cast(Any, "check" if turn.is_counted else None)
    made.request = replace(made.request, choices=turn.choices)
    if turn.continues_response:
        made.request = replace(made.request, prompt=replace(made.request.prompt, previous_response_id="resp_1"))
    metrics = SimpleNamespace(
        tokens=Book("metrics.tokens", told),
        turns=Book("metrics.turns", told),
        residency_misses=Book("metrics.residency_misses", told),
        by_key=Book("metrics.by_key", told),
    )
    state = SimpleNamespace(
        metrics=metrics,
        receipts=Book("receipts", told),
        sessions=Book("sessions", told),
        tokens=Book("tokens", told),
        templates=Book("templates", told, found=False),
        beliefs=SimpleNamespace(residency=held_by),
        engine_caches=Book("engine_caches", told, is_kept=turn.has_events),
        rate_limits=Book("rate_limits", told),
        count_checks=Book("count_checks", told),
        laws=Book("laws", told),
        forecasts=Book("forecasts", told),
        handles=SimpleNamespace(kept=False),
    )
    match = SessionMatch(
        session_id="s", turn=3, kind=MatchKind.NEXT, held_tokens=960, new_bytes=80, added=cast(Any, ADDED), history=77,
        decode=None, output_tokens=None, source=turn.source, parent=None, affinity=None,
    )  # fmt: skip
    reply = SimpleNamespace(calls_tool=True, reasoned=True, key=lambda: "end", alone=lambda: 9)
    Learner(cast(Any, state), Drain(), None).completed(match, made, SeenAnswer(turn.summary, cast(Any, reply)), NOW_S)
    assert (made.receipt.outcome, made.receipt.status, made.receipt.ended_s) == ("completed", 200, NOW_S)
    return told, made, match


def usual(made: Attempt, match: SessionMatch, **changes: Any) -> Told:
    """Of a LOCAL turn. changes: of other kinds; None: that book is told nothing."""
    route, outcome = made.decision.route, changes.pop("outcome", {})
    told: Told = {
        "rate_limits.settle": [(CLIENT, CHARGED, PROMPT + COMPLETION, NOW_S)],
        "metrics.tokens.add": [(route, PROMPT, ANSWER_CACHED, COMPLETION)],
        "tokens.learn": [("m", ADDED, PROMPT - 960, COMPLETION)],
        "forecasts.learn": [(AnswerEnded("m", 3, True, NOW_S),)],
        "count_checks.learn": [("check", PROMPT)],
        "templates.learn": [("m", D1.id, made.request.prompt.chain, PROMPT, ANSWER_CACHED)],
        "touches.answered": [(ANSWER_CACHED,)],
        "sessions.finish": [
            (
                match,
                made.request.prompt,
                TurnOutcome(
                    **{
                        "prompt_tokens": PROMPT,
                        "completion_tokens": COMPLETION,
                        "cached_tokens": ANSWER_CACHED,
                        "reply_key": cast(Any, "end"),
                        "response_id": "resp",
                        "reasoned": True,
                        "reply_alone": 9,
                        "calls_tool": True,
                        "decode": held_by(D1.id, PROMPT + COMPLETION),
                        "prefill": None,
                    }
                    | outcome
                ),
                NOW_S,
            )
        ],
        "metrics.turns.add": [("", "", "completed")],
    }
    for name, what in changes.items():
        told.pop(name.replace("__", "."), None)
        if what is not None:
            told[name.replace("__", ".")] = what
    return told


BY_P = {"cached_tokens": None, "prefill": held_by(P2.id, PROMPT)}
ROWS: dict[str, tuple[Turn, dict[str, Any]]] = {
    "local": (Turn(LOCAL), {}),
    "local, of which nothing was held": (Turn(replace(LOCAL, held=None)), {"outcome": {"cached_tokens": None}}),
    "a replica": (Turn(replace(LOCAL, route=Route.REPLICA)), {}),
    "split": (
        Turn(SPLIT, HANDOFF),
        {
            "metrics__tokens__add": [(Route.SPLIT, PROMPT, P_CACHED, COMPLETION)],
            "templates__computed": [(D1.id, PROMPT)],
            "templates__learn": "by P",
            "touches__answered": [(P_CACHED,)],
            "outcome": BY_P,
        },
    ),
    "split, whose handoff was lost": (
        Turn(SPLIT),
        {
            "templates__computed": [(D1.id, PROMPT)],
            "templates__learn": "by P",
            "outcome": {"prefill": held_by(P2.id, PROMPT)},
        },
    ),
    "read back": (
        Turn(READBACK, HANDOFF),
        {
            "metrics__tokens__add": [(Route.READBACK, PROMPT, P_CACHED, COMPLETION)],
            "templates__computed": [(D1.id, PROMPT)],
            "templates__learn": None,  # what P found was D's
            "touches__answered": [(None,)],
            "outcome": {"cached_tokens": None},  # P has it under a name that nobody asks for
        },
    ),
    "all of it on P": (
        Turn(SPLIT, HANDOFF, is_finished_on_prefill=True),
        {
            "metrics__tokens__add": [(Route.SPLIT, PROMPT, P_CACHED, COMPLETION)],
            "templates__learn": None,
            "touches__answered": [(P_CACHED,)],
            "outcome": BY_P | {"decode": None},
        },
    ),
    "several answers": (Turn(LOCAL, choices=2), {"forecasts__learn": None}),
    "several answers, with events": (Turn(LOCAL, choices=2, has_events=True), {"forecasts__learn": None}),
    "with events": (
        Turn(LOCAL, has_events=True),
        {"engine_caches__stored": [(D1.id, 77, PROMPT + COMPLETION, PROMPT - ANSWER_CACHED + COMPLETION, NOW_S)]},
    ),
    "split, with events": (
        Turn(SPLIT, HANDOFF, has_events=True),
        {
            "metrics__tokens__add": [(Route.SPLIT, PROMPT, P_CACHED, COMPLETION)],
            "templates__computed": [(D1.id, PROMPT)],
            "templates__learn": "by P",
            "touches__answered": [(P_CACHED,)],
            "engine_caches__stored": [
                (P2.id, 77, PROMPT, PROMPT - P_CACHED, NOW_S),
                (D1.id, 77, PROMPT + COMPLETION, COMPLETION, NOW_S),  # D does not say how much of a handoff it had
            ],
            "outcome": BY_P,
        },
    ),
    "read back, with events": (
        Turn(READBACK, HANDOFF, has_events=True),
        {
            "metrics__tokens__add": [(Route.READBACK, PROMPT, P_CACHED, COMPLETION)],
            "templates__computed": [(D1.id, PROMPT)],
            "templates__learn": None,
            "touches__answered": [(None,)],
            "engine_caches__stored": [(D1.id, 77, PROMPT + COMPLETION, COMPLETION, NOW_S)],
            "outcome": {"cached_tokens": None},
        },
    ),
    "all of it on P, with events": (
        Turn(SPLIT, HANDOFF, is_finished_on_prefill=True, has_events=True),
        {
            "metrics__tokens__add": [(Route.SPLIT, PROMPT, P_CACHED, COMPLETION)],
            "templates__learn": None,
            "touches__answered": [(P_CACHED,)],
            "outcome": BY_P | {"decode": None},
        },
    ),
    "on from a response that no session has": (
        Turn(LOCAL, source=None, continues_response=True),
        {"tokens__learn": [("m", (), PROMPT - 960, COMPLETION)]},  # what that adds has tokens, but no bytes here
    ),
    "on from a response of its session": (Turn(LOCAL, continues_response=True), {}),
    "a first turn": (Turn(LOCAL, source=None), {}),
    "a prompt that no tokenizer has counted": (Turn(LOCAL, is_counted=False), {"count_checks__learn": None}),
}


@pytest.mark.parametrize("row", ROWS)
def test_each_book_is_told_its_part(row: str) -> None:
    turn, changes = ROWS[row]
    told, made, match = told_of(turn)
    changes = dict(changes)
    if changes.get("templates__learn") == "by P":
        cached = ANSWER_CACHED if turn.handoff is None else P_CACHED
        changes["templates__learn"] = [("m", P2.id, made.request.prompt.chain, PROMPT, cached)]
    assert told == usual(made, match, **changes)
    receipt, cached = made.receipt, ANSWER_CACHED if turn.handoff is None else P_CACHED
    assert (receipt.prompt_tokens, receipt.completion_tokens, receipt.cached_tokens) == (PROMPT, COMPLETION, cached)


def test_only_a_turn_after_an_answer_is_a_return() -> None:
    told = Told()
    match = told_of(Turn(LOCAL))[2]
    learner = Learner(cast(Any, SimpleNamespace(**dict.fromkeys(BOOKS, Book("forecasts", told)))), Drain(), None)
    learner.began(match, "m", NOW_S)
    assert told == {}
    learner.began(replace(match, ended_s=9.0, calls_tool=True), "m", NOW_S)
    assert told == {"forecasts.learn": [(SessionReturned("m", 2, True, 9.0, NOW_S),)]}


def test_an_answer_without_usage_teaches_nothing() -> None:
    told, made, _ = told_of(Turn(LOCAL, has_events=True, summary=AnswerSummary(finish_reason="stop")))
    assert told == {"metrics.turns.add": [("", "", "completed")]}
    assert (made.receipt.finish_reason, made.receipt.prompt_tokens) == ("stop", None)
