"""Whether a worker's 200 is an answer: has it begun, is it whole, is it an error?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from ..errors import LegError, refusal
from ..failures import Cause, Phase
from ..fleet.view import WorkerView
from ..openai.answer import ABORTED, AnswerObserver, AnswerSummary
from ..openai.edits import Redaction
from ..openai.request import CHOOSING, Endpoint
from ..openai.stream_relay import StreamRelay
from ..runtime.loop_watch import STOOD_STILL_S
from .call import Answer

OPENING_LIMIT_BYTES = 8 * 1024 * 1024  # held of a stream until it has begun; a single event of 4 MiB is in pieces

Redacting = Callable[[WorkerView], Redaction]  # what no client may learn from this worker; asked for errors alone


def has_begun(endpoint: Endpoint, observer: AnswerObserver) -> bool:
    """Whether the answer has begun, so that it goes to the client. The opening event of a stream is no answer yet."""
    summary = observer.summary
    if summary.first_token_seen or summary.ended or summary.error is not None or summary.undecodable:
        return True
    # Chat opens with the role; any event after it, even an empty delta, comes from the model. If that event ends the
    # answer, the usage after it tells whether there was a token.
    is_open = summary.events > 1 and summary.finish_reason is None
    return endpoint in CHOOSING and is_open


async def until_begun(
    endpoint: Endpoint, answer: Answer, relay: StreamRelay, observer: AnswerObserver, idle_s: float
) -> bytes:
    """The client's first bytes of a stream. idle_s: between two events; the first one has the answer's own time."""
    parts: list[bytes] = []  # `list[bytes]()` takes ten times as long
    events = held_bytes = 0
    now = asyncio.get_running_loop().time
    # One limit for all reads: a worker that only sends comments has not answered.
    by_s = now() + answer.first_s
    while not has_begun(endpoint, observer):
        chunk = await answer.chunk(by_s=by_s)
        if not chunk:
            raise answer.failure("the worker ended its answer before it began", Cause.RESET)
        parts.append(relay.feed(chunk))
        held_bytes += len(parts[-1])
        if held_bytes > OPENING_LIMIT_BYTES:
            if observer.summary.events == 0:
                raise answer.failure("the worker sends only comments", Cause.MALFORMED)
            break  # an event that large, say: from here on the client's pace bounds what is held
        if events == 0 < observer.summary.events:
            events = observer.summary.events
            by_s = now() + idle_s
        elif now() - by_s > STOOD_STILL_S:  # else it would have ended at its deadline
            by_s = now() + (idle_s if events else answer.first_s)
    return b"".join(parts)


def check_begun(observer: AnswerObserver, view: WorkerView, redaction: Redacting) -> None:
    """LegError for a stream that begins with an error, with something that is no event, or with an abort."""
    summary = observer.summary
    if summary.first_token_seen:
        return
    if summary.error is not None:
        raise _refused(summary.error, view, redaction)
    if summary.undecodable or _was_aborted(summary) or (summary.ended and not summary.events):
        raise _malformed(view)


def check_whole(endpoint: Endpoint, observer: AnswerObserver, view: WorkerView, redaction: Redacting) -> None:
    """LegError for a 200 without an answer: not JSON, empty, an error, or aborted by the engine."""
    summary = observer.summary
    if summary.error is not None:
        raise _refused(summary.error, view, redaction)
    # A response that is computed in the background has only an id yet.
    is_queued = endpoint is Endpoint.RESPONSES and summary.response_id is not None and summary.finish_reason is None
    is_empty = not summary.first_token_seen and summary.finish_reason is None
    # The client has seen nothing, so an answer that the engine aborted half-way is tried again too.
    if summary.undecodable or _was_aborted(summary) or (is_empty and not is_queued):
        raise _malformed(view)


def _was_aborted(summary: AnswerSummary) -> bool:
    """Whether the engine gave up. vLLM ends most responses as usual then, which shows only where it counts no token: a
    model that has nothing to say still generates its end of turn."""
    return summary.finish_reason == ABORTED or (summary.completion_tokens == 0 and not summary.first_token_seen)


def _refused(error: bytes, view: WorkerView, redaction: Redacting) -> LegError:
    told = b"" if redaction(view).applies_to(error) else error
    return refusal(_error_status(error), told, worker=view.id, phase=Phase.FIRST_EVENT)


def _malformed(view: WorkerView) -> LegError:
    message = "the worker's 200 holds no answer"
    return LegError(message, worker=view.id, phase=Phase.FIRST_EVENT, cause=Cause.MALFORMED)


def _error_status(body: bytes) -> int:
    """The HTTP status in an error event, 500 where it has none."""
    try:
        code = msgspec.json.decode(body)["error"]["code"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return 500
    return code if isinstance(code, int) and 400 <= code < 600 else 500
