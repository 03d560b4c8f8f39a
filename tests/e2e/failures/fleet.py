"""Fleets in which faults are provoked: simulated engines with a clock that tests turn, behind the real proxy."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import aiohttp

from ppd.proxy.config import Mode
from ppd.proxy.connectors import answers_alone
from ppd.proxy.failures import Leg
from ppd.proxy.fleet.booking import LEASE_S
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Role, WorkerId
from ppd.proxy.policy import Route
from ppd.proxy.telemetry.receipts import LegRecord, Receipt
from ppd.servers.sim.core.fault_orders import FaultKind, FaultLeg, FaultPhase, Faults, Order
from ppd.servers.sim.core.sequence import SequenceState
from ppd.servers.sim.engine.engine import SimEngine
from tests.support.clock import LeapingTime
from tests.support.fleet import Fleet, has_work, start_engine
from tests.support.proxy import ADMIN_KEY

TIMEOUTS = ("connect_timeout_s", "prefill_timeout_s", "first_event_timeout_s", "answer_timeout_s", "idle_timeout_s")
LEG_S = 20.0  # for a leg; by then no handoff is too old yet
PATIENT: dict[str, Any] = dict.fromkeys(TIMEOUTS, 120.0)  # longer than a test waits for anything
HASTY: dict[str, Any] = dict.fromkeys(TIMEOUTS, 2.0)  # for tests that wait until one is over; any other could meet one
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(TIMEOUTS, LEG_S),
    "queue_timeout_s": 1.0,
    "probe_interval_s": 3600.0,  # tests say when a worker is found dead
    "retry_burst": 10_000,
    "breaker_failures": 2,
}
PATH = "/v1/chat/completions"


class Clock:
    """The engines': real seconds, and those that a test adds so that leases end."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead_s

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds


class Uptime:
    """The proxy's clock for the age of handoffs: real seconds, and a leap at each reading while there is one."""

    def __init__(self) -> None:
        self.leaps_s: list[float] = []
        self._ahead_s = 0.0

    def __call__(self) -> float:
        self._ahead_s += self.leaps_s.pop(0) if self.leaps_s else 0.0
        return time.monotonic() + self._ahead_s


@dataclass(slots=True)
class Seen:
    """What a client has of an answer so far."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False  # the connection brought all of it

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of each event; "[DONE]" and what is no JSON as text."""
        return [_data(line[6:]) for line in self.body.decode().split("\n") if line.startswith("data: ")]

    @property
    def is_stream(self) -> bool:
        return self.headers.get("Content-Type", "").startswith("text/event-stream")

    @property
    def text(self) -> str:
        if not self.is_stream:
            return str(self.json["choices"][0]["message"]["content"])
        choices = [event["choices"][0] for event in self.events if isinstance(event, dict) and event.get("choices")]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    @property
    def is_complete(self) -> bool:
        if self.status != 200 or not self.is_whole:
            return False
        return self.events[-1] == "[DONE]" if self.is_stream else "choices" in self.json


