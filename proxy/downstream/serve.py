"""Runs the proxy on its port: binds it, serves until told to stop, and drains."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quart import Quart

from .. import plane
from ..app.client_routes import create_app
from ..assembly import Proxy
from ..bodies.body_memory import BodyMemory
from ..config import DataPlane, ProxyConfig, cannot_listen
from ..errors import ConfigError
from ..routing.service import TurnService
from ..routing.state import State
from ..runtime.tasks import Drain
from ..runtime.tls import Tls
from ..runtime.watched_files import watch
from ..telemetry.access_log import AccessLog
from .asgi_edge import Edge
from .connections import Connections
from .http1_server import Http1Server
from .hypercorn import HypercornServer

BACKLOG = 4096  # a burst of clients must not be refused by the kernel


def listen(config: ProxyConfig) -> socket.socket:
    """The listening socket; ConfigError if the port can't be bound. Port 0 takes a free one."""
    host = config.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only on sockets made with an explicit protocol. With Nagle an answer in two
    # writes waits 40 ms for the client's ACK.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, config.port))
        listening.listen(BACKLOG)
    except OSError as exc:
        listening.close()
        raise cannot_listen("port", config.port, "host", config.host, exc) from exc
    return listening


def check_others_free(config: ProxyConfig) -> None:
    """ConfigError if another port than the clients' is in use. Of several processes each would say so for itself, and
    how it ends; so they are asked for before there are any."""
    for key, host_key in (
        ("heartbeat_port", "heartbeat_host"),
        ("curve_port", "heartbeat_host"),
        ("picker_port", "picker_host"),
        ("picker_health_port", "picker_host"),
    ):
        host, port = getattr(config, host_key), getattr(config, key)
        error = bind_error(host, port)
        if error is not None and error.errno == errno.EADDRINUSE:  # else it may be a name that only ZeroMQ knows
            raise cannot_listen(key, port, host_key, host, error)


def bind_error(host: str, port: int) -> OSError | None:
    """Why the port can't be bound; None if it can, and for port 0."""
    host = "0.0.0.0" if host == "*" else host.strip("[]")  # ZeroMQ writes "*" for every address
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as listening:
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(1)
        except OSError as exc:
            return exc if port else None
    return None


class Beside(Protocol):
    """Another port, which opens and drains with the clients' own."""

    async def open(self) -> None: ...  # ConfigError if it is taken

    def go_away(self) -> None: ...

    async def drained(self, limit_s: float) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What is served on a port, and what bounds it. turns: what answers them over HTTP/1.1; all else is `app`'s."""

    config: ProxyConfig
    app: Quart
    turns: TurnService
    state: State
    drain: Drain
    body_memory: BodyMemory
    access_log: AccessLog | None
    poller: plane.Poller | None
    shares_port: bool = False  # with other processes
    beside: Beside | None = None


async def serve(
    proxy: Proxy, listening: socket.socket, stop: asyncio.Event, on_open: Callable[[], None] = lambda: None
) -> None:
    """Serves until `stop` is set, and `drain_delay_s` longer. Then it closes `listening` and drains: open answers get
    `shutdown_timeout_s` to end. on_open: called once all ports are open, before a client is accepted.
    ConfigError if a port is taken.
    """
    config = proxy.settings.config
    proxy.loop_watch.start()
    try:
        if proxy.membership.leads:
            proxy.listener.open()
            proxy.event_subscriber.open()
        if proxy.tokenizer is not None:
            await proxy.tokenizer.open()
        app = create_app(proxy)
        await proxy.membership.join()
        site = Site(
            config=config,
            app=app,
            turns=proxy.turns,
            state=proxy.state,
            drain=proxy.drain,
            body_memory=proxy.body_memory,
            access_log=proxy.access_log,
            poller=proxy.poller,
            shares_port=bool(proxy.membership.peers),
            beside=_gateway(proxy, app),
        )
        await serve_site(site, listening, stop, proxy.files.client_tls, on_open)
    finally:
        proxy.loop_watch.stop()


async def serve_site(
    site: Site,
    listening: socket.socket,
    stop: asyncio.Event,
    tls: Tls | None,
    on_open: Callable[[], None] = lambda: None,
) -> None:
    """As `serve`, of anything that answers turns. tls: towards clients."""
    config = site.config
    edge = Edge(site.app, config, site.drain, site.body_memory, site.access_log, site.turns.rejected)
    http1 = Http1Server(edge, None if config.data_plane is DataPlane.ASGI else site.turns, config)
    connections = Connections(http1, HypercornServer(edge, config), config, tls, site.state.now, site.poller)
    if site.shares_port:
        connections.share_bursts()
    site.state.metrics.watch(connections.gauges)
    await site.app.startup()
    if site.beside is not None:
        await site.beside.open()
    on_open()
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(connections.watch())]
            if tls is not None:
                watching.append(tasks.create_task(watch(tls.look, site.state.metrics.reloaded)))
            accepting = tasks.create_task(connections.accept(listening))
            await stop.wait()
            site.drain.announce()
            await asyncio.sleep(config.drain_delay_s)
            accepting.cancel()
            await asyncio.wait({accepting})
            listening.close()
            site.drain.begin()
            connections.go_away()
            draining = [edge.requests.drained(config.shutdown_timeout_s)]
            if site.beside is not None:
                site.beside.go_away()
                draining.append(site.beside.drained(config.shutdown_timeout_s))
            await asyncio.gather(*draining)
            for task in watching:
                task.cancel()
            await connections.close()
    finally:
        if site.beside is not None:
            await site.beside.close()
        await site.app.shutdown()
        if site.poller is not None:
            site.poller.close()


def check_extra() -> None:
    """ConfigError where what a picker needs is not installed."""
    try:
        from ..gateway import server  # noqa: F401
    except ImportError as exc:
        raise ConfigError(
            f"picker_port needs the extra `gateway`: pip install 'ppd-router[gateway]' ({exc.name} is not installed)",
            param="picker_port",
        ) from exc


def _gateway(proxy: Proxy, app: Quart) -> Beside | None:
    """None where no picker is wanted."""
    if not proxy.settings.config.picker_port:
        return None
    check_extra()
    from ..gateway.server import Gateway  # only now, as the extra may be missing

    return Gateway(proxy, app)
