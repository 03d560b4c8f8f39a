"""Answers a list of prompts: one turn for each, a few at once, merged into one answer.

Each turn is routed, retried and accounted for by itself. The first that fails for good ends the others; the client gets
its error, as a status while nothing has been sent, else as the stream's last event.

A turn that has begun never waits for another turn of its list, and gives back what it holds when its own answer has
been read. So a limit on turns at work delays a list but cannot deadlock it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from ..bodies.body_reader import Body, body_of
from ..connectors.leg import REQUEST_ID
from ..errors import LegError, PPDError, error_body
from ..openai.prompt_list import AnswerMerge, BrokenAnswer, PromptList, StreamMerge, StreamPart
from ..openai.request import Request
from ..telemetry.receipts import LegRecord, Receipt
from ..upstream.call import ANSWER_LIMIT_BYTES
from .attempt import TurnContext
from .router import TurnReply
from .stream import LargeBody

log = logging.getLogger(__name__)

AT_ONCE = 8  # turns of one list, so that one client's list does not fill the fleet


class Answering(Protocol):
    async def answer(self, request: Request, receipt: Receipt, context: TurnContext) -> TurnReply: ...


@dataclass(frozen=True, slots=True)
class ListTurn:
    """A request with a list of prompts, and what its turns share."""

    prompts: PromptList
    parse: Callable[[Body], Awaitable[Request]]
    receipt: Receipt  # the request's own; each turn's has its number after the id
    context: TurnContext

    def receipt_of(self, at: int) -> Receipt:
        return msgspec.structs.replace(self.receipt, id=f"{self.receipt.id}-{at}", vetoes=(), legs=[])

    def note_workers(self, legs: Iterable[LegRecord]) -> None:
        """Of one of its turns, for the access log: the request's own receipt gets one leg of each worker."""
        known = {leg.worker: leg for leg in (*self.receipt.legs, *legs)}
        self.receipt.legs = list(known.values())


class FanOut:
    def __init__(self, router: Answering) -> None:
        self._router = router

    async def answer(self, turn: ListTurn) -> TurnReply:
        """Raises PPDError where a turn fails. Must run in the request's own task."""
        if turn.receipt.stream:
            return await _Stream(turn, self._router).open()
        merge, replies = AnswerMerge(turn.prompts.choices, ANSWER_LIMIT_BYTES), dict[int, TurnReply]()

        async def one(at: int) -> None:
            reply = await _asked(self._router, turn, at)
            reply.written()
            body = reply.body
            if isinstance(body, LargeBody):
                body = b"".join([part async for part in body.chunks()])
            if not isinstance(body, bytes):  # a stream, though nobody asked for one
                body.abandon()
                raise BrokenAnswer
            merge.add(at, body)
            replies[at] = TurnReply(reply.content_type, reply.headers, b"")

        await _each(len(turn.prompts.prompts), one)
        in_order = [reply for _, reply in sorted(replies.items())]
        return TurnReply(in_order[0].content_type, _headers(turn, in_order), merge.whole())


@dataclass(slots=True)
class _Stream:
    """One streamed answer. At most one piece waits for the client, and behind it one of each turn."""

    turn: ListTurn
    router: Answering
    first: TurnReply | None = None  # of the turn that was the first to begin
    failure: PPDError | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # there is something for the client, or a failure
    out: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(1))
    end: bytes | None = None  # the last events, once all turns have ended
    driver: asyncio.Task[None] | None = None

    async def open(self) -> TurnReply:
        """The reply once one turn has begun to answer; waiting for the others would keep their workers reserved."""
        self.driver = asyncio.create_task(self._drive(), name=f"prompts of {self.turn.receipt.id}")
        try:
            await self.begun.wait()
            if self.failure is not None:
                raise self.failure
        except BaseException:
            self.abandon()
            raise
        assert self.first is not None, "it has begun and not failed"
        return TurnReply(self.first.content_type, _headers(self.turn, [self.first]), self)

    def abandon(self) -> None:
        if self.driver is not None:
            self.driver.cancel()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        while self.end is None or not self.out.empty():
            if data := await self.out.get():
                yield data
        yield self.end

    async def _drive(self) -> None:
        """Runs the turns and always ends the stream.

        Awaits nothing after them: a TaskGroup that fails and is cancelled at once raises only the failure.
        """
        prompts = self.turn.prompts
        merge = StreamMerge(len(prompts.prompts), prompts.choices)
        try:
            await _each(len(prompts.prompts), lambda at: self._one(at, merge.part(at)))
            self.end = merge.end()
        except PPDError as exc:
            self.failure = exc
        except Exception:
            log.exception("a list of prompts failed")
            self.failure = PPDError("internal error")
        if self.failure is not None:
            self.end = _error_event(self.failure)
        self.begun.set()
        if self.out.empty():  # the reader may be waiting
            self.out.put_nowait(b"")

    async def _one(self, at: int, part: StreamPart) -> None:
        reply = await _asked(self.router, self.turn, at)
        reply.written()
        self.first = self.first or reply
        if isinstance(reply.body, bytes):  # of a stream that was over when it began; else `end` finds no end
            if data := part.feed(reply.body):
                self.begun.set()
                await self.out.put(data)
            part.end()
            return
        try:
            async with aclosing(reply.body.chunks()) as chunks:
                async for chunk in chunks:
                    if data := part.feed(chunk):
                        self.begun.set()
                        await self.out.put(data)
        finally:
            reply.body.abandon()
        part.end()


async def _each(count: int, one: Callable[[int], Coroutine[None, None, None]]) -> None:
    """Each turn in a task of its own, as the router releases a turn's reservations when its task ends.

    The first failure ends all and is raised.
    """
    places = asyncio.Semaphore(AT_ONCE)
    try:
        async with asyncio.TaskGroup() as group:
            for at in range(count):
                await places.acquire()
                group.create_task(one(at)).add_done_callback(lambda _: places.release())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _asked(router: Answering, turn: ListTurn, at: int) -> TurnReply:
    request = await turn.parse(body_of(turn.prompts.parts(at)))
    receipt = turn.receipt_of(at)
    try:
        return await router.answer(request, receipt, turn.context)
    finally:
        turn.note_workers(receipt.legs)


def _headers(turn: ListTurn, replies: Sequence[TurnReply]) -> dict[str, str]:
    """The turns' headers in the prompts' order: of a decision's each value once, of a worker's the first."""
    merged = dict[str, str]()
    for name in dict.fromkeys(name for reply in replies for name in reply.headers):
        values = dict.fromkeys(reply.headers[name] for reply in replies if name in reply.headers)
        merged[name] = ", ".join(values) if name.startswith("X-PPD-") else next(iter(values))
    return merged | {REQUEST_ID: turn.receipt.id}


def _error_event(exc: PPDError) -> bytes:
    if isinstance(exc, BrokenAnswer) and exc.event:
        return exc.event
    body = error_body(exc.message, exc.kind, exc.code or exc.status, exc.param)
    if isinstance(exc, LegError) and exc.is_openai_error:
        body = msgspec.json.encode(msgspec.json.decode(exc.body))  # on one line, as an event needs it
    return b"data: " + body + b"\n\n"
