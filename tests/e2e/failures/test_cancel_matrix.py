"""The client leaves, wherever its turn stands, before the engines of each connector: both legs end, and no KV stays.

A P goes on where only it can free what its D has set aside.

Where a turn can be left is tried with every connector. In both forms of an answer it is where legs are sent in another
order, or P waits for D.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import pytest_asyncio

from ppd.proxy.config import Mode
from ppd.proxy.connectors import CONNECTORS, writes_into_decode
from ppd.proxy.failures import Leg
from ppd.proxy.policy import Route
from ppd.servers.sim.core.fault_orders import FaultKind, FaultPhase, Faults, Order
from ppd.servers.sim.engine.engine import SimEngine
from tests.e2e.failures.faults import deaf
from tests.e2e.failures.fleet import PATIENT, FaultFleet, Seen, Talk
from tests.e2e.fleet.connector_fleets import join
from tests.support.fleet import has_work

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORDS = "Some words, so that there are blocks to move. " * 3
TIME_SCALE = 2.0  # a P takes 70 ms for these words, a D 120 ms to its first token and 16 ms to each other
IN_BOTH_FORMS = ("nixl", "nixl_push", "sglang")  # P, then D; together; together, and P waits for D
LATE_S = 0.04  # an answer of P's is on its way for this long
LATE_BODY_S = 1.5  # or, once its head is there, for this long: less than the proxy reads on for


@dataclass(frozen=True, slots=True)
class Leaving:
    """Where a client leaves."""

    route: Route
    connector: str
    phase: str
    stream: bool

    @property
    def is_together(self) -> bool:
        return CONNECTORS[self.connector].order.is_joint

    @property
    def is_awaited(self) -> bool:
        """P goes on for long, as D keeps blocks for it."""
        is_written = self.route is Route.SPLIT and writes_into_decode(CONNECTORS[self.connector])
        return is_written and self.phase in ("connect_p", "p_computes")

    def __str__(self) -> str:
        return f"{self.route}-{self.connector}-{self.phase}-{'stream' if self.stream else 'whole'}"


SPLIT_PHASES = (
    "queue",
    "connect_p",
    "p_computes",
    "p_done",
    "p_answers",
    "connect_d",
    "d_asked",
    "d_computes",
    "mid_stream",
    "after",
)
LONE_PHASES = ("queue", "connect_d", "d_asked", "d_computes", "mid_stream", "after")


def leavings() -> Iterator[Leaving]:
    for place, connector in enumerate(CONNECTORS):
        for at, phase in enumerate(SPLIT_PHASES):
            forms = (True, False) if connector in IN_BOTH_FORMS else ((place + at) % 2 == 0,)
            yield from (Leaving(Route.SPLIT, connector, phase, stream) for stream in forms)
    for phase, stream in product(LONE_PHASES, (True, False)):  # no connector has a part in these
        yield Leaving(Route.LOCAL, "nixl", phase, stream)
        yield Leaving(Route.REPLICA, "none", phase, stream)


class Fleets:
    """One fleet a connector, with room for one turn."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._fields: dict[str, FaultFleet] = {}
        self.talks = 0
        self.took_s: dict[tuple[Route, str], list[tuple[float, float]]] = {}

    async def of(self, leaving: Leaving) -> FaultFleet:
        key = "replica" if leaving.route is Route.REPLICA else leaving.connector
        if key not in self._fields:
            mode = Mode.REPLICA if leaving.route is Route.REPLICA else Mode.ALWAYS_SPLIT
            # No turn that is left ends by a time-out, but where both legs go on: there a P must be given up for lost.
            is_written = leaving.route is Route.SPLIT and writes_into_decode(CONNECTORS[leaving.connector])
            hurry = {"connect_timeout_s": 1.5} if is_written else {}
            settings: dict[str, Any] = {"max_inflight": 1, **PATIENT, "queue_timeout_s": 120.0, **hurry}
            field = await self._stack.enter_async_context(FaultFleet.of("", mode=mode, **settings))
            if leaving.route is Route.REPLICA:
                await field.add("R1", time_scale=TIME_SCALE)
            else:
                await join(field, leaving.connector, "P1 D1 D2", time_scale=TIME_SCALE)
            self._fields[key] = field
        return self._fields[key]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleets() -> AsyncIterator[Fleets]:
    async with AsyncExitStack() as stack:
        made = Fleets(stack)
        yield made
        for (route, phase), times in made.took_s.items():
            proxy_s, engines_s = (sorted(each) for each in zip(*times, strict=True))
            print(
                f"{route} {phase}: the proxy let go after {proxy_s[-1] * 1e3:.0f} ms at most, {proxy_s[0] * 1e3:.0f} ms"
                f" at least; engines after {engines_s[-1] * 1e3:.0f} ms at most"
            )


