"""A list's turns side by side: how many, how far ahead of the client, and what ends them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from ppd.proxy.admission.keys import Client
from ppd.proxy.errors import NoWorkerError, PPDError
from ppd.proxy.failures import Leg
from ppd.proxy.openai.prompt_list import BrokenAnswer, prompt_list
from ppd.proxy.openai.request import Request
from ppd.proxy.openai.stream_relay import broken_off
from ppd.proxy.routing.attempt import TurnContext
from ppd.proxy.routing.prompt_fan_out import AT_ONCE, FanOut, ListTurn
from ppd.proxy.routing.router import TurnReply
from ppd.proxy.telemetry.access_log import AccessRecord, fields_of
from ppd.proxy.telemetry.receipts import LegRecord, Receipt
from tests.support.requests import COMPLETIONS, parse_bytes

DONE = b"data: [DONE]\n\n"
CHUNK = b'data: {"id":"x","choices":[{"index":0,"text":"t"}]}\n\n'
ERROR = b'data: {"error":{"message":"m","code":500}}\n\n'
WHOLE = b'{"id":"x","choices":[{"index":0,"text":"t"}]}'


@dataclass
class FakeRouter:
    """Answers every turn with `chunks` events, or as `fails` says; `places` are held until the turn is ended."""

    chunks: int = 3
    last: bytes = DONE
    places: int = 10_000
    fails: Callable[[int], Exception | None] = lambda _: None
    gate: asyncio.Event | None = None  # whole answers come when it is set
    receipts: list[Receipt] = field(default_factory=list)
    pulled: int = 0  # chunks read of all streams
    running: int = 0

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.places)

    async def answer(self, request: Request, receipt: Receipt, asker: TurnContext) -> TurnReply:
        self.receipts.append(receipt)
        at = int(receipt.id.rpartition("-")[2])
        receipt.legs.append(LegRecord(kind=Leg.DECODE, worker=f"D{at % 2}", address="", started_s=0.0))
        if (exc := self.fails(at)) is not None:
            raise exc
        shown = {"X-Request-Id": receipt.id, "X-PPD-Route": "SPLIT", "X-PPD-Decode": f"D{at % 2}"}
        await self._places.acquire()
        self.running += 1
        if request.stream:
            return TurnReply("text/event-stream", shown, FakeBody(self))
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self._left()
            raise
        return TurnReply("application/json", shown, WHOLE, end=self._left)

    def _left(self) -> None:
        self.running -= 1
        self._places.release()


class FakeBody:
    """One turn's stream; its place is held until somebody gives it up."""

    def __init__(self, router: FakeRouter) -> None:
        self._router = router

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        for _ in range(self._router.chunks):
            self._router.pulled += 1
            yield CHUNK
        yield self._router.last

    def abandon(self) -> None:
        self._router._left()


async def parsed(body: Any) -> Request:
    return parse_bytes(body, COMPLETIONS)


def list_turn(count: int, *, stream: bool) -> ListTurn:
    body = json.dumps({"model": "m", "prompt": ["a"] * count, "stream": stream}).encode()
    request = parse_bytes(body, COMPLETIONS)
    prompts = prompt_list(request, 10**6)
    assert prompts is not None
    receipt = Receipt(id="r", at="", endpoint=COMPLETIONS.value, model="m", stream=stream, session="", turn=0, kind="")
    return ListTurn(prompts, parsed, receipt, TurnContext(Client(name="", tenant=""), {}))


async def settled() -> None:
    """Lets everything run that can."""
    for _ in range(200):
        await asyncio.sleep(0)


async def stream_of(router: FakeRouter, count: int) -> tuple[TurnReply, Any]:
    reply = await FanOut(router).answer(list_turn(count, stream=True))
    assert not isinstance(reply.body, bytes)
    return reply, reply.body.chunks()


async def test_at_most_so_many_turns_are_at_work() -> None:
    router = FakeRouter(gate=asyncio.Event())
    answering = asyncio.create_task(FanOut(router).answer(list_turn(AT_ONCE * 3, stream=False)))
    await settled()
    assert router.running == len(router.receipts) == AT_ONCE
    assert router.gate is not None
    router.gate.set()
    reply = await answering
    assert isinstance(reply.body, bytes)
    assert len(json.loads(reply.body)["choices"]) == AT_ONCE * 3


@pytest.mark.parametrize("streams", [True, False])
async def test_fewer_places_than_prompts_lock_nothing_up(streams: bool) -> None:
    router = FakeRouter(places=2)
    async with asyncio.timeout(60):
        reply = await FanOut(router).answer(list_turn(20, stream=streams))
        if not isinstance(reply.body, bytes):
            parts = [part async for part in reply.body.chunks()]
            assert len(parts) == 20 * router.chunks + 1
            assert parts[-1] == DONE
    assert router.running == 0


