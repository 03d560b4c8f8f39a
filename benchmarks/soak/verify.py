"""How one request ended, from what its client received and the right texts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .client_view import ClientView
from .records import ClientOutcome
from .workload import Move

_ABORT = "abort"  # vLLM's finish reason for an answer that the engine gave up


@dataclass(frozen=True, slots=True, kw_only=True)
class Reception:
    """How the HTTP exchange went."""

    status: int  # 0: no response
    left: bool = False  # the client closed the connection on purpose
    lost: bool = False  # the connection ended in the middle of an answer


def verify(
    view: ClientView, reception: Reception, expected: Mapping[int, str] | None, move: Move
) -> tuple[ClientOutcome, str]:
    """Outcome and detail. `expected`: the right texts by choice; None where there can be none.

    1. A client that left: the text until then must be the beginning of the right text.
    2. No response, or a connection that ended in the middle of one: always a defect.
    3. An error status is right for a request that no engine can serve; otherwise it is a failure.
    4. Text that is not the beginning of the right text is wrong, whatever else happened.
    5. An incomplete 200 must say so: by an error event, after which nothing follows, or by the engine's finish reason
       `abort`.
    6. The rest is completed if all of the right text came.
    """
    if reception.left:
        difference = _difference(view, expected)
        return (ClientOutcome.WRONG, difference) if difference else (ClientOutcome.LEFT, "")
    if reception.status == 0:
        return ClientOutcome.UNANSWERED, ""
    if reception.status != 200:
        return _refusal(view, reception.status, move)
    if expected is None:
        return ClientOutcome.WRONG, "an answer to a request that has none"
    if difference := _difference(view, expected):
        return ClientOutcome.WRONG, difference
    if view.events_after_end:
        return ClientOutcome.UNMARKED, "events after the end"
    if view.error:
        return (ClientOutcome.UNMARKED, "an end after an error") if view.ended else (ClientOutcome.BROKEN, view.error)
    if reception.lost:
        return ClientOutcome.UNANSWERED, "the connection ended"
    if _ABORT in view.finishes:
        return ClientOutcome.BROKEN, _ABORT
    if not view.ended or view.rest:
        return ClientOutcome.UNMARKED, "no end"
    if view.texts != expected:
        return ClientOutcome.WRONG, "an end before all of the text"
    return ClientOutcome.COMPLETED, ""


def _refusal(view: ClientView, status: int, move: Move) -> tuple[ClientOutcome, str]:
    if move is Move.IMPOSSIBLE and status == 400:
        return ClientOutcome.REJECTED, ""
    return ClientOutcome.TIMED_OUT if status == 504 else ClientOutcome.FAILED, view.error or "no error body"


def _difference(view: ClientView, expected: Mapping[int, str] | None) -> str:
    """Where the received text departs from the right text; empty if it is the beginning of it."""
    for choice, text in view.texts.items():
        right = (expected or {}).get(choice, "")
        if not right.startswith(text):
            at = next((at for at, (a, b) in enumerate(zip(text, right, strict=False)) if a != b), len(right))
            return f"choice {choice} from character {at} of {len(right)} on"
    return ""
