"""A sidecar on a free port before a simulated D, with a P that it may be sent to and a replica to compare with."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from ppd.servers.sidecar.prefills import HEADER
from ppd.servers.sidecar.sidecar import Sidecar
from ppd.servers.sim.engine.engine import SimEngine
from tests.servers.sidecar.sidecars import running_sidecar
from tests.support.fleet import start_engine

CHAT = "/v1/chat/completions"
WORDS = "Some words, so that there are blocks to move. " * 3
BODY: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": WORDS}],
    "max_tokens": 24,
    "temperature": 0,
}


@dataclass(slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def text(self) -> str:
        """Of a whole answer, or of a stream's events."""
        if not self.raw.startswith(b"data:"):
            return str(self.body["choices"][0]["message"]["content"])
        events = [json.loads(line[6:]) for line in self.raw.splitlines() if line.startswith(b"data: {")]
        choices = [event["choices"][0]["delta"] for event in events if event["choices"]]
        return "".join(delta.get("content") or "" for delta in choices)


@dataclass
class Site:
    """A sidecar that runs in this event loop, and the engines around it by name."""

    sidecar: Sidecar
    base_url: str
    session: aiohttp.ClientSession
    stop: asyncio.Event
    serving: asyncio.Task[None]
    engines: dict[str, SimEngine]
    lives: dict[str, AsyncExitStack] = field(default_factory=dict)

    @classmethod
    @asynccontextmanager
    async def of(
        cls,
        *,
        tls: ssl.SSLContext | None = None,
        engine: Mapping[str, Any] | None = None,
        engine_at: str = "",
        engine_of: str = "D1",
        names: str = "P1 D1",
        connector: str = "",
        **options: Any,
    ) -> AsyncIterator[Self]:
        """engine: settings of the engines; options: of `running_sidecar`.

        connector: of all, and the sidecar is told what it must know; else it is NIXL's pull mode.
        engine_of: the name of the engine that it stands before; engine_at: the address of another one; names: of the
        engines; tls: the client's, of a sidecar that speaks it.
        """
        async with AsyncExitStack() as stack:
            lives = {name: await stack.enter_async_context(AsyncExitStack()) for name in names.split()}
            kind = {**(engine or {}), **({"connector": connector} if connector else {})}
            engines = {name: await start_engine(life, name, **kind) for name, life in lives.items()}
            if connector:
                options = {"connector": connector, **coordinates_told(engines), **options}
            session = await stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls or True))
            )
            made = await stack.enter_async_context(running_sidecar(engine_at or engines[engine_of].address, **options))
            base_url = f"http{'s' if tls else ''}://{made.address}"
            yield cls(made.sidecar, base_url, session, made.stop, made.serving, engines, lives)
            if found := {name: dict(each.counters.traps) for name, each in engines.items() if each.counters.traps}:
                raise AssertionError(f"used as it must not be: {found}")

    @property
    def to_p(self) -> dict[str, str]:
        """The header that names P1."""
        return {HEADER: self.engines["P1"].address}

    async def ask(self, headers: Mapping[str, str] | None = None, path: str = CHAT, **changes: Any) -> Answer:
        async with self.session.post(self.base_url + path, json={**BODY, **changes}, headers=headers) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str, **more: Any) -> Answer:
        async with self.session.request(more.pop("method", "GET"), self.base_url + path, **more) as response:
            return Answer(response.status, response.headers, await response.read())

    async def kill(self, name: str) -> None:
        await self.lives[name].aclose()

    def received(self, name: str) -> list[dict[str, Any]]:
        """Bodies of generation requests that an engine got."""
        return [json.loads(request.body) for request in self.engines[name].received]

    def is_idle(self) -> bool:
        state = self.sidecar.state
        running = any(engine.scheduler.sequences or engine.pinned for engine in self.engines.values())
        views = any(view.inflight for view in state.registry.views())
        return not running and not views and not state.handoffs.outstanding(state.now())

    async def until(self, holds: Callable[[], bool], limit_s: float = 60) -> None:
        async with asyncio.timeout(limit_s):
            while not holds():
                await asyncio.sleep(0.005)


def coordinates_told(engines: Mapping[str, SimEngine]) -> dict[str, Any]:
    """The sidecar's options that say what its connector must know of D1 and of each P."""
    told = {name: engine.protocol.coordinates(engine.own) for name, engine in engines.items()}
    prefills = {engines[name].address: of_p for name, of_p in told.items() if name[0] == "P"}
    return {"coordinates": told["D1"], "prefills": prefills}
