"""Ways that a turn can take, each before a fleet of its own, and what must be left of it: nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import msgspec

from ppd.proxy.config import EncoderUse, Mode
from ppd.proxy.connectors import CONNECTORS
from ppd.proxy.health.circuit_breaker import Circuit
from ppd.proxy.health.worker_health import Key
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.policy import Route
from ppd.servers.sim.core.fault_orders import FaultKind, FaultLeg, Faults, Order
from tests.e2e.encoders.test_encoders import asks, picture
from tests.e2e.failures.fleet import PATIENT, FaultFleet, Talk
from tests.e2e.fleet.connector_fleets import join
from tests.servers.sidecar.sidecars import SidecarFleet
from tests.support.fleet import crowded
from tests.support.proxy import ADMIN_KEY

WORDS = "Some words, so that there are blocks to move. " * 3
READS_BACK = {"bidirectional_kv_xfer": True}
TIMES: dict[str, Any] = {"time_scale": 0.05}


@dataclass
class SidecarFaultFleet(FaultFleet, SidecarFleet):  # type: ignore[misc]
    """Each D behind a sidecar."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """names: of the engines. opens, route: what the talk's first turn and the one that is left are forced to."""

    names: str = "P1 D1 D2"
    connector: str = ""
    opens: Route | None = None
    route: Route | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    options: str = ""
    words: str = WORDS
    shows_picture: bool = False
    fails: Order | None = None  # the first leg of the turn that fits it
    is_of_sidecars: bool = False
    is_crowded: bool = False  # where the talk is
    is_queued: bool = False
    is_list: bool = False  # of prompts, which go on with no talk
    keeps: str = ""  # the roles of engines that may keep KV for others, until a lease ends

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[FaultFleet]:
        settings = {"mode": Mode.ALWAYS_SPLIT, **PATIENT, "breaker_failures": 1000, "poison_s": 0.0, **self.settings}
        async with (SidecarFaultFleet if self.is_of_sidecars else FaultFleet).of("", **settings) as fleet:
            if self.connector:
                await join(fleet, self.connector, self.names, **TIMES)
            for name in () if self.connector else self.names.split():
                options = "" if name[0] == "E" else self.options
                await fleet.add(name, options=options, **TIMES, **self.engine)
            yield fleet

    async def talk(self, fleet: FaultFleet, number: int, *, stream: bool) -> Talk:
        """One whose next turn goes on from an answer."""
        words = f"{number} {self.words}"
        content: Any = asks(picture(number % 256), words) if self.shows_picture else words
        talk = Talk([{"role": "user", "content": content}])
        if not self.is_list:
            seen = await fleet.ask(talk.body(stream=stream), forced=self.opens)
            talk.heard(seen.text, f"And then? {WORDS}")
            await fleet.until(lambda: at_rest(fleet))
        return talk

    @asynccontextmanager
    async def set(self, fleet: FaultFleet) -> AsyncIterator[None]:
        """For the turn that is left. Every worker and every pair is half open, so it is a probe of all it asks."""
        fleet.forgive()
        half_open(fleet)
        shared = Faults([] if self.fails is None else [msgspec.structs.replace(self.fails)])
        for name, engine in fleet.engines.items():
            if name != "reference":
                engine.faults = shared
        home = fleet.newest().decode if self.is_crowded else ""
        with crowded(fleet.proxy, fleet.worker(home)) if home else nullcontext():
            async with standing_in_line(fleet) if self.is_queued else nullcontext():
                yield
            await fleet.until(lambda: not fleet.is_winding_up())
        for engine in fleet.engines.values():
            engine.faults = Faults()

    async def ask(self, fleet: FaultFleet, talk: Talk, *, stream: bool) -> int:
        """The turn, without the sockets between it and its client: the status, once all of its answer is there."""
        headers = {"content-type": "application/json", "x-admin-key": ADMIN_KEY}
        if self.route is not None:
            headers["x-ppd-force-route"] = self.route
        endpoint, body = Endpoint.CHAT, talk.body(stream=stream)
        if self.is_list:
            (said,) = body.pop("messages")
            endpoint, body = Endpoint.COMPLETIONS, {**body, "prompt": [f"{said['content']}{end}" for end in "abc"]}
        turns = fleet.proxy.turns
        reply = await turns.answer(turns.caller(endpoint, headers), msgspec.json.encode(body))
        reply.written()
        if not isinstance(reply.body, bytes):
            try:
                async for _ in reply.body.chunks():
                    pass
            finally:
                reply.body.abandon()
        return reply.status


def half_open(fleet: FaultFleet) -> None:
    now_s, breakers = fleet.proxy.state.now(), fleet.proxy.state.health.breakers
    workers = [view.id for view in fleet.proxy.state.registry.views()]
    keys: list[Key] = [*workers, *permutations(workers, 2)]
    for key in keys:
        breakers.adopt(key, Circuit(openings=1, failed_s=now_s - 2, opened_s=now_s - 2, until_s=now_s - 1))


