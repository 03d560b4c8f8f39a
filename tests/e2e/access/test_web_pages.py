"""Web pages and the proxy, over real sockets on HTTP/1.1 and HTTP/2: what is answered to which, and how."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.credentials import Authority, bearer, client, write_keys
from tests.support.http2_client import http2
from tests.support.proxy import running_proxy

PAGE = "https://chat.example"
BODY = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/v1/audio/speech"])
@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_no_page_posts_without_a_preflight(start_fleet: Any, path: str, content_type: str | None) -> None:
    async with start_fleet("R1") as fleet:
        headers = {"Content-Type": content_type} if content_type else {}
        async with fleet.session.post(
            fleet.base_url + path, data=json.dumps(BODY).encode(), headers=headers, skip_auto_headers=["Content-Type"]
        ) as response:
            assert response.status == 415
            assert "must be application/json" in (await response.json())["error"]["message"]
        assert not fleet.engines["R1"].received


async def test_a_form_from_an_unknown_page_is_refused(start_fleet: Any) -> None:
    async with start_fleet("R1", cors_allow_origins=(PAGE,)) as fleet:
        for origin, status in ((PAGE, 200), ("https://evil.example", 403)):
            form = aiohttp.FormData({"model": "sim"})
            form.add_field("file", b"x", filename="a.wav", content_type="audio/wav")
            url = f"{fleet.base_url}/v1/audio/transcriptions"
            async with fleet.session.post(url, data=form, headers={"Origin": origin}) as response:
                assert response.status == status
                assert response.headers.get("Access-Control-Allow-Origin") == (PAGE if status == 200 else None)


async def test_a_preflight_needs_no_key_and_every_answer_can_be_read(start_fleet: Any, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", client("some"))
    async with start_fleet("R1", keys_file=keys, cors_allow_origins=(PAGE,), body_limit_bytes=1000) as fleet:
        url = f"{fleet.base_url}/v1/chat/completions"
        async with fleet.session.options(url, headers=PREFLIGHT) as response:
            assert (response.status, await response.read()) == (204, b"")
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert response.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
        for headers, body, status in (
            (bearer("some"), BODY, 200),
            (bearer("some"), {**BODY, "stream": True}, 200),
            ({}, BODY, 401),
            (bearer("some"), {}, 400),
            (bearer("some"), {"x": "x" * 2000}, 413),
            ({"Upgrade": "websocket", "Connection": "Upgrade"}, BODY, 403),
        ):
            async with fleet.session.post(url, json=body, headers={"Origin": PAGE, **headers}) as response:
                assert response.status == status
                assert response.headers["Access-Control-Allow-Origin"] == PAGE
                assert response.headers["Access-Control-Expose-Headers"] == "*"
        async with fleet.session.post(f"{fleet.base_url}/v1/nothing", json={}, headers={"Origin": PAGE}) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (404, PAGE)


@pytest.mark.parametrize("path", ["/admin/workers", "/%61dmin/workers", "/metrics", "/admin/none"])
async def test_what_is_the_operators_is_for_no_page(start_fleet: Any, path: str) -> None:
    async with start_fleet("R1", cors_allow_origins=("*",)) as fleet:
        for method in ("OPTIONS", "GET"):
            headers = {**PREFLIGHT, "X-Admin-Key": "operator"}
            async with fleet.session.request(method, fleet.base_url + path, headers=headers) as response:
                assert response.status != 204
                assert not [name for name in response.headers if name.startswith("Access-Control")]


async def test_http2_answers_pages_too(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("proxy")
    tls = ssl.create_default_context(cafile=authority.ca)
    files = {"tls_cert_file": own.cert, "tls_key_file": own.key}
    async with running_proxy(tls=tls, cors_allow_origins=(PAGE,), **files) as (_, url, _session):
        async with http2(int(url.rpartition(":")[2]), tls) as client, asyncio.timeout(60):
            asked = [(name.lower(), value) for name, value in PREFLIGHT.items()]
            preflight = await client.ended(client.open("OPTIONS", "/v1/chat/completions", *asked))
            refused = await client.ended(client.open("GET", "/v1/nothing", ("origin", PAGE)))
            simple = await client.ended(client.open("POST", "/v1/chat/completions", ("content-type", "text/plain")))
    assert (preflight.status, refused.status, simple.status) == (204, 404, 415)
    assert [found.headers.get("access-control-allow-origin") for found in (preflight, refused, simple)] == [
        PAGE,
        PAGE,
        None,
    ]
