"""A SPLIT that a sidecar runs: what the head of its answer makes of the turn, and whom a failure is held against."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace as changed

from ppd.proxy.beliefs.turn_touches import NoTouches
from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Leg, Phase
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Role
from ppd.proxy.policy import Decision, Route
from ppd.proxy.routing.attempt import Attempt
from ppd.proxy.routing.legs.by_sidecar import (
    HANDOFF_FAILED,
    NO_HANDOFF,
    NOT_ASKED,
    PREFILL_FAILED,
    error_by_prefill,
    note_legs,
)
from ppd.proxy.routing.state import State
from ppd.proxy.upstream.sidecar import NOT_ALLOWED, EndedLeg, SplitLegs
from tests.support.attempts import decision, running, view

P = view(Role.PREFILL)


class Noted(NoTouches):
    """What P's cache is told."""

    found: list[int | None] = msgspec.field(default_factory=list)

    def prefilled(self, cached: int | None) -> None:
        self.found.append(cached)


class Health:
    def __init__(self) -> None:
        self.said: list[tuple[Leg, Cause, str] | str] = []

    def failed(self, leg: Leg, exc: LegError, _: Decision, __: float) -> None:
        self.said.append((leg, exc.cause, exc.worker))

    def left(self, _: Decision, __: float) -> None:
        self.said.append("left")


class Counter:
    """Of metrics."""

    def __init__(self) -> None:
        self.counted: list[tuple[str, ...]] = []

    def labels(self, *labels: str) -> Counter:
        self.counted.append(labels)
        return self

    def inc(self) -> None: ...


class Metrics:
    def __init__(self) -> None:
        self.failures, self.handoffs_missing = Counter(), Counter()


class Parts:
    """Those of a proxy's state that a sidecar's word changes."""

    def __init__(self) -> None:
        self.health, self.metrics = Health(), Metrics()


def attempt_of(*, has_sidecar: bool = True, is_trusted: bool = True) -> Attempt:
    plain = view(Role.DECODE)
    worker = replace(plain.worker, has_sidecar=has_sidecar, is_trusted=is_trusted)
    decode: WorkerView = changed(plain, worker=worker)
    made = running(decision(Leg.DECODE, P, decode), Leg.DECODE)
    made.touches = cast(Any, Noted())
    made.foreseen = cast(Any, "the times of a SPLIT")
    made.receipt.route = Route.SPLIT
    made.receipt.legs[-1].started_s = 2.0
    return made


def ended(kind: Leg, error: str = "", phase: Phase | None = Phase.SENT) -> EndedLeg:
    return EndedLeg(kind=kind, started_s=0.5, ended_s=1.0, status=200, phase=phase if error else None, error=error)


P_WELL, D = ended(Leg.PREFILL), attempt_of().decode
PAIR = Leg.DECODE, Cause.SERVER, D


@pytest.mark.parametrize(
    ("legs", "reason", "said"),
    [
        ([], NOT_ASKED, ["left"]),
        ([ended(Leg.PREFILL, Cause.RESET)], PREFILL_FAILED, [PAIR]),
        ([ended(Leg.PREFILL, NOT_ALLOWED)], PREFILL_FAILED, [PAIR]),
        ([ended(Leg.PREFILL, Cause.OVERLOADED)], PREFILL_FAILED, [(Leg.PREFILL, Cause.OVERLOADED, P.id)]),
        ([P_WELL, ended(Leg.DECODE, Cause.RESET)], HANDOFF_FAILED, [PAIR]),
    ],
)
def test_where_d_computed_alone_the_turn_is_a_local_one(legs: list[EndedLeg], reason: str, said: list[object]) -> None:
    made, state = attempt_of(), Parts()
    record = made.receipt.legs[-1]
    record.status = 200
    note_legs(made, record, SplitLegs(legs=legs), cast(State, state))
    assert (made.decision.route, made.decision.reason, made.decision.prefill) == (Route.LOCAL, reason, None)
    assert (made.receipt.route, made.receipt.reason, made.receipt.prefill) == (Route.LOCAL, reason, "")
    assert (record.kind, made.handoff, made.is_finished_on_prefill) == (Leg.LOCAL, None, False)
    assert made.foreseen is None
    assert state.health.said == said
    assert [leg.kind for leg in made.receipt.legs] == [*(leg.kind for leg in legs), Leg.LOCAL]


