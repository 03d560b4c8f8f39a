"""Relays a stream to the client: whole events, as they come, edited only where they must be.

Pure: the caller reads from the worker and writes to the client. Each event is decoded at most once for the observer and
once for the edits; an event that cannot be parsed goes through unchanged.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from ..errors import error_body
from .answer import DONE, AnswerObserver
from .body_members import answer_as
from .edits import Dropped, Edits, edited_event, parted
from .plain_events import PlainEvents
from .request import Endpoint
from .sse import EventSplitter, Fragment, event_data, with_data

__all__ = ["Edits", "StreamRelay"]

BROKE_OFF = "the worker's answer ended before it was complete"
_KIND = "upstream_error"
_BAD_GATEWAY = 502


class _ErrorBody(msgspec.Struct):
    error: msgspec.Raw


class StreamRelay:
    """One streamed answer. `observer` sees every event as the worker wrote it, before the edits."""

    __slots__ = ("_edits", "_endpoint", "_is_finished", "_markers", "_may_pass", "_observer", "_plain", "_splitter")

    def __init__(self, endpoint: Endpoint, edits: Edits, observer: AnswerObserver) -> None:
        self._endpoint = endpoint
        self._edits = edits
        self._markers = edits.markers()
        self._observer = observer
        self._splitter: EventSplitter | None = None  # only within an event
        self._plain = PlainEvents(endpoint)
        self._may_pass = True  # between two events, and no error has come
        self._is_finished = False

    def passes(self, chunk: bytes) -> bool:
        """Whether this is one event that brings text and nothing else, as nearly every chunk is: send it unchanged.

        If so, the observer has already seen it: do not `feed` it too.
        """
        return self._may_pass and self._edits.hides is None and self._observes_text(chunk)

    def recount(self, cached_tokens: int) -> None:
        """P's count of cached tokens, where it is known only now."""
        self._edits = replace(self._edits, cached_tokens=cached_tokens)
        self._markers = self._edits.markers()

    @property
    def plain(self) -> tuple[bytes, bytes] | None:
        """How the next event is known to be plain, see `PlainEvents.pattern`; None where none may pass unseen."""
        return self._plain.pattern if self._may_pass and self._edits.hides is None else None

    def passed(self, text: str, events: int) -> None:
        """So many plain events with this text have gone to the client."""
        self._observer.observe_text(text, events)

    def feed(self, chunk: bytes) -> bytes:
        return chunk if self.passes(chunk) else self.edited(chunk)

    def edited(self, chunk: bytes) -> bytes:
        """As `feed`, of a chunk that is known not to pass."""
        splitter = self._splitter or EventSplitter()
        out = self._edits.shown(b"".join([self._relay(event) for event in splitter.feed(chunk)]))
        self._splitter = None if splitter.is_empty else splitter
        self._may_pass = self._splitter is None and self._observer.summary.error is None
        return out

    def rest(self) -> bytes:
        """What is held at the worker's end of file, which may be the end of the answer. Nothing but `finish` follows.

        A carriage return ends a line, but a line feed might have followed; or only the blank line is missing.
        """
        splitter, self._splitter = self._splitter, None
        return b"" if splitter is None else self._edits.shown(self._tail(splitter))

    def finish(self) -> bytes:
        """What goes to the client at the worker's end of file: an error event, unless the answer had ended."""
        if self._is_finished:
            return b""
        self._is_finished = True
        tail = self.rest()
        summary = self._observer.summary
        if summary.ended or summary.error is not None:
            return tail
        return tail + broken_off(self._endpoint)

    def _tail(self, splitter: EventSplitter) -> bytes:
        is_cut = splitter.in_fragment
        tail = splitter.rest()  # goes on if only its blank line is missing: half an event would corrupt the next
        if is_cut:
            return tail + b"\n\n"
        data = event_data(tail)
        if data is None:
            return b"" if tail.strip(b"\r\n") else tail
        if data != DONE and answer_as(data, msgspec.Raw) is None:
            return b""
        event = self._relay(tail)
        return event if not event or event.endswith((b"\n\n", b"\r\r", b"\n\r")) else event + b"\n\n"

    def _relay(self, event: bytes) -> bytes:
        if self._observer.summary.error is not None:
            return b""  # vLLM sends [DONE] after an error: a client would take what it has for the whole answer
        if self._observes_text(event):
            return event
        if type(event) is Fragment:
            return event
        shown = parted(event) if self._edits.hide_token_ids else None
        if shown is not None and (text := self._plain.text(shown[0])) is not None:
            self._observer.observe_tokens(text, shown[1])
            return shown[0]
        data = event_data(event)
        if data is None:
            return event
        self._observer.observe(data)
        redaction = self._edits.redaction
        if self._observer.summary.error is not None and redaction and redaction.applies_to(data):
            return broken_off(self._endpoint)
        if self._plain.is_learning:
            self._plain.learn(event if shown is None else shown[0])
        for marker in self._markers:
            if marker in data:
                return self._edit(event, data)
        return event

    def _observes_text(self, event: bytes) -> bool:
        text = self._plain.text(event)
        if text is None:
            return False
        self._observer.observe_text(text)
        return True

    def _edit(self, event: bytes, data: bytes) -> bytes:
        new = edited_event(self._endpoint, data, self._edits)
        if new is None:
            return event
        return b"" if isinstance(new, Dropped) else with_data(event, new)


def broken_off(endpoint: Endpoint, why: str = BROKE_OFF, code: int = _BAD_GATEWAY) -> bytes:
    """The error event that ends an incomplete answer, in the shape on which each endpoint's clients raise.

    No terminator follows, so no client takes the answer for complete.
    """
    if endpoint is Endpoint.MESSAGES:
        error = {"type": "error", "error": {"type": "api_error", "message": why}}
        return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"
    body = error_body(why, _KIND, code)
    if endpoint is not Endpoint.RESPONSES:
        return b"data: " + body + b"\n\n"
    # Responses has an error event of its own, which OpenAI's client yields; it raises on the `error` member.
    inner = msgspec.json.decode(body, type=_ErrorBody).error
    own = {"type": "error", "message": why, "code": str(code), "param": None, "sequence_number": 0}
    return b"event: error\ndata: " + msgspec.json.encode({**own, "error": inner}) + b"\n\n"
