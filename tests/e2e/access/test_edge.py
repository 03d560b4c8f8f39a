"""What one client's connection may do: TLS, heads, slow senders, connections per address, HTTP/2. Over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import generate_latest

from ppd.proxy.config import ProxyConfig
from ppd.proxy.downstream.serve import listen
from ppd.proxy.fleet.worker import Role
from ppd.servers.fleet.ports import free_ports
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.launch import running_engine
from tests.support.credentials import Authority, trusting
from tests.support.http2_client import http2
from tests.support.proxy import running_proxy
from tests.support.raw_http import read_answers

JSON = b"Content-Type: application/json\r\n"
HEAD = b"GET /health HTTP/1.1\r\nHost: proxy\r\n"
LAST = b"GET /health HTTP/1.1\r\nConnection: close\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n"


def port_of(base_url: str) -> int:
    return int(base_url.rpartition(":")[2])


@asynccontextmanager
async def connected(
    port: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def received(reader: asyncio.StreamReader) -> bytes:
    """All until the end; a proxy that closed while the client still wrote resets the connection after its answer."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := await reader.read(65536):
            data += part
    return data


async def sent(port: int, *parts: bytes, pause_s: float = 0.0, tls: ssl.SSLContext | None = None) -> bytes:
    """All that a client gets that sends these parts, until the proxy closes the connection."""
    async with connected(port, tls) as (reader, writer):
        answering = asyncio.create_task(received(reader))
        for part in parts:
            if answering.done():
                break
            writer.write(part)
            await asyncio.sleep(pause_s)
        return await asyncio.wait_for(answering, 60)


@asynccontextmanager
async def own_process(log_file: Path, *flags: str, open_files: int = 1024) -> AsyncIterator[int]:
    """The port of `ppd serve` as a process of its own, which may raise its limit of 64 open files to `open_files`."""
    (port,) = free_ports(1)
    limited = f'ulimit -Sn 64 && ulimit -Hn {open_files} && exec "$0" -m ppd.servers serve "$@"'
    own = ("--port", str(port), "--heartbeat-port", "0", "--canary-interval-s", "0", *flags)
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec("sh", "-c", limited, sys.executable, *own, stderr=log)
    try:
        async with asyncio.timeout(60):
            while True:
                assert process.returncode is None
                with contextlib.suppress(OSError):
                    async with connected(port):
                        break
                await asyncio.sleep(0.05)
        yield port
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


# -- TLS


async def test_clients_speak_tls(authority: Authority, tls_files: dict[str, str]) -> None:
    async with running_proxy(tls=trusting(authority), **tls_files) as (_, url, session):
        async with session.get(url + "/health") as response:
            assert response.status == 200
        assert await sent(port_of(url), HEAD + b"\r\n") == b""  # not in plain text


@pytest.mark.parametrize("shown", ["none", "another authority's", "its own"])
async def test_only_clients_with_a_certificate_are_answered(
    authority: Authority, tls_files: dict[str, str], tmp_path: Path, shown: str
) -> None:
    known = trusting(authority)
    client = authority.issue("client")
    known.load_cert_chain(client.cert, client.key)
    tested = trusting(authority)
    if shown != "none":
        issued = (authority if shown == "its own" else Authority(tmp_path)).issue("tested")
        tested.load_cert_chain(issued.cert, issued.key)
    async with running_proxy(tls=known, tls_client_ca_file=authority.ca, **tls_files) as (_, url, session):
        try:
            async with session.get(url + "/health", ssl=tested, headers={"Connection": "close"}) as response:
                assert (response.status, shown) == (200, "its own")
        except (aiohttp.ClientError, OSError):
            assert shown != "its own"


# -- heads


@pytest.mark.parametrize(
    ("sends", "status", "has_body"),
    [
        (HEAD + b"X: y\r\n" * 19 + b"\r\n", 200, False),
        (HEAD + b"X: y\r\n" * 20 + b"\r\n", 431, True),
        (HEAD + b"X: " + b"y" * 2000 + b"\r\n\r\n", 431, True),
        (HEAD + b"X: " + b"y" * 2000, 431, False),  # no end in sight
        (b"GET /" + b"y" * 2000 + b" HTTP/1.1\r\nHost: proxy\r\n\r\n", 431, True),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, False),
        (HEAD + b"Host: another\r\n\r\n", 400, False),
        (LAST + b"Host: " + b"y" * 64 + b"\r\n\r\n", 200, False),
        (LAST + b"Host: a..b\r\n\r\n", 200, False),
        (LAST + b"Host: " + b"y" * 63 + b".example.:8080\r\n\r\n", 200, False),
        (LAST + b"Host: [::1]:8080\r\n\r\n", 200, False),
        (LAST + b"Host: a_b\r\n\r\n", 200, False),
        (LAST + b"Host:\r\n\r\n", 200, False),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, False),
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 501, False),
        (HEAD + b"a b: c\r\n\r\n", 400, False),
        (HEAD + b"X: a\0b\r\n\r\n", 400, False),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, False),
        (HEAD + UPGRADE, 403, False),
    ],
)
async def test_odd_heads_are_refused(sends: bytes, status: int, has_body: bool) -> None:
    async with running_proxy(header_limit=21, head_limit_bytes=1500) as (_, url, session):
        got = await sent(port_of(url), sends.replace(b"Host: proxy\r\n", b"Host: proxy\r\nConnection: close\r\n", 1))
        head, _, body = got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d" % status)
        if has_body:
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
        async with session.get(url + "/health") as response:
            assert response.status == 200