@dataclass(slots=True)
class Turn:
    """A turn under way, whose client is about to leave."""

    leaving: Leaving
    field: FaultFleet
    asking: asyncio.Task[Seen]
    seen: Seen
    stack: AsyncExitStack
    finished: dict[str, int]  # requests of each engine before
    received: dict[str, int]
    tokens: dict[str, int]
    expired: int
    arrived: int

    def engine(self, leg: str) -> SimEngine:
        receipt = self.field.newest()
        return self.field.engines[receipt.prefill if leg == "p" else receipt.decode]

    def is_at(self, leg: Leg) -> bool:
        return any(one.kind is leg and one.ended_s is None for one in self.field.newest().legs)

    async def until_there(self) -> None:
        """Until the turn stands where its client leaves."""
        answering = {Route.SPLIT: Leg.DECODE, Route.LOCAL: Leg.LOCAL, Route.REPLICA: Leg.REPLICA}[self.leaving.route]
        match self.leaving.phase:
            case "queue":
                await soon(lambda: self.field.proxy.state.admission.waiting == 1)
            case "connect_p":
                await soon(lambda: self.is_at(Leg.PREFILL))
            case "p_computes":
                await soon(lambda: self.is_at(Leg.PREFILL) and bool(self.engine("p").scheduler.sequences))
            case "p_done":
                await soon(lambda: self.is_at(Leg.PREFILL) and self.has_finished(self.engine("p")))
            case "p_answers":
                await soon(lambda: any(one.kind is Leg.PREFILL and one.status for one in self.field.newest().legs))
            case "connect_d":
                if self.leaving.route is Route.SPLIT and not self.leaving.is_together:
                    await soon(lambda: self.is_at(Leg.PREFILL))
                    await self.stack.enter_async_context(deaf(self.engine("d")))
                await soon(lambda: self.is_at(answering))
            case "d_asked":
                await soon(lambda: self.is_at(answering) and self.grown(self.received, self.engine("d")))
            case "d_computes":
                await soon(lambda: self.is_at(answering) and bool(self.engine("d").scheduler.sequences))
            case "mid_stream" if self.leaving.stream:
                await soon(lambda: self.seen.is_stream and bool(self.seen.text))
            case "mid_stream":
                await soon(
                    lambda: self.is_at(answering) and self.engine("d").counters.generation_tokens > self.spent() + 2
                )
            case _:
                await soon(lambda: b"[DONE]" in self.seen.body or self.asking.done())

    def name_of(self, engine: SimEngine) -> str:
        return next(name for name, each in self.field.engines.items() if each is engine)

    def has_finished(self, engine: SimEngine) -> bool:
        return sum(engine.counters.finished.values()) > self.finished[self.name_of(engine)]

    def grown(self, before: dict[str, int], engine: SimEngine) -> bool:
        return len(engine.received) > before[self.name_of(engine)]

    def spent(self) -> int:
        return self.tokens[self.name_of(self.engine("d"))]


