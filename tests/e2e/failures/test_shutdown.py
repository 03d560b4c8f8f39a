"""What clients and load balancers are told when the proxy is about to stop, while it still serves and after that."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import hyperframe.frame
import pytest
from h2.connection import H2Connection

from ppd.proxy.assembly import assemble
from ppd.proxy.config import Mode, ProxyConfig
from ppd.proxy.downstream.serve import listen, serve
from ppd.proxy.settings import Settings
from ppd.servers.sim.engine.engine import SimEngine
from tests.support.clock import LeapingTime
from tests.support.credentials import Authority
from tests.support.fleet import start_engine
from tests.support.proxy import DEFAULTS

BODY = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "ignore_eos": True}


@asynccontextmanager
async def stoppable(**settings: object) -> AsyncIterator[tuple[int, asyncio.Event, asyncio.Task[None]]]:
    """A proxy's port, the event that stops it, and its life."""
    config = ProxyConfig(**{**DEFAULTS, "mode": Mode.REPLICA, **settings})
    listening, stop = listen(config), asyncio.Event()
    serving = asyncio.create_task(serve(assemble(Settings(config)), listening, stop))
    try:
        yield listening.getsockname()[1], stop, serving
    finally:
        stop.set()
        await serving


async def ready(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(f"{url}/ready") as response:
        return response.status


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    async with AsyncExitStack() as stack:
        yield await start_engine(stack, "R1", time_scale=4.0)


async def test_the_port_stays_open_until_load_balancers_have_noticed(engine: SimEngine) -> None:
    async with stoppable(drain_delay_s=30.0, workers=(f"R={engine.address}",)) as (port, stop, serving):
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while await ready(session, url) != 200:
                await asyncio.sleep(0.01)
            stop.set()
            while await ready(session, url) != 503:
                await asyncio.sleep(0)
            async with aiohttp.ClientSession() as late, late.post(f"{url}/v1/chat/completions", json=BODY) as response:
                assert response.status == 200  # over a new connection
            assert not serving.done()
            LeapingTime.of(asyncio.get_running_loop()).leap(31.0)
            await serving
            with pytest.raises(aiohttp.ClientConnectorError):
                await ready(session, url)


class FrameReader:
    """Every frame on a connection: h2's own client takes GOAWAY for the end of all streams."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    async def next(self) -> hyperframe.frame.Frame:
        frame, size = hyperframe.frame.Frame.parse_frame_header(memoryview(await self._reader.readexactly(9)))
        frame.parse_body(memoryview(await self._reader.readexactly(size)))
        return frame


@pytest.mark.parametrize("is_tls", [False, True])
async def test_clients_of_http2_are_told_to_go_and_their_streams_end_whole(
    engine: SimEngine, tmp_path: Path, is_tls: bool
) -> None:
    files, tls = {}, None
    if is_tls:
        authority = Authority(tmp_path)
        own = authority.issue("proxy")
        files = {"tls_cert_file": own.cert, "tls_key_file": own.key}
        tls = ssl.create_default_context(cafile=authority.ca)
        tls.set_alpn_protocols(["h2"])
    workers = (f"R={engine.address}",)
    async with stoppable(workers=workers, shutdown_timeout_s=20.0, **files) as (port, stop, serving):
        async with asyncio.timeout(60):
            scheme = "https" if is_tls else "http"
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls or True)) as session:
                while await ready(session, f"{scheme}://127.0.0.1:{port}") != 200:
                    await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
            client, frames = H2Connection(), FrameReader(reader)
            client.initiate_connection()
            head = [(":method", "POST"), (":path", "/v1/chat/completions"), (":scheme", scheme), (":authority", "p")]
            client.send_headers(1, [*head, ("content-type", "application/json")])
            client.send_data(1, json.dumps({**BODY, "stream": True}).encode(), end_stream=True)
            writer.write(client.data_to_send())
            body, gone = b"", []
            while True:
                frame = await frames.next()
                if isinstance(frame, hyperframe.frame.GoAwayFrame):
                    gone.append((frame.last_stream_id, frame.error_code))
                if isinstance(frame, hyperframe.frame.DataFrame):
                    body += frame.data
                    stop.set()
                    if "END_STREAM" in frame.flags:
                        break
            assert body.endswith(b"data: [DONE]\n\n") and len(body.split(b"\n\n")) > 40
            assert gone == [(2**31 - 1, 0)]
            writer.close()
            await serving
