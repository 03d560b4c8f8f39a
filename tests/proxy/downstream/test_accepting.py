"""Clients' connections are accepted, whatever has become of others that wait for it."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from ppd.proxy.config import ProxyConfig
from ppd.proxy.downstream.connections import Connections
from ppd.proxy.downstream.http1_server import Http1Server
from tests.support.client_connections import site


class Listening:
    """A listening socket whose `accept` fails first, once for each of these numbers."""

    def __init__(self, *errors: int) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._errors = list(errors)
        self.has_failed = asyncio.Event()

    def fileno(self) -> int:
        return self._socket.fileno()

    def setblocking(self, flag: bool) -> None:
        self._socket.setblocking(flag)

    def accept(self) -> tuple[socket.socket, Any]:
        if self._errors:
            self.has_failed.set()
            raise OSError(self._errors.pop(0), "")
        return self._socket.accept()

    def close(self) -> None:
        self._socket.close()


@asynccontextmanager
async def accepting_from(listening: Listening) -> AsyncIterator[Connections]:
    async with site() as at:
        assert at.edge is not None
        http1 = Http1Server(at.edge, None, ProxyConfig())
        connections = Connections(http1, cast(Any, None), ProxyConfig(), None, at.now)
        accepting = asyncio.create_task(connections.accept(cast(socket.socket, listening)))
        try:
            yield connections
        finally:
            accepting.cancel()
            await asyncio.wait((accepting,))
            await connections.close()
            listening.close()


def count(connections: Connections) -> float:
    return next(iter(connections.gauges())).samples[0].value


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.EHOSTUNREACH])
async def test_what_one_connection_did_keeps_no_other_waiting(number: int) -> None:
    listening = Listening(number, number)
    async with accepting_from(listening) as connections:
        _, writer = await asyncio.open_connection(*listening._socket.getsockname())
        await listening.has_failed.wait()
        assert count(connections) == 1, "in the same round"
        writer.transport.abort()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_without_room_for_more_none_is_accepted_for_a_while(number: int) -> None:
    """The socket stays readable, so the event loop would be woken for nothing again and again."""
    listening = Listening(number)
    async with accepting_from(listening) as connections:
        _, writer = await asyncio.open_connection(*listening._socket.getsockname())
        await listening.has_failed.wait()
        assert count(connections) == 0
        async with asyncio.timeout(60):
            while not count(connections):
                await asyncio.sleep(0.01)
        writer.transport.abort()