@pytest.mark.parametrize(
    ("told", "found", "handed_over", "finished", "missing"),
    [
        (None, [None], True, False, ""),  # another project's, which tells nothing
        (SplitLegs(legs=[P_WELL], is_handed_over=True, cached_tokens=64), [64], True, False, ""),
        (SplitLegs(legs=[P_WELL], is_by_prefill=True), [None], False, True, ""),
        (SplitLegs(legs=[P_WELL]), [], False, False, NO_HANDOFF),
    ],
)
def test_what_p_has_done_is_as_its_sidecar_tells(
    told: SplitLegs | None, found: list[int | None], handed_over: bool, finished: bool, missing: str
) -> None:
    made, state = attempt_of(), Parts()
    record = made.receipt.legs[-1]
    record.status = 200
    note_legs(made, record, told, cast(State, state))
    assert cast(Noted, made.touches).found == found
    assert (made.handoff is not None, made.is_finished_on_prefill) == (handed_over, finished)
    assert (made.receipt.handoff_missing or "") == missing
    assert state.metrics.handoffs_missing.counted == ([(missing,)] if missing else [])
    assert (made.decision.route, record.kind, state.health.said) == (Route.SPLIT, Leg.DECODE, [])


def test_an_error_tells_of_its_legs_and_changes_no_more() -> None:
    made, state = attempt_of(), Parts()
    record = made.receipt.legs[-1]
    record.status = 500
    lost, odd = ended(Leg.PREFILL, Cause.RESET), ended(Leg.PREFILL, "a word of its own")
    note_legs(made, record, SplitLegs(legs=[odd, lost]), cast(State, state))
    assert (made.decision.route, made.handoff, state.health.said) == (Route.SPLIT, None, [])
    first, second, own = made.receipt.legs
    assert (first.address, first.error, first.started_s, first.ended_s) == (P.worker.address, odd.error, 2.5, 3.0)
    assert (second.error, own) == (Cause.RESET, record)
    assert state.metrics.failures.counted == [(Leg.PREFILL, Phase.SENT, Cause.RESET)], "only words that are known"


@pytest.mark.parametrize(
    ("made", "told", "found"),
    [
        (attempt_of(), None, None),
        (attempt_of(), SplitLegs(), None),
        (attempt_of(has_sidecar=False), SplitLegs(legs=[ended(Leg.PREFILL, Cause.RESET)]), None),
        (attempt_of(), SplitLegs(legs=[P_WELL]), None),
        (attempt_of(), SplitLegs(legs=[ended(Leg.PREFILL, Cause.REQUEST)]), None),
        (attempt_of(), SplitLegs(legs=[P_WELL, ended(Leg.DECODE, Cause.RESET)]), None),
        (attempt_of(), SplitLegs(legs=[ended(Leg.PREFILL, Cause.RESET)]), (Cause.SERVER, D)),
        (attempt_of(), SplitLegs(legs=[ended(Leg.PREFILL, Cause.OVERLOADED)]), (Cause.OVERLOADED, P.id)),
        (attempt_of(is_trusted=False), SplitLegs(legs=[ended(Leg.PREFILL, Cause.OVERLOADED)]), (Cause.SERVER, D)),
    ],
)
def test_an_error_is_ps_where_its_leg_was_lost(
    made: Attempt, told: SplitLegs | None, found: tuple[Cause, str] | None
) -> None:
    """A stranger's sidecar could keep others from a P by saying that it is busy."""
    error = error_by_prefill(made, told)
    assert (None if error is None else (error.cause, error.worker)) == found
