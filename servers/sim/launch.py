"""Assembles and runs one engine: its HTTP server, its side channel and its tasks.

`api.requests` turns a body into a `Generation`. `engine.engine` gives its sequences to `core.scheduler`, which runs
them in steps over the prefix cache (`core.block_pool`). `protocols` say what a request asks of KV transfers.
`core.handoffs` pins the KV that P has finished until D has pulled it through `engine.side_channel`, once the two have
met in P's `engine.meetings` if they go by a key. `core.answer_text` makes the text from the KV that the engine really
holds. `templates` write the prompt of a conversation.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import zmq
from aiohttp import web

from ppd.proxy.config import cannot_listen, host_and_port
from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role

from .api.server import create_app
from .core.config import SimConfig
from .engine.engine import SimEngine
from .engine.kv_events import KvEventPublisher
from .engine.port import Listener
from .engine.side_channel import Peers, SideChannel

_KEEP_ALIVE_S = 5.0  # vLLM's default; most clients keep idle connections longer


@asynccontextmanager
async def running_engine(
    config: SimConfig, *, now: Callable[[], float] = time.monotonic, kill: Callable[[], None] | None = None
) -> AsyncIterator[SimEngine]:
    """Serves on `engine.address` until the block is left; requests in flight then end as aborted.

    `now` is the clock of leases and latencies, in seconds. `kill` ends this process, if the engine is alone in it.
    """
    async with AsyncExitStack() as stack:
        # Shorter than the peers keep it, or a read would now and then meet the connection's end.
        # No limit: prompts that wait for their P hold a connection each.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S / 2)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        peers = Peers(session, config)
        events = None
        if config.kv_events_endpoint:
            events = _publisher(config)
            stack.callback(events.close)
            events.start()
        engine = SimEngine(config, peers, events=events, now=now, kill=kill)
        stack.push_async_callback(engine.close)
        if config.transfers_kv or config.role is Role.ENCODE:
            side_channel = SideChannel(engine)
            engine.side_listener = await _serve(stack, side_channel.app(), config, config.side_channel_port)
            engine.side_address = (config.side_channel_host or config.host, engine.side_listener.port)
        engine.listener = await _serve(stack, create_app(engine), config, config.port, _tls(config))
        engine.address = host_and_port(config.host, engine.listener.port)
        if events is not None:
            events.topic = events.topic.replace("{address}", engine.address)
        engine.start()
        stack.callback(engine.stop)
        yield engine


def _publisher(config: SimConfig) -> KvEventPublisher:
    try:
        return KvEventPublisher(
            config.kv_events_endpoint,
            config.kv_events_topic,
            config.block_size,
            encoding=config.kv_events_encoding,
            replay_endpoint=config.kv_events_replay_endpoint,
            buffer_steps=config.kv_events_buffer_steps,
        )
    except zmq.ZMQError as exc:
        endpoints = f"{config.kv_events_endpoint!r} and {config.kv_events_replay_endpoint!r}"
        raise ConfigError(
            f"kv_events_endpoint and kv_events_replay_endpoint = {endpoints}: each must be a ZeroMQ endpoint that is "
            f"free, such as tcp://*:5557 ({exc})",
            param="kv_events_endpoint",
        ) from exc


def _tls(config: SimConfig) -> ssl.SSLContext | None:
    if not config.ssl_certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile or None, password=""
        )  # else OpenSSL asks the terminal
    except OSError as exc:  # as SSLError is one
        files = f"ssl_certfile = {config.ssl_certfile!r} and ssl_keyfile = {config.ssl_keyfile!r}"
        raise ConfigError(f"{files}: must be a PEM certificate and its key ({exc})", param="ssl_certfile") from exc
    return context


async def _serve(
    stack: AsyncExitStack, app: web.Application, config: SimConfig, port: int, tls: ssl.SSLContext | None = None
) -> Listener:
    """tls: what clients must speak; None: plain HTTP."""
    listener = Listener(app, config.host, port, keep_alive_s=_KEEP_ALIVE_S, shutdown_s=config.shutdown_s, tls=tls)
    stack.push_async_callback(listener.end)
    try:
        await listener.open()
    except OSError as exc:
        param = "port" if port == config.port else "side_channel_port"
        raise cannot_listen(param, port, "host", config.host, exc) from exc
    return listener
