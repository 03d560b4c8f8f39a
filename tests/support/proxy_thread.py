"""A proxy and simulated engines in a thread of their own: tests speak to them over blocking sockets."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ppd.proxy.assembly import Proxy
from ppd.servers.sim.engine.engine import Received, SimEngine
from tests.support.fleet import Fleet


class Alarms(logging.Handler):
    """What was logged as an error: a traceback, whatever the client was told."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def check(self) -> None:
        records, self.records = self.records, []
        assert not records, [logging.Formatter().format(record) for record in records]


@dataclass
class Target:
    """A proxy under test; `port` is where its clients connect."""

    port: int
    proxy: Proxy
    loop: asyncio.AbstractEventLoop
    engines: dict[str, SimEngine] = field(default_factory=dict)
    alarms: Alarms = field(default_factory=Alarms)

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs a plain function where the proxy runs."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as exc:
                done.set_exception(exc)

        self.loop.call_soon_threadsafe(run)
        return done.result(20)

    def received(self) -> list[Received]:
        """The generation requests that engines got since the last look."""

        def take() -> list[Received]:
            found = [request for engine in self.engines.values() for request in engine.received]
            for engine in self.engines.values():
                engine.received.clear()
            return found

        found: list[Received] = self.call(take)
        return found


def run_target(names: str, settings: dict[str, Any], ready: Future[Target], stop: threading.Event) -> None:
    """The life of one target, for a thread of its own; `ready` gets it, or why there is none."""

    async def main() -> None:
        async with Fleet.of(names, **settings) as fleet:
            await fleet.until(lambda: set(fleet.states().values()) <= {"up"})  # workers of the config too
            port = int(fleet.base_url.rpartition(":")[2])
            ready.set_result(Target(port, fleet.proxy, asyncio.get_running_loop(), fleet.engines))
            await asyncio.to_thread(stop.wait)

    try:
        asyncio.run(main())
    except BaseException as exc:
        if ready.done():
            raise
        ready.set_exception(exc)
