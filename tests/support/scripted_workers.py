"""Workers that no engine would be: healthy by their probes, and answering as a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def odd_worker(fleet: Any, handler: Handler, role: str = "D") -> AsyncIterator[None]:
    """A worker that is healthy, serves model `sim`, and answers chats as the handler does."""

    async def plain(request: web.Request) -> web.Response:
        return web.Response(text='{"data": [{"id": "sim"}]}' if request.path == "/v1/models" else "")

    app = web.Application()
    app.router.add_post("/{path:.*}", handler)
    app.router.add_get("/{path:.*}", plain)
    async with TestServer(app) as server:
        address = f"127.0.0.1:{server.port}"
        await fleet.admin("POST", "/workers", {"worker": f"{role}={address}"})
        await fleet.until(lambda: any(v.id == address and v.up for v in fleet.proxy.state.registry.views()))
        yield
