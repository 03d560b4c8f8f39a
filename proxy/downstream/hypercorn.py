"""The stock data plane: Hypercorn speaks to the client, which TLS and HTTP/2 need.

Its own accept loop counts no connections, and has one time-out for a head and for an idle connection; so it is handed
accepted ones, through its `TCPServer`, the one inner part of it that is used.
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


class StockReader(asyncio.StreamReader):
    """Tells its connection when bytes come, and Hypercorn when none will.

    Without that a connection whose client has closed it stays until Hypercorn's idle time is over.
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


class Stock:
    """Serves one connection at a time to the application."""

    def __init__(self, app: ASGIFramework, config: ProxyConfig) -> None:
        self._app = wrap_app(app, 0, "asgi")
        self._hypercorn = _hypercorn_config(config)

    async def serve(
        self, limits: ConnectionLimits, protocol: asyncio.StreamReaderProtocol, reader: StockReader
    ) -> None:
        """Until the connection ends."""
        loop = asyncio.get_running_loop()
        reader.connection = limits
        try:
            writer = asyncio.StreamWriter(limits.transport, protocol, reader, loop)
            state = {"connection": limits}
            await TCPServer(self._app, loop, self._hypercorn, reader.context, state, reader, writer)
        except Exception as exc:  # whatever a client sends, the others are served
            log.warning(
                "a client's connection failed: %s", type(exc).__name__, exc_info=log.isEnabledFor(logging.DEBUG)
            )
        finally:
            limits.abort()


def _hypercorn_config(config: ProxyConfig) -> Config:
    server = Config()
    server.include_server_header = False
    server.errorlog = logging.getLogger("hypercorn")  # its own would print every line twice
    server.h11_max_incomplete_size = config.head_limit_bytes
    server.h2_max_header_list_size = config.head_limit_bytes
    # Its own limit on the requests of a connection breaks the streams that are under way on HTTP/2.
    server.keep_alive_max_requests = 2**62
    server.keep_alive_timeout = config.idle_connection_s + config.head_timeout_s + CLOSE_S  # ours come first
    return server
