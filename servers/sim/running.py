"""An engine that runs: its server, its side channel and its tasks, from start to clean end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
from aiohttp import web

from .config import SimConfig
from .engine import SimEngine
from .kv_events import KvEventPublisher
from .server import create_app
from .side_channel import Peers, SideChannel

_KEEP_ALIVE_S = 5.0  # vLLM's default: shorter than most clients keep idle connections
_BACKLOG = 2048


@asynccontextmanager
async def running_engine(config: SimConfig, *, now: Callable[[], float] = time.monotonic) -> AsyncIterator[SimEngine]:
    """An engine that answers on `engine.address` until the block is left; what is in flight then ends as aborted.

    `now` is the clock of leases and latencies, in seconds.
    """
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        peers = Peers(session, model=config.model, block_size=config.block_size, timeout_s=config.peer_timeout_s)
        events = None
        if config.kv_events_endpoint:
            events = KvEventPublisher(config.kv_events_endpoint, config.kv_events_topic, config.block_size)
            stack.callback(events.close)
        engine = SimEngine(config, peers, events=events, now=now)
        stack.push_async_callback(engine.close)
        if config.transfers_kv:
            side_channel = SideChannel(
                engine_id=engine.engine_id,
                model=config.model,
                pool=engine.pool,
                handoffs=engine.handoffs,
                counters=engine.counters,
                wake=engine.wake,
            )
            runner = await _serve(stack, side_channel.app(), config, config.side_channel_port)
            engine.side_address = (config.side_channel_host or config.host, _port(runner))
        runner = await _serve(stack, create_app(engine), config, config.port)
        engine.address = f"{config.host}:{_port(runner)}"
        engine.start()
        stack.callback(engine.stop)
        yield engine


async def _serve(stack: AsyncExitStack, app: web.Application, config: SimConfig, port: int) -> web.AppRunner:
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves ends its request
        keepalive_timeout=_KEEP_ALIVE_S,
        shutdown_timeout=config.shutdown_s,
        access_log=None,
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, config.host, port, backlog=_BACKLOG).start()
    return runner


def _port(runner: web.AppRunner) -> int:
    return int(runner.addresses[0][1])
