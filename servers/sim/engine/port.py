"""One port of an engine, which can be closed and opened again while the engine runs."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

from aiohttp import web

_BACKLOG = 2048
_ROUNDS = 3  # of the loop, after which asyncio has made the protocol of a connection that it has accepted


class Listener:
    """Serves `app` on `host` once it is open. Port 0 becomes a free one, which stays the same when reopened."""

    def __init__(
        self,
        app: web.Application,
        host: str,
        port: int,
        *,
        keep_alive_s: float,
        shutdown_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._busy: set[asyncio.Transport | None] = set()
        app.middlewares.append(self._track)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a client that leaves ends its request
            keepalive_timeout=keep_alive_s,
            shutdown_timeout=shutdown_s,
            access_log=None,
        )
        self._host, self._tls = host, tls
        self._server: asyncio.Server | None = None
        self._closing: asyncio.Server | None = None
        self._is_severed = False
        self.port = port

    async def open(self) -> None:
        if self._server is not None:
            return
        await self.closed()
        self._is_severed = False
        if self._runner.server is None:
            await self._runner.setup()
        factory = self._runner.server
        assert factory is not None, "the runner is set up"
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(factory, self._host, self.port, ssl=self._tls, backlog=_BACKLOG)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Refuses connections and drops idle ones. Requests in progress are answered, then their connections end."""
        self._stop_listening()
        for connection in self._connections():
            if connection.transport in self._busy:
                connection.close()
            else:
                connection.force_close()

    def sever(self) -> None:
        """Refuses connections and drops all, also those with a request in progress."""
        self._is_severed = True
        self._stop_listening()
        self._abort_all()

    async def end(self) -> None:
        self._stop_listening()
        await self.closed()
        await self._runner.cleanup()

    async def closed(self) -> None:
        """After `close` or `sever`: once nobody listens any more, which takes some rounds of the loop."""
        while self._closing is not None:
            await asyncio.sleep(0)

    @web.middleware
    async def _track(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        transport = request.transport
        self._busy.add(transport)
        try:
            return await handler(request)
        finally:
            self._busy.discard(transport)

    def _abort_all(self) -> None:
        for connection in self._connections():
            if connection.transport is not None:
                connection.transport.abort()

    def _stop_listening(self) -> None:
        if self._server is None:
            return
        self._closing, self._server = self._server, None
        for listening in self._closing.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        self._close(_ROUNDS)

    def _close(self, rounds: int) -> None:
        """Only now: asyncio loses a connection whose server is closed between its being accepted and made."""
        if rounds:
            asyncio.get_running_loop().call_soon(self._close, rounds - 1)
        elif self._closing is not None:
            self._closing.close()
            self._closing = None
            if self._is_severed:
                self._abort_all()

    def _connections(self) -> list[web.RequestHandler]:
        return [] if self._runner.server is None else list(self._runner.server.connections)
