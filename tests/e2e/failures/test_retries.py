"""What is tried again, and what that costs the fleet: queries of death, overload, and workers that die."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession, TCPConnector, web

from ppd.proxy.config import Mode
from ppd.proxy.connectors import CONNECTORS
from ppd.proxy.errors import NoWorkerError
from ppd.proxy.policy import Decision
from ppd.proxy.routing.choosing import Chooser
from ppd.servers.sim.core.fault_orders import FaultKind, FaultPhase, Faults, Order
from tests.e2e.failures.fleet import FaultFleet, Seen
from tests.e2e.fleet.connector_fleets import join
from tests.support.scripted_workers import MortalWorker, odd_worker

REPLICA: dict[str, Any] = {"mode": Mode.REPLICA}
DEADLY = "the prompt that kills"
ANSWER = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


def refused(seen: Seen) -> tuple[int, str | None]:
    return seen.status, seen.headers.get("X-PPD-Refused")


# -- half an answer


@pytest.mark.parametrize(("path", "end"), [("/v1/chat/completions", "length"), ("/v1/messages", "max_tokens")])
async def test_a_whole_answer_that_its_engine_gave_up_half_way_is_anothers(path: str, end: str) -> None:
    async with FaultFleet.of("R1 R2", **REPLICA) as field:
        once = Faults([Order(FaultKind.ABORT, phase=FaultPhase.EVENTS, after_events=2, times=1)])
        for engine in field.engines.values():
            engine.faults = once
        answer = await field.post(path, body("hello"))
        assert (answer.status, once.orders[0].times) == (200, 0)
        assert end in (
            answer.body.get("stop_reason"),
            *(one["finish_reason"] for one in answer.body.get("choices", ())),
        )
        assert len(field.newest().legs) == 2


# -- queries of death


DEATHS = {
    "killed": Order(FaultKind.KILL),
    "killed after the head": Order(FaultKind.KILL, phase=FaultPhase.HEAD),
    "cut off by one that lives": Order(FaultKind.RESET, times=2),  # a kept connection may be the first one
}


@pytest.mark.parametrize(
    ("names", "victims", "death", "stream"),
    [
        *(("R1 R2 R3", "R", death, stream) for death in DEATHS for stream in (True, False)),
        ("P1 P2 P3 D1", "P", "killed", True),
        ("P1 D1 D2 D3", "D", "killed", True),
    ],
)
async def test_a_prompt_that_ends_two_workers_is_not_given_to_a_third(
    names: str, victims: str, death: str, stream: bool
) -> None:
    mode = Mode.REPLICA if victims == "R" else Mode.ALWAYS_SPLIT
    async with FaultFleet.of(names, mode=mode, breaker_open_s=60.0, queue_timeout_s=20.0) as field:
        deadly = DEATHS[death]
        for name in names.split():
            if name[0] == victims:
                field.engines[name].faults = Faults([Order(deadly.kind, phase=deadly.phase, times=deadly.times)])
        seen = await field.ask(body(DEADLY, stream=stream))
        assert refused(seen) == (502, "workers_lost")
        assert seen.headers["x-should-retry"] == "false"
        assert field.newest().error == "workers_lost"
        asked = {name: len(engine.received) for name, engine in field.engines.items() if name[0] == victims}
        assert sum(times > 0 for times in asked.values()) == 2

        again = await field.ask(body(DEADLY))
        assert refused(again) == (503, "poisoned_prompt")
        assert 55 <= int(again.headers["Retry-After"]) <= 60
        assert await field.metric('ppd_refused_total{reason="poisoned_prompt"}') == 1
        assert asked == {name: len(field.engines[name].received) for name in asked}

        for name in asked:
            if not field.engines[name].is_dead:
                field.engines[name].faults = Faults()
        assert (await field.ask(body("an ordinary prompt"))).is_complete, "although two workers are dead"


@pytest.mark.parametrize("connector", [name for name, one in CONNECTORS.items() if one.order.is_joint])
async def test_a_prompt_that_ends_both_engines_at_once_is_given_to_one_more_alone(connector: str) -> None:
    """Which the machine's end would explain too; where no D can answer alone, to none."""
    names = "P1 P2 P3 D1 D2 D3"
    async with FaultFleet.of("", mode=Mode.ALWAYS_SPLIT, breaker_open_s=60.0) as field:
        await join(field, connector, names)
        await field.settle()
        for name in names.split():
            field.engines[name].faults = Faults([Order(FaultKind.KILL)])
        seen = await field.ask(body(DEADLY))
        dead = sorted(name[0] for name, engine in field.engines.items() if engine.is_dead)
        if CONNECTORS[connector].decodes_alone:
            assert (refused(seen), dead) == ((502, "workers_lost"), ["D", "D", "P"])
            assert refused(await field.ask(body(DEADLY))) == (503, "poisoned_prompt")
        else:
            assert (seen.status, dead) == (502, ["D", "P"])


