"""How one request went, from what its client heard and the right texts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .client_view import Heard
from .records import ClientOutcome
from .workload import Move

_ABORT = "abort"  # the finish reason of an engine that gave up: vLLM's own mark of an answer that is not whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Reception:
    """How the client's side of it went."""

    status: int  # 0: none came
    left: bool = False  # by the client's own will
    lost: bool = False  # the connection ended in the middle of an answer
    stream: bool = False


def judge(
    heard: Heard, reception: Reception, expected: Mapping[int, str] | None, move: Move
) -> tuple[ClientOutcome, str]:
    """Outcome and detail. `expected`: the right texts by choice; None where there can be none.

    1. A client that left has still heard nothing but the right text.
    2. No status, or a connection that ended: nothing may end so.
    3. An error status is right where the request cannot be served by anyone; else it is a failure of its kind.
    4. Text that is not the beginning of the right text is wrong, whatever else happened.
    5. A 200 without its end must say so by an error, after which nothing comes; or by the engine's own abort.
    6. All of the right text.
    """
    if reception.left:
        place = _strays(heard, expected)
        return (ClientOutcome.WRONG, place) if place else (ClientOutcome.LEFT, "")
    if reception.status == 0:
        return ClientOutcome.UNANSWERED, ""
    if reception.status != 200:
        return _refusal(heard, reception.status, move)
    if expected is None:
        return ClientOutcome.WRONG, "an answer to a request that has none"
    if place := _strays(heard, expected):
        return ClientOutcome.WRONG, place
    if heard.events_after_end:
        return ClientOutcome.UNMARKED, "events after the end"
    if heard.error:
        return (ClientOutcome.UNMARKED, "an end after an error") if heard.ended else (ClientOutcome.BROKEN, heard.error)
    if reception.lost:
        return ClientOutcome.UNANSWERED, "the connection ended"
    if _ABORT in heard.finishes:
        return ClientOutcome.BROKEN, _ABORT
    if not heard.ended or heard.rest:
        return ClientOutcome.UNMARKED, "no end"
    if heard.texts != expected:
        return ClientOutcome.WRONG, "an end before all of the text"
    return ClientOutcome.COMPLETED, ""


def _refusal(heard: Heard, status: int, move: Move) -> tuple[ClientOutcome, str]:
    if move is Move.IMPOSSIBLE and status == 400:
        return ClientOutcome.REJECTED, ""
    return ClientOutcome.TIMED_OUT if status == 504 else ClientOutcome.FAILED, heard.error or "no error body"


def _strays(heard: Heard, expected: Mapping[int, str] | None) -> str:
    """Where what was heard is not the beginning of the right text; empty: nowhere."""
    for choice, text in heard.texts.items():
        right = (expected or {}).get(choice, "")
        if not right.startswith(text):
            at = next((at for at, (a, b) in enumerate(zip(text, right, strict=False)) if a != b), len(right))
            return f"choice {choice} from character {at} of {len(right)} on"
    return ""
