"""HTTP/2 over TLS: what one stream does harms no other, and what one client does no other client."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.support.credentials import Authority, trusting
from tests.support.http2_client import http2
from tests.support.proxy import running_proxy
from tests.support.scripted_workers import odd_worker


def port_of(base_url: str) -> int:
    return int(base_url.rpartition(":")[2])


async def test_http2_serves_more_requests_than_hypercorns_own_limit(
    authority: Authority, tls_files: dict[str, str]
) -> None:
    async with running_proxy(tls=trusting(authority), **tls_files) as (_, url, _session):
        async with http2(port_of(url), trusting(authority)) as client, asyncio.timeout(60):
            for _ in range(22):
                streams = [client.open("GET", "/health") for _ in range(50)]
                assert [(await client.ended(stream)).status for stream in streams] == [200] * 50


async def test_a_large_head_on_http2_is_refused(authority: Authority, tls_files: dict[str, str]) -> None:
    async with running_proxy(tls=trusting(authority), head_limit_bytes=4000, header_limit=10, **tls_files) as (
        _,
        url,
        _s,
    ):
        async with http2(port_of(url), trusting(authority)) as client, asyncio.timeout(60):
            large = client.open("GET", "/health", ("x", "y" * 5000))
            many = client.open("GET", "/health", *[("x", "y")] * 20)
            fine = client.open("GET", "/health")
            statuses = [(await client.ended(stream)).status for stream in (large, many, fine)]
            assert statuses == [431, 431, 200]


@pytest.mark.parametrize(("path", "headers", "status"), [("/nowhere", 0, 404), ("/health", 20, 431)])
async def test_an_early_answer_on_http2_breaks_no_other_stream(
    authority: Authority, tls_files: dict[str, str], path: str, headers: int, status: int
) -> None:
    async with running_proxy(tls=trusting(authority), header_limit=10, **tls_files) as (_, url, _session):
        async with http2(port_of(url), trusting(authority)) as client, asyncio.timeout(60):
            uploading = client.open("POST", path, *[("x", "y")] * headers, is_whole=False)
            while not client.streams[uploading].status:
                await client.read()
            client.upload(uploading, b"x" * 1000)
            assert (await client.ended(client.open("GET", "/health"))).status == 200
            client.upload(uploading, b"x" * 1000, is_last=True)
            assert (await client.ended(uploading)).status == status
            assert not client.is_closed


async def test_an_answer_whose_worker_breaks_off_does_not_stay_open(
    start_fleet: Any, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Over HTTP/1.1 the end of the connection says that it is not whole."""

    async def breaks_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"x" * 50)
        assert request.transport is not None
        request.transport.close()
        return response

    async with start_fleet("") as fleet, odd_worker(fleet, breaks_off, role="R"):
        asked = json.dumps({"model": "sim", "input": "x"}).encode()
        async with http2(port_of(fleet.base_url)) as client, asyncio.timeout(60):
            stream = client.open("POST", "/v1/embeddings", ("content-type", "application/json"), is_whole=False)
            client.upload(stream, asked, is_last=True)
            found = await client.ended(stream)
        assert (found.status, found.body, found.is_ended, client.is_closed) == (200, b"x" * 50, False, True)
        with pytest.raises(aiohttp.ClientPayloadError):
            await fleet.post("/v1/embeddings", {"model": "sim", "input": "x"})
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_rapid_resets_end_their_own_connection_only(authority: Authority, tls_files: dict[str, str]) -> None:
    async with running_proxy(tls=trusting(authority), **tls_files) as (_, url, _session):
        async with (
            http2(port_of(url), trusting(authority)) as attacker,
            http2(port_of(url), trusting(authority)) as client,
            asyncio.timeout(60),
        ):
            for _ in range(12):  # a burst of more than 1000 would be too many for Hypercorn itself
                for _ in range(100):
                    attacker.reset(attacker.open("POST", "/v1/embeddings", ("content-length", "5")))
                await attacker.ended(attacker.open("GET", "/health"))
                if attacker.is_closed:
                    break
            assert attacker.is_closed
            assert (await client.ended(client.open("GET", "/health"))).status == 200
