"""A running proxy's certificate for its clients is replaced: new connections see the new one, old ones go on."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path

from tests.support.credentials import Authority
from tests.support.proxy import running_proxy


async def test_new_connections_are_shown_a_renewed_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, renewed = authority.issue("own"), authority.issue("renewed")
    context = ssl.create_default_context(cafile=authority.ca)
    async with running_proxy(tls=context, tls_cert_file=own.cert, tls_key_file=own.key) as (_, url, session):
        port = int(url.rpartition(":")[2])

        async def shown() -> str:
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            ((_, name),) = writer.get_extra_info("peercert")["subject"][0]
            writer.transport.abort()
            return str(name)

        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        assert await shown() == "own"
        shutil.copyfile(renewed.cert, own.cert)
        shutil.copyfile(renewed.key, own.key)
        async with asyncio.timeout(60):
            while await shown() != "renewed":
                await asyncio.sleep(0.05)
        async with session.get(url + "/health") as response:
            assert response.status == 200
        writer.write(b"GET /health HTTP/1.1\r\nHost: proxy\r\n\r\n")  # on the connection from before
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.transport.abort()