async def test_a_worker_that_answers_clears_a_prompt() -> None:
    async with FaultFleet.of("R1 R2 R3", queue_timeout_s=20.0, **REPLICA) as field:
        for _ in range(3):  # a worker dies under it each time, and it is answered by another
            victim = field.engines[field.newest().decode if field.proxy.state.receipts.newest(1) else "R1"]
            for engine in field.engines.values():
                engine.faults = Faults([Order(FaultKind.RESET, times=0)])
            victim.faults = Faults([Order(FaultKind.RESET, phase=FaultPhase.HEAD, times=1)])
            assert (await field.ask(body("hello"))).is_complete
        assert len(field.proxy.state.poisoned.suspects) == 0


async def test_a_prompt_in_a_list_can_be_poisoned_too() -> None:
    async with FaultFleet.of("R1 R2 R3", breaker_open_s=60.0, queue_timeout_s=20.0, **REPLICA) as field:
        for engine in field.engines.values():
            engine.faults = Faults([Order(FaultKind.KILL)])
        one = {"model": "sim", "prompt": DEADLY, "max_tokens": 4}
        assert (await field.post("/v1/completions", one)).status == 502
        left = [engine for name, engine in field.engines.items() if name != "reference" and not engine.is_dead]
        assert len(left) == 1
        left[0].faults = Faults()
        turn = await field.post("/v1/completions", {**one, "prompt": ["an ordinary prompt", DEADLY]})
        assert (turn.status, turn.body["error"]["code"]) == (503, "poisoned_prompt")


