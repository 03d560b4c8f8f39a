"""A SPLIT that a sidecar runs: the proxy asks it once, and goes by what the answer's head tells of P.

What the sidecar says is about the way from its P to its engine, so what is lost there counts against the pair, as an
error does that the engine answers with. The connection to the sidecar, and answers that are none, count against D.
"""

from __future__ import annotations

from msgspec.structs import replace

from ...connectors import plain_leg
from ...connectors.leg import Handoff, LegRequest
from ...errors import LegError, refusal
from ...failures import ROWS, Cause, Leg, Phase
from ...openai.request import Fields
from ...policy import Route
from ...telemetry.receipts import LegRecord
from ...upstream.sidecar import PREFILLER, EndedLeg, SplitLegs
from ..attempt import Attempt
from ..state import State

OK, UNAVAILABLE = 200, 503
PREFILL_FAILED, HANDOFF_FAILED = "prefill_failed", "handoff_failed"  # reasons, as the sidecar's own
NOT_ASKED = "prefill_not_asked"  # its own P, say, by another name
NO_HANDOFF = "by_sidecar"  # P has answered its sidecar, but with nothing that D could use


def sidecar_leg(attempt: Attempt, fields: Fields) -> LegRequest:
    assert attempt.decision.prefill is not None, "it has a P"
    leg = plain_leg(attempt.request.endpoint, fields, attempt.leg_id("d"))
    return replace(leg, headers={**leg.headers, PREFILLER: attempt.decision.prefill.worker.address})


def note_legs(attempt: Attempt, record: LegRecord, told: SplitLegs | None, state: State) -> None:
    """The head of the sidecar's answer has come. record: of the one leg; told: None: it has told nothing."""
    for leg in () if told is None else told.legs:
        _note(attempt, record, leg, state)
    if record.status != OK:
        return
    if told is None or told.is_handed_over:
        attempt.handoff = Handoff(params={}, tokens=0, cached_tokens=None if told is None else told.cached_tokens)
        attempt.touches.prefilled(attempt.handoff.cached_tokens)
    elif told.is_by_prefill:
        attempt.is_finished_on_prefill = True
        attempt.touches.prefilled(None)
    elif not told.legs:
        state.health.left(attempt.decision, attempt.asked_s)
        _go_on_without(attempt, record, NOT_ASKED)
    elif (lost := told.legs[-1]).is_lost:
        _blame(attempt, lost, state)
        _go_on_without(attempt, record, PREFILL_FAILED if lost.kind is Leg.PREFILL else HANDOFF_FAILED)
    else:
        attempt.receipt.handoff_missing = NO_HANDOFF
        state.metrics.handoffs_missing.labels(NO_HANDOFF).inc()


def error_by_prefill(attempt: Attempt, told: SplitLegs | None) -> LegError | None:
    """What a sidecar's error is of P, or of the way to it; None: it is the request's, or its engine's."""
    if not attempt.is_by_sidecar or told is None or not told.legs:
        return None
    lost = told.legs[-1]
    if not lost.is_lost or lost.kind is not Leg.PREFILL:
        return None
    return _busy(attempt, lost) or refusal(500, b"", worker=attempt.decode, phase=Phase.HEADERS)


def _note(attempt: Attempt, record: LegRecord, leg: EndedLeg, state: State) -> None:
    """A leg as the sidecar tells it, before the one by which it was asked."""
    decision = attempt.decision
    view = decision.prefill if leg.kind is Leg.PREFILL and decision.prefill is not None else decision.decode
    noted = LegRecord(
        kind=leg.kind,
        worker=view.name,
        address=view.worker.address,
        started_s=record.started_s + leg.started_s,
        ended_s=record.started_s + leg.ended_s,
        status=leg.status,
        phase=leg.phase,
        error=leg.error or None,
        told_by=decision.decode.name,
    )
    attempt.receipt.legs.insert(-1, noted)
    if (leg.kind, leg.phase, leg.error) in ROWS:
        state.metrics.failures.labels(leg.kind, leg.phase, leg.error).inc()


def _blame(attempt: Attempt, lost: EndedLeg, state: State) -> None:
    """A P that was busy is passed over; all else counts against the pair."""
    if (busy := _busy(attempt, lost)) is not None:
        state.health.failed(Leg.PREFILL, busy, attempt.decision, attempt.asked_s)
        return
    exc = refusal(500, b"", worker=attempt.decode, phase=Phase.HEADERS)
    state.health.failed(Leg.DECODE, exc, attempt.decision, attempt.asked_s)


def _busy(attempt: Attempt, lost: EndedLeg) -> LegError | None:
    """P's own answer that it is busy; a stranger's sidecar could say so to keep others from this P."""
    decision = attempt.decision
    if lost.kind is not Leg.PREFILL or lost.error != Cause.OVERLOADED or not decision.decode.worker.is_trusted:
        return None
    assert decision.prefill is not None, "it had a P"
    return refusal(UNAVAILABLE, b"", worker=decision.prefill.id, phase=Phase.HEADERS)


def _go_on_without(attempt: Attempt, record: LegRecord, reason: str) -> None:
    """D's engine has computed the prompt itself: from here on the turn is a LOCAL one."""
    receipt = attempt.receipt
    attempt.decision = replace(attempt.decision, route=Route.LOCAL, reason=reason, prefill=None, prediction=None)
    attempt.foreseen = None
    receipt.route, receipt.reason, receipt.prefill = Route.LOCAL, reason, ""
    record.kind = Leg.LOCAL
