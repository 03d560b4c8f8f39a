"""Which D are asked for a handle of the KV that they keep, what becomes of it, and which turns may read it back."""

from __future__ import annotations

import logging

import msgspec
from msgspec.structs import replace

from ..connectors import reads_back
from ..connectors.leg import Finished, Handoff, NoHandoff
from ..connectors.nixl import handle_params, kept_s
from ..connectors.prefill import engine_version
from ..errors import LegError
from ..failures import Cause
from ..fleet.worker import Role
from ..openai.answer import AnswerSummary
from ..openai.body_members import Edited, given
from ..openai.request import CHOOSING, Fields, Request
from ..policy import Turn
from ..policy.decision import Readable
from ..readback.handles import MARGIN_S, NOT_A_PREFIX, Handle, Handles
from ..sessions.matching import MatchKind
from ..sessions.table import SessionMatch
from ..tokenizer.count_checks import CountedPrompt
from .attempt import Attempt
from .state import State

log = logging.getLogger(__name__)

STREAMED_SINCE = (0, 33)  # vLLM: before, a stream has no handle
RETURN_IDS = "return_token_ids"
HANDLE_REFUSED, HANDLE_EXPIRED = "handle_refused", "handle_expired"  # why there is no handoff
_ASKED = {RETURN_IDS: msgspec.Raw(b"true")}


class Reader:
    """Of one process: gives each handle out once, and judges what P has made of it."""

    def __init__(self, handles: Handles) -> None:
        self._handles = handles

    def judged(self, handle: Handle, found: Handoff | Finished | NoHandoff) -> Handoff | Finished | NoHandoff:
        """What P has answered, unless it may have read other KV than the handle's."""
        if self._handles.uptime() > handle.until_s:
            return NoHandoff(HANDLE_EXPIRED)
        if isinstance(found, Handoff) or found == NoHandoff(NOT_A_PREFIX):
            self._handles.judged(handle.model, is_prefix=isinstance(found, Handoff))
        return found

    def asking(self, attempt: Attempt, fields: Fields) -> Fields:
        """The members of D's leg, with which its answer names the tokens that it has computed; if that is of use."""
        if not asks_handle(attempt):
            return fields
        attempt.asks_handle, attempt.decode_asked_s = True, self._handles.uptime()
        return Edited.of(fields, _ASKED)

    def after(self, exc: LegError, handle: Handle | None) -> NoHandoff:
        """P may have refused, or failed at, what the handle asked of it: then D computes alone. Else it is raised."""
        if handle is None or exc.cause not in (Cause.REQUEST, Cause.SERVER):
            raise exc
        log.warning("P could not read back from D, which computes the prompt itself: %s", exc)
        return NoHandoff(HANDLE_REFUSED)


def asks_handle(attempt: Attempt) -> bool:
    """Whether D's answer may have a handle that a later turn can use. D keeps the KV in any case."""
    decision, request = attempt.decision, attempt.request
    prefill, decode = decision.prefill, decision.decode.worker
    if prefill is None or attempt.handoff is None or decode.role is not Role.DECODE:
        return False
    if not (reads_back(decode) and reads_back(prefill.worker)):
        return False
    if not _is_plain(request) or given(request.fields, RETURN_IDS):  # as it says, the client sees them
        return False
    version = engine_version(decode.engine_version)
    return not request.stream or (version is not None and version >= STREAMED_SINCE)


def _is_plain(request: Request) -> bool:
    """Token ids say all of its prompt, and the answer has them; pictures have the ids of others as large."""
    is_text = not (request.has_media or given(request.fields, "prompt_embeds"))
    return is_text and request.endpoint in CHOOSING and request.choices == 1


def keep(state: State, match: SessionMatch, attempt: Attempt, summary: AnswerSummary) -> None:
    """After a whole answer: its handle, in place of the session's one before."""
    told, view, handoff = summary.handle, attempt.decision.decode, attempt.handoff
    params = None if told is None or handoff is None else handle_params(told.params, view.worker, handoff)
    if told is None or params is None:
        gone_on_from = match.held_tokens if match.kind is MatchKind.NEXT else None
        state.handles.answered(attempt.history, view.id, gone_on_from)
        return
    until_s = attempt.decode_asked_s + kept_s(view.worker) - MARGIN_S  # it has them for as long after its answer
    model, tokens, digest = attempt.request.model, told.tokens, told.digest
    state.handles.keep(attempt.history, Handle(params, tokens, digest, model, view.id, view.incarnation, until_s))


def with_readable(
    state: State, turn: Turn, match: SessionMatch, request: Request, counted: CountedPrompt | None
) -> Turn:
    """The turn, with what a P may read back of its session, as far as messages and tokens tell before it is asked."""
    if match.kind is not MatchKind.NEXT or match.source != match.history:
        return turn
    handle = state.handles.of(match.history)
    if handle is None:
        return turn
    view = state.registry.view(handle.decode)
    if view is None or view.incarnation != handle.incarnation or turn.decode != handle.decode:
        state.handles.drop(match.history)
        return turn
    is_prefix = match.held_tokens >= handle.tokens and handle.model == request.model and _is_plain(request)
    if is_prefix and counted is not None and counted.is_proven:
        is_prefix = handle.begins(counted.tokens.ids)
    if not is_prefix:
        return replace(turn, unreadable=NOT_A_PREFIX)
    return replace(turn, readable=Readable(handle.decode, handle.tokens))
