"""A proxy in this process, before workers that run already."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ppd.proxy.assembly import assemble
from ppd.proxy.config import ProxyConfig
from ppd.proxy.downstream.serve import listen, serve
from ppd.proxy.settings import Settings


@asynccontextmanager
async def serving(config: ProxyConfig) -> AsyncIterator[str]:
    """The base URL, once all workers of the config are up."""
    proxy, listening, stop = assemble(Settings(config)), listen(config), asyncio.Event()
    task = asyncio.create_task(serve(proxy, listening, stop))
    try:
        while not task.done() and sum(view.up for view in proxy.state.registry.views()) < len(config.workers):
            await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        stop.set()
        await task
