"""When an agent warns of what does not answer, and what it says of its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from ppd.servers.agent.announcer import PING_EVERY_S, PING_TIMEOUT_S, PROXY_AFTER_S
from ppd.servers.agent.silence import _ASK_EVERY_S, ENGINE_AFTER_S, REMIND_S, TICK_S, EngineSilence, Silence
from ppd.servers.fleet.ports import free_ports


def test_a_silence_is_told_soon_and_then_each_minute_and_its_end_once() -> None:
    silence = Silence(3.0, 10.0)
    assert not silence.is_due(12.9)
    assert silence.is_due(13.0) and not silence.is_due(13.1)
    assert not silence.is_due(12.9 + REMIND_S) and silence.is_due(13.0 + REMIND_S)
    assert silence.heard(100.0) and not silence.heard(101.0)
    assert not silence.is_due(103.9) and silence.is_due(104.0)


def test_whatever_is_silent_is_told_within_five_seconds() -> None:
    assert ENGINE_AFTER_S + _ASK_EVERY_S + TICK_S < 5.0
    assert PING_EVERY_S + PING_TIMEOUT_S + PROXY_AFTER_S + TICK_S < 5.0


Engine = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answering(data: bytes) -> Engine:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(1000)
            writer.write(data)
        finally:
            writer.close()
            await writer.wait_closed()

    return answer


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        (None, "nothing listens there"),
        (answering(b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"), "its /health says 503"),
        (answering(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"), "another kind of port: it does not speak HTTP"),
        (answering(b"220 mail ESMTP\r\n"), "another kind of port: it does not speak HTTP"),
    ],
)
async def test_an_engine_that_does_not_answer_is_told_with_the_reason(
    caplog: pytest.LogCaptureFixture, engine: Engine | None, why: str
) -> None:
    server = await asyncio.start_server(engine, "127.0.0.1", 0) if engine else None
    port = server.sockets[0].getsockname()[1] if server else free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    silence = EngineSilence(url, "; see x.log", after_s=0.1)
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        watching = asyncio.create_task(silence.watch(session))
        while not caplog.messages:
            await asyncio.sleep(0.01)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert caplog.messages == [f"engine {url} does not answer: {why}; see x.log"]
    if server is not None:
        server.close()
        await server.wait_closed()
