"""The proxy's port: bound here, served by Hypercorn."""

from __future__ import annotations

import asyncio
import socket

from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config

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
    server.h11_max_incomplete_size = 64 * 1024  # of a request's head
    await hypercorn_serve(create_app(proxy), server, shutdown_trigger=stop.wait)
