"""Workers that are down by their probes: what runs there goes on, and turns wait until one is back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from ppd.proxy.config import Mode
from tests.support.fleet import Fleet
from tests.support.scripted_workers import stop_listening

EVENT = b'data: {"id": "x", "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": %s}]}\n\n'
PIECES = 25
EVERY_S = 0.05
SETTINGS: dict[str, Any] = {"mode": Mode.REPLICA, "probe_interval_s": 0.05, "queue_timeout_s": 20.0}


@dataclass
class Engine:
    """A worker that streams slowly, and whose /health and port a test spoils meanwhile."""

    health: int = 200
    connections: set[asyncio.StreamWriter] = field(default_factory=set)
    server: asyncio.Server | None = None
    port: int = 0

    async def open(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def close_port(self) -> None:
        """No new connection; those that there are go on, as in an engine that shuts down gracefully."""
        assert self.server is not None
        await stop_listening(self.server)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int((head.partition(b"content-length: ")[2] or b"0").split(b"\r\n")[0]))
                if head.startswith(b"post"):
                    await self._stream(writer)
                else:
                    status = self.health if head.startswith(b"get /health") else 200
                    body = b'{"data": [{"id": "sim"}]}' if head.startswith(b"get /v1/models") else b""
                    sized = b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)
                    writer.write(b"HTTP/1.1 %d x\r\n%s" % (status, sized))
                    writer.close()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.connections.discard(writer)
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for _ in range(PIECES):
            writer.write(EVENT % b"null")
            await writer.drain()
            await asyncio.sleep(EVERY_S)
        writer.write(EVENT % b'"stop"' + b"data: [DONE]\n\n")
        writer.close()


@asynccontextmanager
async def engine_of(fleet: Fleet) -> AsyncIterator[Engine]:
    engine = Engine()
    await engine.open()
    try:
        await fleet.admin("POST", "/workers", {"worker": f"R=127.0.0.1:{engine.port}"})
        await fleet.until(lambda: fleet.states() == {"R1": "up"})
        yield engine
    finally:
        await engine.close_port()
        for writer in tuple(engine.connections):
            writer.close()


async def streamed(fleet: Fleet, begun: asyncio.Event) -> tuple[int, str]:
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as answer:
        text = ""
        async for data in answer.content.iter_any():
            text += data.decode()
            begun.set()
        return answer.status, text


@pytest.mark.parametrize("fault", ["health", "port"])
async def test_a_stream_that_flows_is_not_ended_by_probes(fault: str) -> None:
    async with Fleet.of(**SETTINGS) as fleet, engine_of(fleet) as engine:
        running = asyncio.create_task(streamed(fleet, begun := asyncio.Event()))
        await begun.wait()
        if fault == "health":
            engine.health = 503
        else:
            await engine.close_port()
            await fleet.until(lambda: fleet.states() == {"R1": "down"})
        status, text = await running
        assert (status, text.count('"a"'), text.rstrip().endswith("data: [DONE]")) == (200, PIECES + 1, True)


async def test_a_worker_whose_health_fails_still_gets_the_turns_that_it_answers() -> None:
    async with Fleet.of(**SETTINGS) as fleet, engine_of(fleet) as engine:
        engine.health = 503
        await fleet.until(lambda: fleet.states() == {"R1": "down"})
        first = asyncio.create_task(streamed(fleet, begun := asyncio.Event()))
        await begun.wait()
        await fleet.until(lambda: fleet.states() == {"R1": "up"})
        second = asyncio.create_task(streamed(fleet, begun := asyncio.Event()))
        await begun.wait()
        assert not first.done()
        for status, text in (await first, await second):
            assert (status, text.rstrip().endswith("data: [DONE]")) == (200, True)


async def test_with_every_worker_down_turns_wait_until_one_is_back() -> None:
    async with Fleet.of("R1", **SETTINGS) as fleet:
        await fleet.kill("R1")
        before = asyncio.create_task(fleet.conversation().say("found refused"))  # perhaps before any probe is
        await fleet.until(lambda: fleet.state("R1") == "down")
        after = asyncio.create_task(fleet.conversation().say("known to be down"))
        unknown = await fleet.chat([{"role": "user", "content": "hi"}], model="another")
        await fleet.until(lambda: fleet.proxy.state.admission.waiting == 2)
        embedding = asyncio.create_task(fleet.post("/tokenize", {"model": "sim", "prompt": "hi"}))
        await fleet.until(lambda: fleet.proxy.state.admission.waiting == 3)
        assert unknown.status == 404
        await fleet.start_again("R1")
        for turn in await asyncio.gather(before, after, embedding):
            assert turn.status == 200


async def test_a_turn_that_no_worker_comes_back_for_is_refused_in_the_end() -> None:
    async with Fleet.of("R1", **{**SETTINGS, "queue_timeout_s": 0.2}) as fleet:
        await fleet.kill("R1")
        await fleet.until(lambda: fleet.state("R1") == "down")
        turn = await fleet.conversation().say("hi")
        assert (turn.status, turn.headers["X-PPD-Refused"]) == (503, "queue_timeout")
        with pytest.raises(aiohttp.ClientError):  # it is down indeed
            await fleet.session.get(f"http://{fleet.engines['R1'].address}/health")