@asynccontextmanager
async def standing_in_line(fleet: FaultFleet) -> AsyncIterator[None]:
    """Behind another turn, which ends soon."""
    body = Talk([{"role": "user", "content": WORDS}]).body(max_tokens=3)
    before = asyncio.create_task(fleet.ask(body))
    await fleet.until(lambda: fleet.proxy.state.admission.inside == 1)
    yield
    await before


def at_rest(fleet: FaultFleet) -> bool:
    return fleet.at_rest() and not fleet.is_winding_up()


async def remains(fleet: FaultFleet, scene: Scene, aborted: float) -> list[str]:
    """What is left of turns that have all ended, once engines have had the time to end what no proxy waits for.

    aborted: P's legs until then. One that announces its KV as it is told to abort keeps that.
    """
    keeps = scene.keeps
    with suppress(TimeoutError):
        await fleet.until(lambda: at_rest(fleet) and (fleet.idle() or bool(keeps)), 5)
    if aborted_legs(fleet) > aborted:
        keeps += "P"
    return [*of_proxy(fleet), *_of_engines(fleet, keeps)]


def aborted_legs(fleet: FaultFleet) -> float:
    return float(fleet.proxy.state.metrics.abandoned.labels("aborted")._value.get())


def of_proxy(fleet: FaultFleet) -> Iterator[str]:
    state = fleet.proxy.state
    if not at_rest(fleet):
        yield "work, or a place in the fleet"
    if state.admission._futures or state.admission._admitted:
        yield "a place in the queue"
    if fleet.proxy.upstream._calls:
        yield "a call"
    if state.beliefs.legs() or state.beliefs._passed:
        yield "a leg in the books of caches"
    if state.encoders.to_encode():
        yield "items to encode"
    if any(circuit.probe_s is not None for circuit in state.health.breakers.circuits.values()):
        yield "a probe"
    uses = [state.registry.use(view.id) for view in state.registry.views()]
    if any(use.sending or not math.isclose(use.receiving_s, 0.0, abs_tol=1e-9) for use in filter(None, uses)):
        yield "a transfer"
    for receipt in state.receipts.newest(8):
        legs = [*receipt.legs, *(receipt.encoder.legs if receipt.encoder else ())]
        if receipt.outcome == "running" or any(leg.ended_s is None for leg in legs):
            yield "an open receipt"


def _of_engines(fleet: FaultFleet, keeps: str) -> Iterator[str]:
    if fleet.outstanding() and "P" not in keeps:
        yield "a handoff"
    for name, engine in fleet.engines.items():
        if engine.counters.traps:
            yield f"a trap at {name}"
        if engine.pinned and name[0] not in keeps:
            yield f"KV that {name} keeps"


def failing(kind: FaultKind, leg: FaultLeg, **more: Any) -> dict[str, Any]:
    """Two of each, so that another one can be asked."""
    return {"names": "P1 P2 D1 D2", "fails": Order(kind, leg=leg, **more)}


_ON_P, _ON_D = FaultLeg.PREFILL, FaultLeg.DECODE
_MOVES: dict[str, Any] = {"mode": Mode.SLO, "profile": "h100-llama-3.1-8b", "moves_kv": True}
_ENCODES: dict[str, Any] = {"encoder": EncoderUse.ALWAYS}

SCENES: Mapping[str, Scene] = {
    **{
        f"SPLIT by {name}": Scene(connector=name, keeps="P" * connector.finds_by_content)
        for name, connector in CONNECTORS.items()
    },
    "LOCAL": Scene(route=Route.LOCAL),
    "REPLICA": Scene(names="R1", settings={"mode": Mode.REPLICA}),
    "READBACK": Scene(
        names="P1 D1",
        opens=Route.SPLIT,
        route=Route.READBACK,
        engine=READS_BACK,
        options=",bidirectional_kv_xfer=true",
        keeps="D",
    ),
    "a move": Scene(names="D1 D2", settings=_MOVES, words=WORDS * 100, is_crowded=True),
    "by a sidecar": Scene(names="P1 D1", is_of_sidecars=True),
    "encoders, then P": Scene(names="E1 P1 D1", settings=_ENCODES, shows_picture=True),
    "encoders, then R": Scene(names="E1 R1", settings={"mode": Mode.REPLICA, **_ENCODES}, shows_picture=True),
    "the queue": Scene(settings={"max_inflight": 1}, is_queued=True),
    "a list of prompts": Scene(is_list=True),
    "P resets": Scene(**failing(FaultKind.RESET, _ON_P)),
    "P tells nothing": Scene(**failing(FaultKind.HANDOFF, _ON_P), keeps="P"),
    "D resets": Scene(**failing(FaultKind.RESET, _ON_D), keeps="P"),
    "LOCAL fails": Scene(route=Route.LOCAL, fails=Order(FaultKind.ERROR, leg=FaultLeg.PLAIN)),
}
