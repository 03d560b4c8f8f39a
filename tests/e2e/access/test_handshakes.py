"""Clients' TLS handshakes: how long each may take, and that none is ended for another. Over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time

import pytest

from ppd.proxy.runtime.loop_watch import STOOD_STILL_S
from tests.e2e.access.test_edge import LAST, connected, port_of, received, sent
from tests.support.credentials import Authority, trusting
from tests.support.proxy import running_proxy


async def test_a_handshake_that_does_not_go_on_is_ended(authority: Authority, tls_files: dict[str, str]) -> None:
    async with running_proxy(tls=trusting(authority), head_timeout_s=0.2, **tls_files) as (_, url, _session):
        assert await sent(port_of(url), b"\x16\x03\x01") == b""


async def test_a_handshake_goes_on_after_the_process_has_stood_still(
    authority: Authority, tls_files: dict[str, str]
) -> None:
    async with running_proxy(tls=trusting(authority), head_timeout_s=0.2, **tls_files) as (_, url, _session):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        for _ in range(20):  # rounds of the loop, after which it is accepted and its time has begun
            await asyncio.sleep(0)
        time.sleep(0.2 + 2 * STOOD_STILL_S)  # noqa: ASYNC251
        await writer.start_tls(trusting(authority), server_hostname="127.0.0.1")
        writer.write(LAST + b"Host: proxy\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_handshake_that_its_client_has_begun_is_not_ended_for_another(
    authority: Authority, tls_files: dict[str, str]
) -> None:
    tls = trusting(authority)
    async with (
        running_proxy(tls=tls, connections_per_address=1, **tls_files) as (_, url, _session),
        connected(port_of(url)) as (reader, writer),
    ):
        came, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = tls.wrap_bio(came, to_send, server_hostname="127.0.0.1")
        with pytest.raises(ssl.SSLWantReadError):
            client.do_handshake()
        writer.write(to_send.read())
        came.write(await reader.read(1))
        assert (await sent(port_of(url), LAST + b"Host: proxy\r\n\r\n", tls=tls)).startswith(b"HTTP/1.1 503 ")
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
                break
            came.write(part := await reader.read(65536))
            assert part
        client.write(LAST + b"Host: proxy\r\n\r\n")
        writer.write(to_send.read())
        came.write(await received(reader))
        assert client.read(65536).startswith(b"HTTP/1.1 200 ")