async def soon(holds: Callable[[], bool]) -> None:
    """At the very moment, not some time after it."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.0005)


def expired(field: FaultFleet) -> int:
    """Handoffs that nobody took."""
    return sum(engine.counters.expired_handoffs for engine in field.engines.values())


def arrived(field: FaultFleet) -> int:
    """Prompts that a P2pNccl has sent, and nobody has taken."""
    return sum(len(engine.arrivals) for engine in field.engines.values())


def has_let_go(field: FaultFleet) -> bool:
    views, admission = field.proxy.state.registry.views(), field.proxy.state.admission
    return not admission.inside and not any(map(has_work, views))


async def spoil(turn_stack: AsyncExitStack, field: FaultFleet, leaving: Leaving) -> None:
    """What makes a phase last."""
    if leaving.phase == "queue":
        await turn_stack.enter_async_context(field.full())
    elif leaving.phase == "connect_p":
        await turn_stack.enter_async_context(deaf(field.engines["P1"]))
    elif leaving.phase == "connect_d" and (leaving.route is not Route.SPLIT or leaving.is_together):
        for name in set(field.engines) - {"P1", "reference"}:
            await turn_stack.enter_async_context(deaf(field.engines[name]))
    elif leaving.phase == "p_done":
        field.engines["P1"].faults = Faults([Order(FaultKind.SLOW, delay_s=LATE_S)])
    elif leaving.phase == "p_answers":
        field.engines["P1"].faults = Faults([Order(FaultKind.SLOW, phase=FaultPhase.HEAD, delay_s=LATE_BODY_S)])
    elif leaving.phase == "after" and leaving.stream:
        for name in set(field.engines) - {"P1"}:
            field.engines[name].faults = Faults([Order(FaultKind.HANG, phase=FaultPhase.END)])


@pytest.mark.parametrize("leaving", list(leavings()), ids=str)
async def test_a_client_that_leaves_ends_both_legs(fleets: Fleets, leaving: Leaving) -> None:
    field, now = await fleets.of(leaving), asyncio.get_running_loop().time
    endless = {"max_tokens": 5 if leaving.phase == "after" else 20_000, "ignore_eos": True}
    fleets.talks += 1
    words = (
        WORDS * 40 if leaving.phase == "p_computes" else WORDS
    )  # so many that P is at it for longer than it is given
    talk = Talk([{"role": "user", "content": f"{fleets.talks} {words}"}])
    if leaving.route is Route.LOCAL:
        talk.heard((await field.ask(talk.body(max_tokens=2))).text, WORDS)
    async with AsyncExitStack() as stack:
        await spoil(stack, field, leaving)
        engines, before, seen = field.engines, field.proxy.state.receipts.newest(1), Seen()
        finished = {name: sum(engine.counters.finished.values()) for name, engine in engines.items()}
        received = {name: len(engine.received) for name, engine in engines.items()}
        tokens = {name: engine.counters.generation_tokens for name, engine in engines.items()}
        aborted = {name: engine.counters.finished["abort"] for name, engine in engines.items()}
        body = talk.body(stream=leaving.stream, **endless)
        asking = asyncio.create_task(field.ask(body, seen, leaving.route))
        turn = Turn(leaving, field, asking, seen, stack, finished, received, tokens, expired(field), arrived(field))
        await soon(lambda: field.proxy.state.receipts.newest(1) != before)
        await turn.until_there()
        receipt, left_s = field.newest(), now()
        asking.cancel()
        if leaving.phase != "queue":
            await soon(lambda: has_let_go(field))
        else:
            await soon(lambda: not field.proxy.state.admission.waiting)
        proxy_s = now() - left_s
        if leaving.phase == "p_answers" and not leaving.is_together:
            assert field.is_winding_up() and not turn.grown(turn.received, turn.engine("d")), "P's answer is still read"
        if leaving.phase != "queue":
            await soon(field.at_rest)
            await soon(lambda: field.idle() or (is_ps_to_free(leaving) and not field.is_reading()))
            field.end_leases()
        engines_s = now() - left_s
    if not leaving.is_awaited:
        fleets.took_s.setdefault((leaving.route, leaving.phase), []).append((proxy_s, engines_s))
    assert receipt.outcome == ("completed" if leaving.phase == "after" else "cancelled")
    await soon(field.idle)
    await soon(lambda: not any(engine.pool.used for engine in engines.values()))
    if leaving.phase == "p_computes":
        has_gone_on = engines["P1"].counters.finished["abort"] == aborted["P1"]
        assert has_gone_on == leaving.is_awaited, "P is told to stop, unless D waits for it to write"
    check_engines(turn)


def is_ps_to_free(leaving: Leaving) -> bool:
    """No D tells P that it may free its KV: one that was not reached, and TensorRT-LLM's before it has pulled.

    Nor does a P that was not reached write what D keeps blocks for.
    """
    if leaving.is_awaited and leaving.phase == "connect_p":
        return True
    if leaving.connector.startswith("trtllm") and leaving.phase in ("d_asked", "d_computes"):
        return True
    early = ("p_done", "p_answers") if leaving.connector == "trtllm_gen_first" else ()
    return leaving.route is Route.SPLIT and leaving.is_together and leaving.phase in ("connect_d", *early)


def check_engines(turn: Turn) -> None:
    phase, engines = turn.leaving.phase, turn.field.engines
    for engine in engines.values():
        engine.faults = Faults()
        assert not engine.counters.traps
        assert is_ps_to_free(turn.leaving) or turn.expired == expired(turn.field)
    if phase not in ("p_done", "p_answers", "connect_d", "d_asked"):
        assert turn.arrived == arrived(turn.field), "what P sent, D took"
    asked = {name for name, engine in engines.items() if len(engine.received) > turn.received[name]}
    if phase in ("queue", "connect_p") and not turn.leaving.is_together:
        assert asked == {"P1" if phase == "queue" else ""} - {"", "P1"}
    if phase == "p_computes":
        assert turn.leaving.is_together or asked == {"P1"}, "P was told to stop, and D is not asked"


async def test_no_moment_around_the_end_of_a_prefill_strands_kv() -> None:
    """No lease ends in the time that this takes, so that what is freed, a D has taken."""
    rng = random.Random(4)
    async with FaultFleet.of(
        "P1 P2 D1 D2", engine={"time_scale": 1.0, "lease_s": 600.0}, queue_timeout_s=60.0
    ) as field:
        prefills = [field.engines["P1"], field.engines["P2"]]

        def is_computing() -> bool:
            return any(engine.scheduler.sequences for engine in prefills)

        def handoffs() -> int:
            return sum(engine.counters.handoffs for engine in prefills)

        def has_begun(before: int) -> bool:
            return is_computing() or handoffs() > before

        for number in range(200):
            body = Talk([{"role": "user", "content": f"{number} {WORDS}"}]).body(
                stream=number % 2 == 0, max_tokens=1000
            )
            await soon(lambda: not is_computing())
            asking = asyncio.create_task(field.ask(body))
            await soon(partial(has_begun, handoffs()))
            await asyncio.sleep(rng.uniform(0.0, 0.025))  # P is done after 10 to 20 ms
            asking.cancel()
            await asyncio.wait({asking})
        await field.until(field.at_rest)
        names = ("aborted", "taken", "left")
        fates = {fate: await field.metric(f'ppd_handovers_abandoned_total{{fate="{fate}"}}') for fate in names}
        print(
            f"200 turns left around the end of their prefill: {handoffs()} handoffs, {field.pinned()} stranded; {fates}"
        )
        assert fates["taken"] > 100, "the moment was around the end"
        await field.until(field.idle)
        assert not any(engine.counters.expired_handoffs for engine in prefills)
        assert not any(engine.counters.traps for engine in field.engines.values())


@pytest.mark.parametrize("connector", [name for name in CONNECTORS if writes_into_decode(CONNECTORS[name])])
async def test_a_crowd_that_leaves_at_once_keeps_no_d_from_its_blocks(connector: str) -> None:
    """Every D has set blocks aside for many a P by then."""
    rng = random.Random(5)
    async with FaultFleet.of("", mode=Mode.ALWAYS_SPLIT, queue_timeout_s=60.0) as field:
        await join(field, connector, "P1 P2 D1 D2", time_scale=1.0)

        async def leave(number: int) -> None:
            body = Talk([{"role": "user", "content": f"{number} {WORDS}"}]).body(stream=number % 2 == 0, max_tokens=200)
            asking = asyncio.create_task(field.ask(body))
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            asking.cancel()
            await asyncio.wait({asking})

        await asyncio.gather(*map(leave, range(120)))
        await field.until(field.idle)
        engines = field.engines.values()
        assert not any(engine.pool.used or engine.counters.expired_handoffs for engine in engines)
        body = Talk([{"role": "user", "content": f"I stay. {WORDS}"}]).body(stream=True)
        seen = await field.ask(body)
        assert (seen.is_complete, seen.text) == (True, await field.right_text(body))
        assert not any(engine.counters.traps for engine in engines)