# -- slow senders


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([b""], b""),
        ([HEAD], b"HTTP/1.1 408 "),
        ([HEAD[i : i + 1] for i in range(len(HEAD))], b"HTTP/1.1 408 "),
        ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], b"\x00\x00"),  # HTTP/2's settings, and no request
    ],
)
async def test_a_head_must_come_in_time(parts: list[bytes], status: bytes) -> None:
    async with running_proxy(head_timeout_s=0.4, idle_connection_s=60) as (_, url, _session):
        assert (await sent(port_of(url), *parts, pause_s=0.1)).startswith(status)


async def test_an_idle_connection_is_closed_and_its_task_ends() -> None:
    async with running_proxy(idle_connection_s=0.2) as (proxy, url, _session):
        got = await sent(port_of(url), HEAD + b"\r\n")
        assert got.startswith(b"HTTP/1.1 200") and b"408" not in got
        async with asyncio.timeout(60):
            while b"\nppd_connections 0.0\n" not in generate_latest(proxy.state.metrics.registry):
                await asyncio.sleep(0.01)


async def test_a_body_must_come_in_time() -> None:
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: proxy\r\n" + JSON + b"Content-Length: 1000\r\n\r\n"
    async with running_proxy(idle_timeout_s=0.5) as (_, url, _session):
        got = await sent(port_of(url), head, *[b"{"] * 40, pause_s=0.1)
        assert got.startswith(b"HTTP/1.1 408")


# -- connections per address


UPLOAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: p\r\n" + JSON + b"Expect: 100-continue\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.parametrize("is_tls", [False, True])
async def test_connections_above_the_limit_are_turned_away(
    authority: Authority, tls_files: dict[str, str], is_tls: bool
) -> None:
    tls = trusting(authority) if is_tls else None
    files = tls_files if is_tls else {}
    async with running_proxy(connections_per_address=2, tls=tls, **files) as (proxy, url, _session):
        port = port_of(url)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                reader, writer = await stack.enter_async_context(connected(port, tls))
                writer.write(UPLOAD)
                assert (await reader.readline()).startswith(b"HTTP/1.1 100")
            for sends in (b"", HEAD + b"\r\n", UPLOAD + b"x" * 900_000):
                refused = await sent(port, sends, tls=tls)
                (answer,) = read_answers(refused)  # whole, whatever the client had sent
                assert answer.status == 503 and answer.header(b"Retry-After") == b"1"
                assert json.loads(answer.body)["error"]["type"] == "overloaded_error"
            assert b"\nppd_connections_refused_total 3.0\n" in generate_latest(proxy.state.metrics.registry)
        async with asyncio.timeout(60):
            while not (await sent(port, HEAD + b"Connection: close\r\n\r\n", tls=tls)).startswith(b"HTTP/1.1 200"):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_tls", [False, True])
async def test_the_longest_idle_connection_makes_room_for_another(
    authority: Authority, tls_files: dict[str, str], is_tls: bool
) -> None:
    """Clients that say nothing, or nothing more, take nobody's place; nor does one that begins no handshake."""
    tls = trusting(authority) if is_tls else None
    files = tls_files if is_tls else {}
    limits = {"connections_per_address": 3, "head_timeout_s": 120.0}
    async with running_proxy(tls=tls, **limits, **files) as (proxy, url, _session):
        port = port_of(url)
        async with connected(port, tls) as (reader, busy), connected(port) as (mute, _):
            busy.write(UPLOAD)
            assert (await reader.readline()).startswith(b"HTTP/1.1 100")
            async with contextlib.AsyncExitStack() as stack, asyncio.timeout(60):
                for _ in range(4):
                    assert (await sent(port, HEAD + b"Connection: close\r\n\r\n", tls=tls)).startswith(b"HTTP/1.1 200")
                    idle, writer = await stack.enter_async_context(connected(port, tls))
                    writer.write(HEAD + b"\r\n")
                    assert (await idle.readline()).startswith(b"HTTP/1.1 200")
                assert await received(mute) == b""
            assert b"\nppd_connections_refused_total 0.0\n" in generate_latest(proxy.state.metrics.registry)
            busy.write(b"x" * 1000)
            assert (await reader.readuntil(b"HTTP/1.1 400 ")).startswith(b"\r\n")


