"""What an agent says of a proxy that takes no heartbeats."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from ppd.servers.agent.announcer import Announcer, Link, Trouble
from ppd.servers.fleet.ports import free_ports

pytestmark = pytest.mark.e2e  # processes and sockets, for which it waits

DOWN = zmq.EVENT_DISCONNECTED
RETRIED = zmq.EVENT_CONNECT_RETRIED
FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
MISMATCH = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH))
SERVER, AGENT, OTHER = (zmq.curve_keypair() for _ in range(3))


@pytest.mark.parametrize(
    ("events", "link"),
    [
        ([], Link()),
        ([zmq.EVENT_CONNECTED, UP], Link(is_up=True)),
        ([zmq.EVENT_CLOSED, RETRIED, zmq.EVENT_CONNECTED, UP], Link(is_up=True)),
        ([UP, DOWN, RETRIED], Link()),  # the proxy is gone, or a ping was not answered
        ([zmq.EVENT_CONNECTED, FAILED, DOWN, RETRIED], Link(trouble=Trouble.OTHER_KIND)),
        ([FAILED, DOWN, RETRIED, MISMATCH, DOWN], Link(has_ended=True, trouble=Trouble.MISMATCH)),
        ([(zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400), DOWN], Link(has_ended=True, trouble=Trouble.REFUSED)),
        ([zmq.EVENT_CONNECTED, DOWN], Link(has_ended=True, trouble=Trouble.OTHER_KIND)),  # a PUB socket, say
        ([FAILED, DOWN, RETRIED, zmq.EVENT_CLOSED, RETRIED], Link()),  # what was there has gone
    ],
)
def test_the_last_events_say_why_there_is_no_connection(events: list[int | tuple[int, int]], link: Link) -> None:
    found = Link()
    for event in events:
        found = found.after(*(event if isinstance(event, tuple) else (event,)))
    assert found == link


Opened = Callable[[zmq.asyncio.Context, AsyncExitStack], Awaitable[int]]


async def nobody(_: zmq.asyncio.Context, __: AsyncExitStack) -> int:
    return free_ports(1)[0]


def router(context: zmq.asyncio.Context, stack: AsyncExitStack, *, keys: bool) -> int:
    one = stack.enter_context(context.socket(zmq.ROUTER))
    if keys:
        one.curve_publickey, one.curve_secretkey = SERVER
        one.curve_server = True
    port: int = one.bind_to_random_port("tcp://127.0.0.1")
    return port


async def plain(context: zmq.asyncio.Context, stack: AsyncExitStack) -> int:
    return router(context, stack, keys=False)


async def encrypted(context: zmq.asyncio.Context, stack: AsyncExitStack) -> int:
    return router(context, stack, keys=True)


async def http(_: zmq.asyncio.Context, stack: AsyncExitStack) -> int:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(10)
            writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        finally:
            writer.close()

    server = await stack.enter_async_context(await asyncio.start_server(refuse, "127.0.0.1", 0))
    port: int = server.sockets[0].getsockname()[1]
    return port


@asynccontextmanager
async def watching(announcer: Announcer) -> AsyncIterator[None]:
    task = asyncio.create_task(announcer.watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        announcer.close()


async def said(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(60):
        while not any(text in message for message in caplog.messages):
            await asyncio.sleep(0.01)


def announcing(port: int, server_key: bytes | None = None) -> Announcer:
    keys = (*AGENT, server_key) if server_key else None
    return Announcer([f"127.0.0.1:{port}"], keys, warn_after_s=0.2, connect_again_s=0.2)


@pytest.mark.parametrize(
    ("there", "server_key", "text"),
    [
        (nobody, None, "no proxy answers there"),
        (http, None, "another kind of port; it must be the proxy's heartbeat_port"),
        (http, SERVER[0], "another kind of port, which must be the proxy's curve_port"),
        (encrypted, None, "it wants a key"),
        (plain, SERVER[0], "it takes no keys"),
        (encrypted, OTHER[0], "another kind of port, which must be the proxy's curve_port, or --curve-server-key"),
    ],
    ids=["nobody", "http", "http-keys", "encrypted", "plain-keys", "other-key"],
)
async def test_a_warning_says_what_is_there_instead_of_a_proxy(
    caplog: pytest.LogCaptureFixture, there: Opened, server_key: bytes | None, text: str
) -> None:
    context = zmq.asyncio.Context()
    async with AsyncExitStack() as stack:
        port = await there(context, stack)
        await stack.enter_async_context(watching(announcing(port, server_key)))
        await said(caplog, f"proxy 127.0.0.1:{port} takes no heartbeats: {text}")
    context.destroy(linger=0)


async def test_what_happens_before_the_watch_begins_is_known(caplog: pytest.LogCaptureFixture) -> None:
    """ZeroMQ's thread connects at once, and gives up for good where no keys are taken."""
    context = zmq.asyncio.Context()
    async with AsyncExitStack() as stack:
        port = await plain(context, stack)
        announcer = announcing(port, SERVER[0])
        time.sleep(0.15)  # noqa: ASYNC251  # the loop stands still
        await stack.enter_async_context(watching(announcer))
        await said(caplog, "it takes no keys")
    context.destroy(linger=0)


async def test_a_key_that_becomes_known_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """ZeroMQ itself gives up after a refusal."""
    caplog.set_level(logging.INFO)
    context = zmq.asyncio.Context()
    authenticator = AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(credentials_provider=Known(is_known := [False]))
    async with AsyncExitStack() as stack:
        port = router(context, stack, keys=True)
        await stack.enter_async_context(watching(announcing(port, SERVER[0])))
        await said(caplog, "it refuses this agent's key")
        is_known[0] = True
        await said(caplog, f"proxy 127.0.0.1:{port} takes heartbeats")
    authenticator.stop()
    context.destroy(linger=0)


class Known:
    def __init__(self, is_known: list[bool]) -> None:
        self._is_known = is_known

    def callback(self, domain: str, key: bytes) -> bool:
        return self._is_known[0]


@pytest.mark.e2e
async def test_a_proxy_that_hangs_is_noticed_though_its_connection_stands(caplog: pytest.LogCaptureFixture) -> None:
    """A peer that does the handshake and then reads and says nothing."""
    context = zmq.asyncio.Context()
    hangs = asyncio.Event()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", real)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(4096):
                if not hangs.is_set():
                    sink.write(data)

        try:
            await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))
        finally:
            inner_writer.close()
            writer.close()

    async with AsyncExitStack() as stack:
        real = router(context, stack, keys=False)
        server = await stack.enter_async_context(await asyncio.start_server(between, "127.0.0.1", 0))
        port = server.sockets[0].getsockname()[1]
        caplog.set_level(logging.INFO)
        await stack.enter_async_context(watching(announcing(port)))
        await said(caplog, f"proxy 127.0.0.1:{port} takes heartbeats")
        hangs.set()
        await said(caplog, "no proxy answers there")
    context.destroy(linger=0)
