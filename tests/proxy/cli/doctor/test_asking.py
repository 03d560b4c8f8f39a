"""What the doctor is told where a proxy cannot even be asked."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from ppd.proxy.cli.doctor.gather import ProxyClient


@pytest.mark.parametrize(("host", "key"), [("127.0.0.1", "key\r"), ("ppd..svc", "")])
async def test_a_name_or_a_key_that_cannot_be_sent_is_an_error_like_others(host: str, key: str) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, aiohttp.ClientSession() as session:
        said = await ProxyClient(session, f"http://{host}:{port}", admin_key=key, client_key="").operator(
            "/admin/fleet"
        )
    assert said.status == 0
    assert said.error.startswith("it cannot be asked: ")
