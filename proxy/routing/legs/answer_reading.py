"""Makes what reads an answer while the worker computes it, so that the first token does not wait for that."""

from __future__ import annotations

import asyncio

from ...connectors.leg import Handoff
from ...openai.answer import AnswerObserver
from ...openai.reply_key import ReplyKey
from ...openai.stream_relay import StreamRelay
from ...telemetry.receipts import LegRecord
from ..attempt import Attempt


class AnswerReading:
    """`prepare` once the request has been sent, and before the first byte of its answer is read."""

    __slots__ = ("_attempt", "_handoff", "_record", "_relay", "observer", "reply")

    observer: AnswerObserver
    reply: ReplyKey

    def __init__(self, attempt: Attempt, record: LegRecord) -> None:
        self._attempt = attempt
        self._record = record
        self._relay: StreamRelay | None = None
        self._handoff: Handoff | None = None  # by which the relay edits

    def prepare(self) -> None:
        attempt, request = self._attempt, self._attempt.request
        self.reply = reply = ReplyKey(request)
        self.observer = AnswerObserver(request.endpoint, reply, reads_handle=attempt.asks_handle)
        if request.stream:
            self._relay = self._made()

    def prepare_soon(self) -> None:
        """Where P's leg is written next, which must not wait for it. Before any answer is read all the same."""
        asyncio.get_running_loop().call_soon(self.prepare)

    def relay(self) -> StreamRelay:
        """Of a stream. P's leg may have ended, or a sidecar told of it, since it was prepared."""
        relay = self._relay
        if relay is None or self._handoff is not self._attempt.handoff:
            relay = self._relay = self._made()
        return relay

    def _made(self) -> StreamRelay:
        attempt = self._attempt
        self._handoff = attempt.handoff
        edits = attempt.edits(self._record, attempt.redaction(attempt.decision.decode))
        return StreamRelay(attempt.request.endpoint, edits, self.observer)