async def test_a_request_outside_of_conversations_can_be_poisoned_too(start_fleet: Any) -> None:
    asked = 0

    async def dies(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        assert request.transport is not None
        await asyncio.sleep(0.2)  # longer than a kept connection takes to break
        request.transport.abort()
        return web.Response()

    async with start_fleet("", **REPLICA) as fleet, AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(odd_worker(fleet, dies, "R"))
        deadly = {"model": "sim", "input": DEADLY}
        turns = [await fleet.post("/v1/embeddings", deadly) for _ in range(3)]
        assert [turn.body["error"]["code"] for turn in turns] == ["workers_lost"] + ["poisoned_prompt"] * 2
        assert asked == 2


async def test_dead_ports_use_up_no_attempt() -> None:
    async with FaultFleet.of("R1 R2 R3 R4 R5", attempts=1, retry_burst=0, retry_share=0.0, **REPLICA) as field:
        for name in ("R1", "R2", "R3", "R4"):
            field.engines[name].kill()
        for number in range(4):
            assert (await field.ask(body(f"{number}"))).is_complete
        field.engines["R5"].kill()
        seen = await field.ask(body("with nobody left"))
        assert seen.status == 503, "none came back while it waited"
        assert len(field.newest().legs) <= 5, "each is asked once a second"


# -- one request is one execution


async def test_what_a_worker_has_worked_on_is_not_sent_to_it_again(start_fleet: Any) -> None:
    """Over connections that were kept, so that the first to break could be taken for a stale one."""
    executed = Counter[str]()

    async def works(request: web.Request) -> web.StreamResponse:
        text = (await request.json())["messages"][0]["content"]
        executed[text] += 1
        if text == "cut me off":
            await asyncio.sleep(0.3)
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(ANSWER)

    async with start_fleet("", **REPLICA) as fleet, AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(odd_worker(fleet, works, "R"))
        for number in range(6):
            assert (await fleet.post("/v1/chat/completions", body(str(number)))).status == 200
        assert (await fleet.post("/v1/chat/completions", body("cut me off"))).status == 502
        assert executed["cut me off"] == 2, "once by each of two workers"


# -- overload


@asynccontextmanager
async def busy_workers(
    fleet: Any, statuses: list[tuple[int, str | None]], role: str = "R"
) -> AsyncIterator[Counter[int]]:
    """Workers that are always busy: how often each was asked. statuses: of each, with its Retry-After."""
    asked = Counter[int]()

    def says(number: int, status: int, after: str | None) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def busy(_: web.Request) -> web.StreamResponse:
            asked[number] += 1
            return web.Response(status=status, headers={"Retry-After": after} if after else {})

        return busy

    async with AsyncExitStack() as stack:
        for number, (status, after) in enumerate(statuses):
            await stack.enter_async_context(odd_worker(fleet, says(number, status, after), role))
        yield asked


async def test_overload_is_not_amplified(start_fleet: Any) -> None:
    """40 turns on 8 workers of which each says 503: what is tried again comes from the retry budget."""
    async with (
        start_fleet("", queue_timeout_s=2.5, **REPLICA) as fleet,
        busy_workers(fleet, [(503, None)] * 8) as asked,
    ):
        turns = await asyncio.gather(*(fleet.post("/v1/chat/completions", body(str(n))) for n in range(40)))
        assert {turn.status for turn in turns} == {503}
        assert all("Retry-After" in turn.headers for turn in turns)
        assert asked.total() <= 40 + 100 + 0.2 * 40  # 960 where each turn asks all each second


async def test_a_turn_asks_a_busy_worker_at_most_once_in_its_retry_after_and_twice_in_all(start_fleet: Any) -> None:
    async with (
        start_fleet("", queue_timeout_s=30.0, **REPLICA) as fleet,
        busy_workers(fleet, [(503, "1"), (503, "1")]) as asked,
    ):
        started_s = asyncio.get_running_loop().time()
        asking = asyncio.create_task(fleet.post("/v1/chat/completions", body("hello")))
        await fleet.until(lambda: fleet.proxy.state.admission.waiting == 1)
        assert asked == {0: 1, 1: 1}
        assert (await asking).status == 503
        assert asked == {0: 2, 1: 2}
        assert asyncio.get_running_loop().time() - started_s >= 0.99, "in the queue meanwhile"


async def test_a_worker_that_is_busy_no_longer_as_the_turn_would_wait_for_it_is_asked_again(
    start_fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = Chooser._decide

    def late(chooser: Chooser, *args: Any) -> Decision:
        """Time passes between finding all busy and looking for how long they are."""
        try:
            return decide(chooser, *args)
        except NoWorkerError:
            now = chooser._now
            monkeypatch.setattr(chooser, "_now", lambda: now() + 2.0)
            raise

    monkeypatch.setattr(Chooser, "_decide", late)
    async with (
        start_fleet("", queue_timeout_s=30.0, **REPLICA) as fleet,
        busy_workers(fleet, [(503, "1"), (503, "1")]) as asked,
    ):
        assert (await fleet.post("/v1/chat/completions", body("hello"))).status == 503
        assert asked == {0: 2, 1: 2}


@pytest.mark.parametrize(
    ("said", "status", "after"),
    [
        ([(429, "3"), (429, "7"), (429, "5")], 429, "7"),
        ([(429, "3"), (429, "3600"), (429, "5")], 429, "60"),
        ([(429, "3"), (503, "7"), (429, "5")], 503, None),
    ],
    ids=["429", "429 for hours", "one 503"],
)
async def test_a_client_gets_429_where_all_workers_say_so(
    start_fleet: Any, said: list[tuple[int, str | None]], status: int, after: str | None
) -> None:
    async with start_fleet("", queue_timeout_s=0.5, **REPLICA) as fleet, busy_workers(fleet, said) as asked:
        turn = await fleet.post("/v1/chat/completions", body("hello"))
        assert (turn.status, turn.headers["X-PPD-Refused"]) == (status, "workers_overloaded")
        assert int(turn.headers["Retry-After"]) >= 1
        assert after is None or turn.headers["Retry-After"] == after
        assert asked == dict.fromkeys(range(3), 1)


# -- the death of a worker


@asynccontextmanager
async def dying(field: FaultFleet, *counts: int) -> AsyncIterator[Callable[[], list[asyncio.Task[Seen]]]]:
    """Turns that wait on workers which then die all at once; counts: turns on each. Yields what kills them."""
    async with AsyncExitStack() as stack:
        field.session = await stack.enter_async_context(ClientSession(connector=TCPConnector(limit=0)))
        workers = [await stack.enter_async_context(MortalWorker().joined(field)) for _ in counts]
        asking = [asyncio.create_task(field.ask(body(f"{n}"))) for n in range(sum(counts))]
        await field.until(lambda: sum(worker.asked for worker in workers) == sum(counts))

        def kill() -> list[asyncio.Task[Seen]]:
            for worker in workers:
                worker.die()
            return asking

        yield kill


async def test_what_one_death_broke_is_one_event() -> None:
    """300 turns wait on R1 when it dies; the retry budget has nothing for them."""
    settings = {**REPLICA, "queue_timeout_s": 20.0, "retry_burst": 1, "retry_share": 0.0}
    async with FaultFleet.of("", **settings) as field, dying(field, 300) as kill:
        await field.add("R2")
        seen = await asyncio.gather(*kill())
        assert Counter(one.status for one in seen) == {200: 300}
        assert all(one.is_complete for one in seen)
        assert await field.metric('ppd_retries_total{result="moved"}') == 300
        assert field.proxy.state.retries.tokens == 0, "the price of one"
        assert len(field.proxy.state.poisoned.suspects) == 0
        await field.until(field.idle)


async def test_the_turns_of_dead_workers_come_at_the_pace_of_those_that_are_left() -> None:
    """Through the queue, however short it is."""
    settings = {**REPLICA, "queue_timeout_s": 20.0, "max_worker_inflight": 20, "queue_limit": 0, "retry_burst": 0}
    async with FaultFleet.of("", **settings) as field, dying(field, 20, 20, 20) as kill:
        left = await field.add("R4")
        asking, most = kill(), 0
        while not all(task.done() for task in asking):
            most = max(most, len(left.scheduler.sequences))
            await asyncio.sleep(0.001)
        assert Counter(task.result().status for task in asking) == {200: 60}
        assert 0 < most <= 20
        await field.until(field.idle)


async def test_a_reset_by_a_worker_that_lives_is_paid_for() -> None:
    count, burst = 40, 5
    settings = {**REPLICA, "queue_timeout_s": 20.0, "retry_burst": burst, "retry_share": 0.0, "breaker_failures": 1000}
    async with FaultFleet.of("R1 R2", **settings) as field:
        for name in ("R1", "R2"):
            field.engines[name].faults = Faults([Order(FaultKind.RESET, phase=FaultPhase.HEAD, times=1000)])
        seen = await asyncio.gather(*(field.ask(body(f"{n}")) for n in range(count)))
        assert {one.status for one in seen} == {502}
        asked = sum(len(field.engines[name].received) for name in ("R1", "R2"))
        assert asked == count + burst
        assert await field.metric('ppd_retries_total{result="no_budget"}') == count - burst
