"""HTTP/2, which Hypercorn speaks. It gets a connection that has begun with HTTP/2's preface.

Hypercorn's own accept loop counts no connections, and has a single time-out for heads and idle connections. So it is
handed accepted connections through `TCPServer`, the only internal part of it that is used.
"""

from __future__ import annotations

import asyncio
import logging

from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.typing import ASGIFramework
from hypercorn.utils import wrap_app

from ..config import ProxyConfig
from .limits import CLOSE_S, ConnectionLimits

log = logging.getLogger(__name__)


class HypercornReader(asyncio.StreamReader):
    """Tells its connection's limits when bytes come, and Hypercorn when the client has closed.

    Without the latter a closed connection would stay until Hypercorn's idle time-out.
    """

    def __init__(self) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.connection: ConnectionLimits | None = None
        self.context = WorkerContext(None)

    async def read(self, n: int = -1) -> bytes:
        data = b""
        try:
            data = await super().read(n)
        finally:
            if not data:
                await self.context.terminated.set()
        if data and self.connection is not None:
            self.connection.heard()
        return data

    def feed_eof(self) -> None:
        super().feed_eof()
        if self.connection is not None:
            self.connection.lost()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        if self.connection is not None:
            self.connection.lost()


class HypercornServer:
    """Serves the application; each call of `serve` lasts as long as its connection."""

    def __init__(self, app: ASGIFramework, config: ProxyConfig) -> None:
        self._app = wrap_app(app, 0, "asgi")
        self._hypercorn = _hypercorn_config(config)

    async def serve(
        self, limits: ConnectionLimits, protocol: asyncio.StreamReaderProtocol, reader: HypercornReader
    ) -> None:
        loop = asyncio.get_running_loop()
        reader.connection = limits
        try:
            writer = asyncio.StreamWriter(limits.transport, protocol, reader, loop)
            state = {"connection": limits}
            await TCPServer(self._app, loop, self._hypercorn, reader.context, state, reader, writer)
        except Exception as exc:  # what one client sends must not affect the others
            log.warning(
                "a client's connection failed: %s", type(exc).__name__, exc_info=log.isEnabledFor(logging.DEBUG)
            )
        finally:
            limits.abort()


def _hypercorn_config(config: ProxyConfig) -> Config:
    server = Config()
    server.include_server_header = False
    server.errorlog = logging.getLogger("hypercorn")  # Hypercorn's own logger would print every line twice
    server.h11_max_incomplete_size = config.head_limit_bytes
    server.h2_max_header_list_size = config.head_limit_bytes
    # Hypercorn's limit on requests per connection breaks open HTTP/2 streams.
    server.keep_alive_max_requests = 2**62
    server.keep_alive_timeout = config.idle_connection_s + config.head_timeout_s + CLOSE_S  # longer than our own limits
    return server
