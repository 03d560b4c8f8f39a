"""Processes of one proxy in one event loop: nothing lies between them but the sockets that join them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppd.proxy.assembly import Proxy, assemble
from ppd.proxy.config import Mode, ProxyConfig, build
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import Role, Worker, WorkerId
from ppd.proxy.peers.channels import End, Member, make_ends
from ppd.proxy.settings import ConfigSource, Settings
from ppd.servers.sim.engine.engine import SimEngine
from tests.support.fleet import Fleet, event_options, start_engine, static_workers
from tests.support.proxy import Chat, ProxyClient, running_proxy

R1 = WorkerId("r1:1")
LONG = "A message of some length, so that there are blocks to hold. " * 10
NUMBERS = itertools.count()  # no two openers are alike


def worker(registry: Registry, address: str = R1) -> WorkerId:
    one = Worker(role=Role.REPLICA, address=address, models=("m",))
    registry.add_static(one, 0.0)
    registry.probed(one.id, one, None, 0.0)
    return one.id


class Pair:
    """Two processes, 0 and 1; tests do what their event loops would."""

    def __init__(self, file: Path | None = None, /, **settings: Any) -> None:
        """file: of the config, in place of the settings."""
        self.ends = make_ends(2)
        self.secret = Member().secret
        self.clock = 1000.0
        self.file = file
        self.config = ProxyConfig(mode=Mode.REPLICA, heartbeat_port=0, **settings) if file is None else build(file, {})
        self.begun = list[Proxy]()
        self.ones = [self.begin(index) for index in range(2)]

    def begin(self, index: int) -> Proxy:
        member = Member(index=index, ends=self.ends[index], secret=self.secret)
        source = None if self.file is None else ConfigSource(self.file, {})
        self.begun.append(assemble(Settings(self.config, source), now=lambda: self.clock, member=member))
        return self.begun[-1]

    async def join(self) -> None:
        await asyncio.gather(*(one.membership.join() for one in self.ones))

    async def hush(self) -> None:
        for one in self.begun:
            await one.membership.close()
            probing = list(one.prober._probing.values())
            for task in probing:
                task.cancel()
            await asyncio.gather(*probing, return_exceptions=True)
            await one.prober.close()

    def close(self) -> None:
        for one in self.begun:
            one.listener.close()
        for end in (end for of_one in self.ends for end in of_one.values()):
            end.close()


@dataclass
class ProxyGroup:
    """The proxies by their numbers, and engines by name (P1, D1, ...)."""

    ends: list[dict[int, End]]
    settings: dict[str, Any]
    secret: bytes
    proxies: dict[int, ProxyClient] = field(default_factory=dict)
    engines: dict[str, SimEngine] = field(default_factory=dict)
    _lives: dict[int, AsyncExitStack] = field(default_factory=dict)

    async def start(self, index: int) -> ProxyClient:
        """A proxy begins, the first of its number or a successor."""
        life = self._lives[index] = AsyncExitStack()
        member = Member(index=index, ends=self.ends[index], secret=self.secret)
        proxy, base_url, session = await life.enter_async_context(running_proxy(member=member, **self.settings))
        self.proxies[index] = ProxyClient(proxy, base_url, session)
        return self.proxies[index]

    async def stop(self, index: int) -> None:
        del self.proxies[index]
        await self._lives.pop(index).aclose()

    async def kill(self, index: int) -> None:
        """As `stop`, but without a last word: the others hear nothing more of it, and it nothing more of them."""
        channels = self.proxies[index].proxy.membership._channels
        for channel in channels._channels:
            channel.close()
        channels._channels.clear()
        channels._by_peer.clear()
        await self.stop(index)

    async def until(self, holds: Callable[[], bool], limit_s: float = 60) -> None:
        async with asyncio.timeout(limit_s):
            while not holds():
                await asyncio.sleep(0.005)

    def chat(self) -> WanderingChat:
        return WanderingChat(self.proxies[0])

    def inflight(self) -> list[int]:
        """Legs that run, as each proxy sees it."""
        return [sum(view.inflight for view in one.proxy.state.registry.views()) for one in self.proxies.values()]

    def idle(self) -> bool:
        """Nothing runs anywhere, and every proxy knows."""
        views = [view for one in self.proxies.values() for view in one.proxy.state.registry.views()]
        inside = [
            one.proxy.state.admission.inside + one.proxy.state.admission.inside_elsewhere
            for one in self.proxies.values()
        ]
        return not any(view.inflight or view.queued_prefill_tokens for view in views) and not any(inside)


class WanderingChat(Chat):
    """A conversation whose turns go to the proxy that each names."""

    async def at(self, client: ProxyClient, text: str, **body: Any) -> Any:
        self.client = client
        return await self.say(text, **body)


async def opener(at: ProxyClient, headers: dict[str, str] | None = None, **body: Any) -> Any:
    """A conversation's first turn."""
    return await at.chat([{"role": "user", "content": f"{next(NUMBERS)} {LONG}"}], headers, **body)


@asynccontextmanager
async def proxy_group(
    names: str, count: int = 2, *, engine: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[ProxyGroup]:
    """So many proxies and a fleet by the names of its workers: `P1 D1 D2`, which all of them find up."""
    ends = make_ends(count)
    async with AsyncExitStack() as stack:
        for end in (end for one in ends for end in one.values()):
            stack.callback(end.close)
        engines = {name: await start_engine(stack, name, **(engine or {})) for name in names.split()}
        workers = static_workers((name, one.address + event_options(one)) for name, one in engines.items())
        group = ProxyGroup(ends, {**Fleet.settings, "workers": workers, **settings}, Member().secret, engines=engines)
        try:
            await asyncio.gather(*(group.start(index) for index in range(count)))
            await group.until(
                lambda: all(list(one.states().values()) == ["up"] * len(workers) for one in group.proxies.values())
            )
            yield group
        finally:
            for index in list(group.proxies):
                await group.stop(index)
