"""Fleets of one connector each: strict simulated engines of its protocol, which refuse what is wrong or used twice."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from ppd.proxy.config import Mode
from ppd.proxy.connectors import CONNECTORS, missing_coordinates
from ppd.proxy.failures import Leg
from ppd.servers.sim.core.counters import Trap
from ppd.servers.sim.core.fault_orders import Faults, Order
from ppd.servers.sim.engine.engine import SimEngine
from tests.e2e.failures.fleet import FaultFleet, Seen, Talk

NAMES = list(CONNECTORS)
WORDS = "Some words, so that there are blocks to move. " * 4
SOON_S = 1.5  # the time-outs of legs, where cases wait for them
HASTY = dict.fromkeys(("prefill_timeout_s", "first_event_timeout_s", "answer_timeout_s"), SOON_S)
ROLES = {Leg.PREFILL: "P", Leg.DECODE: "D"}


async def join(field: FaultFleet, connector: str, names: str, told: str = "", **settings: Any) -> None:
    """Engines of this connector, announced with what a proxy must know of them. told: of each D besides."""
    for name in names.split():
        engine = await field.start(name, connector=connector, num_blocks=2048, **settings)
        await field.join(name, engine, engine.address, options_of(engine) + (told if name[0] == "D" else ""))


def options_of(engine: SimEngine) -> str:
    """What its entry among static workers says."""
    told = {"connector": engine.config.connector, **engine.protocol.coordinates(engine.own)}
    if engine.protocol.engine != "vllm":
        told["engine"] = engine.protocol.engine
    return "".join(f",{key}={value}" for key, value in told.items())


def shows_transfers(seen: Seen) -> bool:
    """Whether the client was told a worker's parameters, or its address."""
    return any(part in seen.body for part in (b'_params":{', b'token_ids":[', b"127.0.0.1"))


class ConnectorFleet:
    """One proxy, and engines of one connector."""

    def __init__(self, connector: str, field: FaultFleet) -> None:
        self.connector = CONNECTORS[connector]
        self.field = field
        self._talks = 0

    @classmethod
    async def start(
        cls,
        stack: AsyncExitStack,
        connector: str,
        names: str = "P1 P2 D1 D2",
        *,
        engine: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> ConnectorFleet:
        """engine: settings of the engines; the others are the proxy's."""
        told = settings.pop("told", {}).get(connector, "")
        settings = {"mode": Mode.ALWAYS_SPLIT, **settings}
        field = await stack.enter_async_context(FaultFleet.of("", **settings))
        await join(field, connector, names, told, time_scale=0.05, **(engine or {}))
        await field.settle()
        return cls(connector, field)

    def talk(self) -> Talk:
        """A conversation that no other case has."""
        self._talks += 1
        return Talk([{"role": "user", "content": f"{self._talks} {WORDS}"}])

    def engines(self, leg: Leg) -> list[SimEngine]:
        return [engine for name, engine in self.field.engines.items() if name[0] == ROLES[leg]]

    def order(self, leg: Leg, order: Order) -> Faults:
        """For whichever engine is asked first."""
        shared = Faults([order])
        for engine in self.engines(leg):
            engine.faults = shared
        return shared

    def used_twice(self) -> int:
        """Keys that came a second time, or under which there was another prompt."""
        wrong = (Trap.USED_KEY, Trap.OTHER_PROMPT, Trap.WRONG_ENGINE, Trap.USED_HANDOFF, Trap.FOREIGN_BLOCKS)
        return sum(engine.counters.traps[trap] for engine in self.field.engines.values() for trap in wrong)

    def expired(self) -> int:
        """Handoffs that no D took."""
        return sum(engine.counters.expired_handoffs for engine in self.field.engines.values())

    async def rest(self) -> None:
        """Nothing runs and nothing is reserved; what only a lease frees, that frees."""
        await self.field.until(self.field.at_rest)
        self.field.forgive()
        await self.field.until(self.field.idle)
        prober = self.field.proxy.prober
        await self.field.until(lambda: not prober._probing)
        if self._lacks_somebody():  # who was asked of itself while another stood in its place
            prober.nudge()
            await self.field.until(lambda: not self._lacks_somebody())

    def _lacks_somebody(self) -> bool:
        views = self.field.proxy.state.registry.views()
        return any(
            not view.up or bool(missing_coordinates(view.worker)) for view in views if not self._is_dead(view.id)
        )

    def _is_dead(self, address: str) -> bool:
        return any(engine.is_dead for engine in self.field.engines.values() if engine.address == address)


class ConnectorFleets:
    """One fleet a connector, each started once."""

    def __init__(self, stack: AsyncExitStack, **settings: Any) -> None:
        self._stack = stack
        self._settings = settings
        self._fleets: dict[str, ConnectorFleet] = {}

    def forget(self, trap: Trap) -> None:
        """What cases have provoked on purpose is no misuse."""
        for fleet in self._fleets.values():
            for _, engine in fleet.field.started:
                del engine.counters.traps[trap]

    async def of(self, connector: str) -> ConnectorFleet:
        if connector not in self._fleets:
            self._fleets[connector] = await ConnectorFleet.start(self._stack, connector, **self._settings)
        return self._fleets[connector]
