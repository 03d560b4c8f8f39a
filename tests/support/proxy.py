"""A running proxy as tests see it: conversations through it, its admin API, its metrics."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ppd.proxy.assembly import Proxy, assemble
from ppd.proxy.config import ProxyConfig
from ppd.proxy.downstream.serve import listen, serve
from ppd.proxy.settings import Settings

ADMIN_KEY = "operator"
DEFAULTS: dict[str, Any] = {
    "port": 0,
    "heartbeat_port": 0,
    "admin_key": ADMIN_KEY,
    "shutdown_timeout_s": 1.0,
    # Canaries and warm-up have tests of their own; elsewhere they would blur what a test counts.
    "canary_interval_s": 0.0,
    "warm_up_s": 0.0,
}
"""Of proxies in tests; a run with `--data-plane` adds that."""


@dataclass(slots=True)
class Turn:
    """One answer as a client sees it."""

    status: int
    headers: Mapping[str, str]
    body: Any
    text: str

    @property
    def route(self) -> str:
        return self.headers.get("X-PPD-Route", "")

    @property
    def reason(self) -> str:
        return self.headers.get("X-PPD-Reason", "")


@dataclass(slots=True)
class Chat:
    """A conversation that grows by what is answered."""

    client: ProxyClient
    messages: list[dict[str, Any]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    async def say(self, text: str | list[dict[str, Any]], **body: Any) -> Turn:
        self.messages.append({"role": "user", "content": text})
        turn = await self.client.chat(self.messages, headers=self.headers, **body)
        if turn.status == 200:
            self.messages.append({"role": "assistant", "content": turn.text})
        return turn


@dataclass
class ProxyClient:
    """Speaks to a proxy that runs in this event loop; `proxy` is the inside of it."""

    proxy: Proxy
    base_url: str
    session: aiohttp.ClientSession
    model: str = "sim"

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Turn:
        async with self.session.post(self.base_url + path, json=body, headers=headers) as response:
            data = await response.read()
            return Turn(response.status, response.headers, await response.json(content_type=None) if data else None, "")

    async def chat(self, messages: list[dict[str, Any]], headers: Mapping[str, str] | None = None, **body: Any) -> Turn:
        body = {"model": self.model, "messages": messages, "max_tokens": 24, "temperature": 0, **body}
        turn = await self.post("/v1/chat/completions", body, headers)
        if turn.status == 200:
            turn.text = turn.body["choices"][0]["message"]["content"]
        return turn

    def conversation(self, **headers: str) -> Chat:
        return Chat(self, headers={name.replace("_", "-"): value for name, value in headers.items()})

    async def admin(self, method: str, path: str, body: Any = None, key: str = ADMIN_KEY) -> tuple[int, Any]:
        async with self.session.request(
            method, f"{self.base_url}/admin{path}", json=body, headers={"X-Admin-Key": key}
        ) as response:
            return response.status, await response.json()

    async def receipt(self, turn: Turn) -> dict[str, Any]:
        _, receipt = await self.admin("GET", f"/requests/{turn.headers['X-Request-Id']}")
        assert isinstance(receipt, dict)
        return receipt

    async def metric(self, sample: str) -> float:
        """The value of one Prometheus sample, named as it is printed; 0 where there is none."""
        async with self.session.get(f"{self.base_url}/metrics") as response:
            for line in (await response.text()).splitlines():
                name, _, value = line.rpartition(" ")
                if name == sample:
                    return float(value)
        return 0.0

    def states(self) -> dict[str, str]:
        """Every known worker's state by its name."""
        return {view.name: view.state for view in self.proxy.state.registry.views()}

    async def until(self, holds: Callable[[], bool], limit_s: float = 60) -> None:
        """Waits for something that another task brings about."""
        async with asyncio.timeout(limit_s):
            while not holds():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running_proxy(
    *, tls: ssl.SSLContext | None = None, member: Any = None, **settings: Any
) -> AsyncIterator[tuple[Proxy, str, aiohttp.ClientSession]]:
    """A proxy on a free port, its base URL, and a client session; `tls` is the client's, of a proxy that speaks it.

    member: which `Member` it is of several that behave as one.
    """
    config = ProxyConfig(**(DEFAULTS | settings))
    proxy = assemble(Settings(config), member=member)
    listening = listen(config)
    base_url = f"http{'s' if tls else ''}://127.0.0.1:{listening.getsockname()[1]}"
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(proxy, listening, stop))
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls or True)) as session:
            await _answers_or_ends(session, base_url, serving)
            yield proxy, base_url, session
    finally:
        stop.set()
        await serving
        listening.close()


async def _answers_or_ends(session: aiohttp.ClientSession, base_url: str, serving: asyncio.Task[None]) -> None:
    asking = asyncio.create_task(session.get(f"{base_url}/health"))
    await asyncio.wait({serving, asking}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        asking.cancel()
        serving.result()
    async with await asking as response:
        assert response.status == 200