def _data(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return text


@dataclass(slots=True)
class Talk:
    """One conversation, of which every request is written down."""

    messages: list[dict[str, str]]

    def body(self, **changes: Any) -> dict[str, Any]:
        return {"model": "sim", "messages": self.messages, "max_tokens": 10, "temperature": 0, **changes}

    def heard(self, text: str, then: str) -> None:
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": then}]


def order(kind: FaultKind, leg: FaultLeg, phase: FaultPhase = FaultPhase.REQUEST, **rest: Any) -> Faults:
    return Faults([Order(kind, leg=leg, phase=phase, **rest)])


@dataclass
class FaultFleet(Fleet):
    """A fleet, and one engine beside it that nothing ever happens to: `reference`."""

    clock: Clock = field(default_factory=Clock)
    uptime: Uptime = field(default_factory=Uptime)

    settings: ClassVar[Mapping[str, Any]] = {**SETTINGS, "mode": Mode.ALWAYS_SPLIT}
    engine_settings: ClassVar[Mapping[str, Any]] = {"keep_requests": 100_000, "shutdown_s": 0.05}

    @classmethod
    @asynccontextmanager
    async def of(
        cls, names: str = "", *, engine: Mapping[str, Any] | None = None, **settings: Any
    ) -> AsyncIterator[Self]:
        async with super().of(**settings) as made:
            made.proxy.upstream.uptime = made.proxy.state.handles.uptime = made.uptime
            made.engines["reference"] = await start_engine(made.stack, "R")
            for name in names.split():
                await made.add(name, **(engine or {}))
            yield made

    async def join(self, name: str, engine: SimEngine, address: str, options: str = "") -> None:
        await super().join(name, engine, address, options)
        self.proxy.prober.nudge()  # while somebody is new it looks every second; from now on, only when it is told

    def view(self, name: str) -> WorkerView:
        return next(view for view in self.proxy.state.registry.views() if view.name == name)

    def worker(self, name: str) -> WorkerId:
        return self.view(name).id

    def newest(self) -> Receipt:
        return self.proxy.state.receipts.newest(1)[0]

    async def ask(self, body: dict[str, Any], seen: Seen | None = None, forced: Route | None = None) -> Seen:
        """`seen` grows while the answer comes, for those who watch."""
        seen = Seen() if seen is None else seen
        headers = {"X-Admin-Key": ADMIN_KEY, "X-PPD-Force-Route": forced} if forced else {}
        async with self.session.post(self.base_url + PATH, json=body, headers=headers) as answer:
            seen.status, seen.headers = answer.status, answer.headers
            with suppress(aiohttp.ClientError):
                while data := await answer.content.readany():
                    seen.body += data
                seen.is_whole = True
        return seen

    async def right_text(self, body: dict[str, Any]) -> str:
        """What an engine answers when all is well."""
        plain = {**body, "stream": False}
        url = f"http://{self.engines['reference'].address}{PATH}"
        # A kept connection may be ended by an engine just as it is used again.
        async with self.session.post(url, json=plain, headers={"Connection": "close"}) as answer:
            return str((await answer.json())["choices"][0]["message"]["content"])

    def outstanding(self) -> int:
        return self.proxy.state.handoffs.outstanding(self.proxy.state.now())

    def pinned(self) -> int:
        return sum(engine.pinned for engine in self.engines.values())

    def at_rest(self) -> bool:
        """No turn, no leg, no reserved token, no sequence; handoffs may wait for the end of their leases."""
        admission, views = self.proxy.state.admission, self.proxy.state.registry.views()
        if admission.inside or admission.waiting:
            return False
        if any(map(has_work, views)):
            return False
        sequences = (one for engine in self.engines.values() for one in engine.scheduler.sequences)
        return all(one.state is SequenceState.FINISHED for one in sequences)

    def idle(self) -> bool:
        """Nor does an engine keep anything for another one."""
        keeps = any(engine.scheduler.sequences for engine in self.engines.values())
        return self.at_rest() and not keeps and not self.outstanding() and not self.pinned()

    def is_reading(self) -> bool:
        """At rest: whether an aborted D is still at P's blocks. No lease ends in the time that this takes."""
        return any(
            sum(not one.transfer.is_sent for one in engine.scheduler.sequences) > engine.pulls.meeting
            for engine in self.engines.values()
        )

    def is_winding_up(self) -> bool:
        """A SPLIT whose client has left is not over yet."""
        return bool(self.proxy.handoff_release._tasks)

    def end_leases(self) -> None:
        """By the proxy's count and on every P, and what an aborted request of a D keeps for P."""
        self.clock.advance(LEASE_S + 1)
        for engine in self.engines.values():
            engine.handoffs.expire()
            engine.pulls.expire()
            engine.wake()
        self.proxy.state.handoffs.outstanding(self.proxy.state.now() + LEASE_S + 1)

    async def outlast(self, asking: asyncio.Task[Seen], name: str, leg: Leg) -> None:
        """While a turn is on, the time of each leg that hangs at this worker passes at once; all others have theirs.

        leg: the only one that hangs there, if the worker is wedged.
        """
        time = LeapingTime.of(asyncio.get_running_loop())
        while not asking.done():
            legs = self._hanging(name, leg)
            for _ in range(20):  # the leg's timer is begun by then, and what is under way has been seen
                await asyncio.sleep(0.001)
            if legs and self._hanging(name, leg) == legs:
                await time.pass_by(LEG_S + 0.1)

    def _hanging(self, name: str, leg: Leg) -> list[LegRecord]:
        kinds = (leg,) if self.engines[name].faults.wedge else tuple(Leg)
        return [one for one in self.newest().legs if one.worker == name and one.kind in kinds and one.ended_s is None]

    async def restart(self, name: str) -> None:
        """The engine is another incarnation of itself, and a probe has seen that."""
        before = self.view(name).incarnation
        self.engines[name].started_at += 100.0
        self.proxy.prober.nudge()
        await self.until(lambda: self.view(name).incarnation != before)

    @asynccontextmanager
    async def full(self) -> AsyncIterator[None]:
        """A turn is inside and hangs; there must be room for that one alone."""
        for engine in self.engines.values():
            engine.faults = Faults(hang=1)
        workers = [view.worker for view in self.proxy.state.registry.views() if view.role is not Role.PREFILL]
        # One engine answers it where one can (`n`): no P goes on for a D, until its time-out, when the client leaves.
        alone = {"n": 2} if all(map(answers_alone, workers)) else {}
        body = Talk([{"role": "user", "content": "I hang"}]).body(**alone)
        blocking = asyncio.create_task(self.ask(body))
        await self.until(lambda: any(not engine.faults.hang for engine in self.engines.values()))
        for engine in self.engines.values():
            engine.faults = Faults()
        try:
            yield
        finally:
            blocking.cancel()
            await asyncio.wait({blocking})

    def forgive(self) -> None:
        """Nothing that a case did to workers is held against them in the next one."""
        for engine in self.engines.values():
            engine.faults = Faults()
        for view in self.proxy.state.registry.views():
            self.proxy.state.health.forget(view.id)
        self.end_leases()