async def test_a_client_that_reads_nothing_holds_every_stream_back() -> None:
    router = FakeRouter(chunks=1000)
    reply, body = await stream_of(router, AT_ONCE * 2)
    assert not isinstance(reply.body, bytes)
    await settled()
    assert router.pulled == AT_ONCE + 1, "one that waits for the client, and one of each stream behind it"
    await anext(body)
    await settled()
    assert router.pulled == AT_ONCE + 2
    reply.body.abandon()
    await settled()
    assert router.running == 0


async def test_a_client_that_leaves_before_it_reads_ends_every_stream() -> None:
    router = FakeRouter(chunks=1000)
    reply, _ = await stream_of(router, AT_ONCE)
    assert not isinstance(reply.body, bytes)
    reply.body.abandon()
    await settled()
    assert router.running == 0


async def test_a_cancelled_request_ends_its_turns() -> None:
    router = FakeRouter(gate=asyncio.Event())
    answering = asyncio.create_task(FanOut(router).answer(list_turn(AT_ONCE, stream=False)))
    await settled()
    answering.cancel()
    await settled()
    assert answering.cancelled()
    assert router.running == 0


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("failing", [None, 3])
async def test_the_access_log_names_each_worker_of_a_list_once(streams: bool, failing: int | None) -> None:
    router = FakeRouter(fails=lambda at: NoWorkerError("none") if at == failing else None)
    turn = list_turn(4, stream=streams)
    with contextlib.suppress(NoWorkerError):
        reply = await FanOut(router).answer(turn)
        if not isinstance(reply.body, bytes):
            assert [part async for part in reply.body.chunks()]
    record = AccessRecord("POST", COMPLETIONS.value, 0.0, status=200, receipt=turn.receipt)
    assert fields_of(record, "completed", 1.0)["workers"] == ["D0", "D1"]


async def test_turns_have_receipts_of_their_own_and_one_request_id() -> None:
    router = FakeRouter()
    reply = await FanOut(router).answer(list_turn(4, stream=False))
    assert [receipt.id for receipt in router.receipts] == ["r-0", "r-1", "r-2", "r-3"]
    assert [len(receipt.legs) for receipt in router.receipts] == [1] * 4
    assert reply.headers == {"X-Request-Id": "r", "X-PPD-Route": "SPLIT", "X-PPD-Decode": "D0, D1"}


def failing(at: int, exc: Exception) -> Callable[[int], Exception | None]:
    return lambda one: exc if one == at else None


@pytest.mark.parametrize("streams", [True, False])
async def test_a_failure_before_the_first_byte_is_the_answer(streams: bool) -> None:
    router = FakeRouter(places=0, fails=failing(3, NoWorkerError("nobody")))
    with pytest.raises(NoWorkerError, match="nobody"):
        await FanOut(router).answer(list_turn(4, stream=streams))
    await settled()
    assert router.running == 0


async def test_a_failure_after_the_first_byte_is_the_last_event() -> None:
    router = FakeRouter(fails=failing(AT_ONCE, NoWorkerError("nobody")))
    _, body = await stream_of(router, AT_ONCE * 2)
    *_, last = [part async for part in body]
    assert json.loads(last.removeprefix(b"data: "))["error"] == {
        "message": "nobody",
        "type": "service_unavailable_error",
        "param": None,
        "code": 503,
    }
    assert router.running == 0


@pytest.mark.parametrize(("last", "shown"), [(ERROR, ERROR), (b": bye\n\n", broken_off(COMPLETIONS))])
async def test_a_stream_that_breaks_is_the_last_of_the_whole(last: bytes, shown: bytes) -> None:
    router = FakeRouter(last=last)
    _, body = await stream_of(router, AT_ONCE * 2)
    parts = [part async for part in body]
    assert parts[0].startswith(CHUNK[:7]) and parts[-1] == shown
    assert len(router.receipts) == AT_ONCE, "no other is begun"
    assert router.running == 0


async def test_a_client_that_leaves_as_a_turn_fails_leaves_nothing_behind() -> None:
    router = FakeRouter(chunks=1000, fails=failing(1, NoWorkerError("nobody")))
    before = asyncio.all_tasks()
    asking = asyncio.create_task(stream_of(router, 4))
    while not asking.done():
        await asyncio.sleep(0)
    await settled()
    assert asyncio.all_tasks() == before
    assert router.running == 0


async def test_a_defect_is_told_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    router = FakeRouter(places=0, fails=failing(0, ValueError("10.1.2.3")))
    with pytest.raises(PPDError, match="internal error"):
        await stream_of(router, 2)
    assert "a list of prompts failed" in caplog.text


@pytest.mark.parametrize("streams", [True, False])
async def test_an_answer_in_the_other_form_is_none_and_its_worker_is_freed(streams: bool) -> None:
    class Other(FakeRouter):
        async def answer(self, request: Request, receipt: Receipt, asker: TurnContext) -> TurnReply:
            return await super().answer(msgspec.structs.replace(request, stream=not streams), receipt, asker)

    router = Other()
    with pytest.raises(BrokenAnswer):
        await FanOut(router).answer(list_turn(2, stream=streams))
    await settled()
    assert router.running == 0
