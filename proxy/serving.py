"""The proxy's port: bound here, served by Hypercorn."""

from __future__ import annotations

import asyncio
import logging
import socket

from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config
from hypercorn.typing import ASGIFramework, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope

from .app import create_app
from .assembly import Proxy
from .config import ProxyConfig
from .errors import ConfigError

BACKLOG = 4096  # a burst of clients must not be refused by the kernel


def listen(config: ProxyConfig) -> socket.socket:
    """The listening socket; ConfigError where the port can't be had. Port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
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
    """Serves until `stop` is set; open streams then get `shutdown_timeout_s` to end. ConfigError if a port is taken."""
    config = proxy.settings.config
    proxy.listener.open()
    server = Config()
    server.bind = [f"fd://{listening.detach()}"]  # Hypercorn closes it
    server.backlog = BACKLOG
    server.keep_alive_timeout = 75.0
    server.graceful_timeout = config.shutdown_timeout_s
    server.shutdown_timeout = config.shutdown_timeout_s
    server.include_server_header = False
    server.errorlog = logging.getLogger("hypercorn")  # its own would print every line twice
    server.h11_max_incomplete_size = 64 * 1024  # of a request's head
    app = PatientSend(create_app(proxy), config.idle_timeout_s)
    await hypercorn_serve(app, server, shutdown_trigger=stop.wait)


class PatientSend:
    """An app whose every write to a client has a time-out: one that stops reading must not hold a worker for ever."""

    def __init__(self, app: ASGIFramework, limit_s: float) -> None:
        self._app = app
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_in_time(event: ASGISendEvent) -> None:
            async with asyncio.timeout(self._limit_s):
                await send(event)

        await self._app(scope, receive, send_in_time)
