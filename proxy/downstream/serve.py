"""Runs the proxy on its port: binds it, serves until told to stop, and drains."""

from __future__ import annotations

import asyncio
import socket

from ..app.client_routes import create_app
from ..assembly import Proxy
from ..config import DataPlane, ProxyConfig
from ..errors import ConfigError
from ..runtime.tls import client_tls
from .asgi_edge import Edge
from .connections import Connections
from .http1_server import Http1Server
from .hypercorn import HypercornServer

BACKLOG = 4096  # a burst of clients must not be refused by the kernel


def listen(config: ProxyConfig) -> socket.socket:
    """The listening socket; ConfigError if the port can't be bound. Port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only on sockets made with an explicit protocol. With Nagle an answer in two
    # writes waits 40 ms for the client's ACK.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((config.host, config.port))
        listening.listen(BACKLOG)
    except OSError as exc:
        listening.close()
        raise ConfigError(
            f"port = {config.port}: must be a free port on {config.host} ({exc.strerror})", param="port"
        ) from exc
    return listening


async def serve(proxy: Proxy, listening: socket.socket, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, and `drain_delay_s` longer. Then it closes `listening` and drains: open answers get
    `shutdown_timeout_s` to end.
    ConfigError if a port is taken or a certificate can't be used.
    """
    proxy.loop_watch.start()
    try:
        await _serve(proxy, listening, stop)
    finally:
        proxy.loop_watch.stop()


async def _serve(proxy: Proxy, listening: socket.socket, stop: asyncio.Event) -> None:
    config = proxy.settings.config
    tls = client_tls(config)
    if proxy.membership.leads:
        proxy.listener.open()
        proxy.event_subscriber.open()
    if proxy.tokenizer is not None:
        await proxy.tokenizer.open()
    app = create_app(proxy)
    edge = Edge(app, config, proxy.drain, proxy.body_memory, proxy.access_log)
    http1 = Http1Server(edge, None if config.data_plane is DataPlane.ASGI else proxy.turns, config)
    connections = Connections(http1, HypercornServer(edge, config), config, tls, proxy.state.now, proxy.poller)
    if proxy.membership.peers:
        connections.share_bursts()
    proxy.state.metrics.watch(connections.gauges)
    await proxy.membership.join()
    await app.startup()
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(connections.watch())]
            if tls is not None:
                watching.append(tasks.create_task(tls.watch(proxy.state.metrics.reloaded)))
            accepting = tasks.create_task(connections.accept(listening))
            await stop.wait()
            proxy.drain.announce()
            await asyncio.sleep(config.drain_delay_s)
            accepting.cancel()
            await asyncio.wait({accepting})
            listening.close()
            proxy.drain.begin()
            connections.go_away()
            await edge.requests.drained(config.shutdown_timeout_s)
            for task in watching:
                task.cancel()
            await connections.close()
    finally:
        await app.shutdown()
        if proxy.poller is not None:
            proxy.poller.close()
