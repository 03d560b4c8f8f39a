"""Turns that are refused before they come to what answers turns count alike, whatever serves their connection."""

from __future__ import annotations

import ssl
from collections import Counter
from typing import Any

import pytest

from ppd.proxy.config import DataPlane
from tests.e2e.access.test_edge import port_of, sent
from tests.support.credentials import Authority, trusting
from tests.support.http2_client import http2
from tests.support.proxy import running_proxy

PATH = "/v1/chat/completions"
START = f"POST {PATH} HTTP/1.1\r\nConnection: close\r\n".encode()
HEAD = START + b"Host: proxy\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
SETTINGS: dict[str, Any] = {"header_limit": 10, "body_limit_bytes": 200_000, "body_memory_bytes": 100_000}
REFUSED = [
    (HEAD + b"X: y\r\n" * 10 + b"\r\n", 431),
    (HEAD + b"Content-Length: 150000\r\n\r\n", 413),  # in no memory
    (HEAD + b"Content-Length: 250000\r\n\r\n", 413),
    (HEAD + CHUNKED + b"no length\r\n", 400),
    (HEAD + CHUNKED + b"1\r\n{\r\nno length\r\n", 400),
    (START + b"Content-Length: 0\r\n\r\n", 400),  # without a Host
    (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 501),
    (HEAD + b"Content-Length: 2\r\n\r\n[]", 400),
]
NOT_COUNTED = [
    (HEAD.replace(b"POST", b"GET") + b"X: y\r\n" * 10 + b"\r\n", 431),
    (HEAD.replace(b"chat/completions", b"embeddings") + b"X: y\r\n" * 10 + b"\r\n", 431),
    (HEAD.replace(b"chat/completions", b"embeddings") + CHUNKED + b"no length\r\n", 400),
]


async def rejected(url: str, session: Any) -> dict[str, int]:
    async with session.get(f"{url}/metrics") as response:
        lines = [line.partition("{status=") for line in (await response.text()).splitlines()]
    found = (rest.split("} ") for name, _, rest in lines if name == "ppd_rejected_requests_total")
    return {status.strip('"'): int(float(count)) for status, count in found}


@pytest.mark.parametrize("plane", [DataPlane.NATIVE, DataPlane.ASGI])
async def test_over_http_1_1(plane: DataPlane) -> None:
    async with running_proxy(data_plane=plane, **SETTINGS) as (_, url, session):
        expected: Counter[str] = Counter()
        for request, status in REFUSED:
            assert (await sent(port_of(url), request)).startswith(b"HTTP/1.1 %d " % status), request
            expected[str(status)] += 1
            assert await rejected(url, session) == expected, request
        for request, status in NOT_COUNTED:
            assert (await sent(port_of(url), request)).startswith(b"HTTP/1.1 %d " % status), request
        assert await rejected(url, session) == expected


@pytest.mark.parametrize("plane", [DataPlane.NATIVE, DataPlane.ASGI])
async def test_behind_another_request(plane: DataPlane) -> None:
    before = b"GET /health HTTP/1.1\r\nHost: proxy\r\n\r\n"
    async with running_proxy(data_plane=plane, **SETTINGS) as (_, url, session):
        answers = await sent(port_of(url), before + HEAD + CHUNKED + b"no length\r\n")
        assert answers.startswith(b"HTTP/1.1 200 ") and answers.count(b"HTTP/1.1 400 ") == 1
        assert await rejected(url, session) == {"400": 1}


async def test_over_http_2(authority: Authority, tls_files: dict[str, str]) -> None:
    tls: ssl.SSLContext = trusting(authority)
    json = ("content-type", "application/json")
    async with running_proxy(tls=tls, **SETTINGS, **tls_files) as (_, url, session):
        for headers, status in (([json, *[("x", "y")] * 10], 431), ([json, ("content-length", "150000")], 413)):
            async with http2(port_of(url), trusting(authority)) as client:
                stream = client.open("POST", PATH, *headers, is_whole=False)
                while not client.streams[stream].status and not client.is_closed:
                    await client.read()
                assert client.streams[stream].status == status
        assert await rejected(url, session) == {"431": 1, "413": 1}