def burst(port: int, count: int) -> list[socket.socket]:
    """Connections made faster than the proxy accepts them."""
    return [socket.create_connection(("127.0.0.1", port), 10) for _ in range(count)]


async def test_idle_clients_leave_files_for_the_turns_of_those_at_work(tmp_path: Path) -> None:
    url = "/v1/chat/completions"
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(running_engine(SimConfig(role=Role.REPLICA)))
        flags = ("--mode", "replica", "--workers", f"R={engine.address}", "--head-timeout-s", "60")
        port = await stack.enter_async_context(own_process(tmp_path / "log", *flags, open_files=256))
        early = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
        session = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
        await stack.enter_async_context(asyncio.timeout(60))
        async with early.get("/health") as response:  # its connection stays, until it is evicted
            await response.read()
        clients = await asyncio.to_thread(burst, port, 300)
        assert await asyncio.to_thread(clients[0].recv, 1) == b""
        for turn in range(3):
            body = {"model": "sim", "messages": [{"role": "user", "content": f"{turn}"}], "max_tokens": 4}
            async with session.post(url, json=body) as response:
                said = await response.text()  # read, so that the connection is kept
                assert response.status == 200, said

        async def counted(of: str = "") -> int:
            async with session.get("/metrics") as response:
                return int(re.findall(rf"\nppd_connections{of} (\d+)", await response.text())[0])

        while await counted() > 42:  # the last of the burst may still be closing
            await asyncio.sleep(0.01)
        assert await counted("_evicted_total") >= 301 - 42
        assert await counted("_refused_total") == 0
        for left in clients:
            left.close()
        while await counted() > 1:  # the session's own
            await asyncio.sleep(0.01)


# -- what is logged


async def test_no_key_and_no_prompt_is_logged_at_debug(
    authority: Authority, tls_files: dict[str, str], tmp_path: Path
) -> None:
    key, prompt = "ppd_key-of-a-client", "prompt-of-a-client"
    body = json.dumps({"model": "sim", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4}).encode()
    tls = [f"--{name.replace('_', '-')}={path}" for name, path in tls_files.items()]
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(running_engine(SimConfig(role=Role.REPLICA)))
        flags = ("--mode", "replica", "--workers", f"R={engine.address}", "--log-level", "debug", *tls)
        port = await stack.enter_async_context(own_process(tmp_path / "log", *flags))
        assert await sent(port, HEAD + b"\r\n") == b""  # a failed handshake, which our own code logs at DEBUG
        client = await stack.enter_async_context(http2(port, trusting(authority)))
        headers = [("authorization", f"Bearer {key}"), ("x-api-key", key), ("content-type", "application/json")]
        async with asyncio.timeout(60):
            while (await client.ended(client.open("GET", "/ready"))).status != 200:
                await asyncio.sleep(0.01)
        stream = client.open("POST", "/v1/chat/completions", *headers, is_whole=False)
        client.upload(stream, body, is_last=True)
        async with asyncio.timeout(60):
            assert (await client.ended(stream)).status == 200
    log = (tmp_path / "log").read_text()
    assert " DEBUG ppd." in log
    assert key not in log and prompt not in log
    assert not re.search(r" DEBUG (?!ppd\.)", log)


# -- what must go on working


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with running_proxy() as (_, url, _session):
        got = await sent(
            port_of(url), HEAD + b"\r\n" + b"GET /nothing HTTP/1.1\r\nHost: proxy\r\nConnection: close\r\n\r\n"
        )
        assert got.index(b"HTTP/1.1 200") < got.index(b"HTTP/1.1 404")


async def test_who_expects_100_gets_it_before_the_body_goes() -> None:
    async with running_proxy() as (_, url, _session):
        async with connected(port_of(url)) as (reader, writer), asyncio.timeout(60):
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: p\r\n" + JSON + b"Content-Length: 2\r\n"
            writer.write(head + b"Expect: 100-continue\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 100")
            writer.write(b"[]")
            assert b"HTTP/1.1 400" in await reader.readuntil(b"error")


async def test_a_client_that_leaves_is_noticed_also_with_a_request_held_back(start_fleet: Any) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5000, "ignore_eos": True}
    data = json.dumps({**body, "stream": True}).encode()
    chat = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: p\r\n" + JSON + b"Content-Length: %d\r\n\r\n" % len(data) + data
    )
    # So slow that no write to the client tells that it is gone.
    async with start_fleet("R1", engine={"time_scale": 10_000.0}) as fleet:
        async with connected(port_of(fleet.base_url)) as (_, writer):
            writer.write(chat + HEAD + b"\r\n")
            await fleet.until(lambda: not fleet.idle())
        await fleet.until(fleet.idle)


async def test_answers_do_not_wait_for_the_clients_acknowledgement() -> None:
    """Nagle's algorithm holds the second write of an answer back until the first is acknowledged: 40 ms on Linux."""
    listening = listen(ProxyConfig(port=0))
    with listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        accepted.setblocking(False)
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, accepted)
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        transport.close()
