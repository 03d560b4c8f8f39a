"""Carries out the planned faults on a running fleet, and undoes them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable
from random import Random

import aiohttp
import msgspec

from .fault_plan import faults
from .fleet import FleetDamaged, SoakFleet
from .records import Disturbance, FleetFault


class FaultRunner:
    """`done` holds the faults as carried out, with their measured times."""

    def __init__(self, fleet: SoakFleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._draw = Random("faults")
        self.done: list[Disturbance] = []

    async def run(self, planned: Iterable[Disturbance]) -> None:
        async with asyncio.TaskGroup() as group:
            for one in planned:
                group.create_task(self._disturb(one))

    async def _disturb(self, planned: Disturbance) -> None:
        await asyncio.sleep(max(0.0, planned.at_s - self._clock()))
        begun_s, problem = self._clock(), ""
        try:
            await self._begin(planned)
            await asyncio.sleep(max(0.0, begun_s + planned.lasts_s - self._clock()))
            await self._end(planned)
            await self._fleet.all_up()
        except TimeoutError:
            problem = "the fleet was not whole again in time"
        except FleetDamaged as exc:
            problem = str(exc)
        except aiohttp.ClientError as exc:
            problem = f"the admin API failed: {type(exc).__name__}"
        lasted_s = self._clock() - begun_s
        self.done.append(msgspec.structs.replace(planned, at_s=begun_s, lasts_s=lasted_s, problem=problem))

    async def _begin(self, one: Disturbance) -> None:
        fleet, name = self._fleet, one.worker
        match one.kind:
            case FleetFault.KILL:
                await fleet.kill_engine(name)
            case FleetFault.RESTART:
                await fleet.drain(name, draining=True)
                await fleet.unused(name)
                await fleet.idle(name)
                await fleet.stop_engine(name)
            case FleetFault.DRAIN:
                await fleet.drain(name, draining=True)
            case FleetFault.REMOVE:
                await fleet.remove(name)
            case FleetFault.FLIP:
                await fleet.remove(name)
                await fleet.register(name, "D" if name[0] == "P" else "P")
            case FleetFault.JOIN:
                await fleet.start_engine(name)
                await fleet.register(name)
            case FleetFault.PAUSE:
                fleet.signal_proxy(signal.SIGSTOP)
            case FleetFault.POISON:
                await fleet.ask_poisoned(one.lasts_s)
            case FleetFault.CONFIG:
                fleet.spoil_config()
            case FleetFault.CLOCK:
                fleet.set_clock(self._draw.choice((-3600.0, 3600.0)))
            case _:
                await fleet.order_faults(name, faults(one))

    async def _end(self, one: Disturbance) -> None:
        fleet, name = self._fleet, one.worker
        match one.kind:
            case FleetFault.KILL:
                await fleet.start_engine(name)
            case FleetFault.RESTART:
                await fleet.start_engine(name)
                await fleet.drain(name, draining=False)
            case FleetFault.DRAIN:
                await fleet.drain(name, draining=False)
            case FleetFault.REMOVE:
                await fleet.register(name)
            case FleetFault.FLIP:
                await fleet.remove(name)
                await fleet.register(name)
            case FleetFault.JOIN:
                await fleet.drain(name, draining=True)
                await fleet.unused(name)
                await fleet.remove(name)
                await fleet.idle(name)
                await fleet.stop_engine(name)
            case FleetFault.PAUSE:
                fleet.signal_proxy(signal.SIGCONT)
            case FleetFault.POISON:
                await fleet.revive_engines()
            case FleetFault.CONFIG:
                mode = self._draw.choice(("table", "always_local", "always_split"))
                fleet.change_config(mode, prefills_answer=self._draw.random() < 0.5)
            case FleetFault.CLOCK:
                fleet.set_clock(0.0)
            case FleetFault.DEAF:
                return  # ends by itself; until then the engine accepts no order
            case _:
                await fleet.order_faults(name, {})
