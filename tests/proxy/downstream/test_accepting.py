"""Clients' connections are accepted, whatever has become of others that wait for it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from ppd.proxy.config import ProxyConfig
from ppd.proxy.downstream import connections as module
from ppd.proxy.downstream.connections import Connections
from ppd.proxy.downstream.http1_server import Http1Server
from tests.support.client_connections import site
from tests.tidy_loop import unheard

LOST = "new clients get no connection: %s"


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
async def accepting_from(listening: Listening, **settings: Any) -> AsyncIterator[Connections]:
    async with site() as at:
        assert at.edge is not None
        http1 = Http1Server(at.edge, None, ProxyConfig())
        connections = Connections(http1, cast(Any, None), ProxyConfig(**settings), None, at.now)
        accepting = asyncio.create_task(connections.accept(cast(socket.socket, listening)))
        try:
            yield connections
        finally:
            accepting.cancel()
            await asyncio.wait((accepting,))
            await connections.close()
            listening.close()
            at.failures[:] = [one for one in at.failures if one.msg != LOST]


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
async def test_without_room_for_more_none_is_accepted_for_a_while(
    number: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket stays readable, so the event loop would be woken for nothing again and again."""
    monkeypatch.setattr(module, "ACCEPT_AGAIN_S", 0.01)
    listening = Listening(number, number)
    async with accepting_from(listening) as connections:
        _, writer = await asyncio.open_connection(*listening._socket.getsockname())
        await listening.has_failed.wait()
        assert count(connections) == 0
        async with asyncio.timeout(60):
            while not count(connections):
                await asyncio.sleep(0.01)
        writer.transport.abort()
    assert told(caplog) == [f"new clients get no connection: {os.strerror(number)}"]


async def test_that_clients_are_refused_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    listening = Listening()
    async with accepting_from(listening, connections_per_address=2) as connections:
        opened = [await asyncio.open_connection(*listening._socket.getsockname()) for _ in range(2)]
        async with asyncio.timeout(60):
            while count(connections) < 2:
                await asyncio.sleep(0.01)
        for limits in connections._open:  # none of them is idle
            connections._idle.discard(limits)
        for _ in range(3):
            reader, writer = await asyncio.open_connection(*listening._socket.getsockname())
            assert (await reader.readline()).startswith(b"HTTP/1.1 503")
            opened.append((reader, writer))
        for _, writer in opened:
            writer.transport.abort()
    (line,) = told(caplog)
    assert line.startswith("new clients get no connection: more than 2 connections from one address, and none is idle")


async def test_one_that_is_refused_as_the_process_ends_is_closed() -> None:
    listening = Listening()
    with unheard() as said:
        async with accepting_from(listening, connections_per_address=1) as connections:
            await asyncio.sleep(0)
            connections._limit = 0
            with socket.create_connection(listening._socket.getsockname(), timeout=10) as client:
                assert connections._accept_some(cast(socket.socket, listening))
                await connections.close()
                assert connections._turning_away == 0
                assert client.recv(1) == b""
    assert said == []


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
