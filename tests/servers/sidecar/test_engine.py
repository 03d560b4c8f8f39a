"""What is no turn goes to the engine; and how the sidecar ends."""

from __future__ import annotations

import asyncio
import json
import ssl
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import FormData, web
from aiohttp.test_utils import TestServer

from tests.servers.sidecar.site import BODY, Site
from tests.support.credentials import Authority, trusting

pytestmark = pytest.mark.slow


class Recorder:
    """An engine that answers whatever it is asked, and keeps it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []

    async def take(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.method, request.raw_path, headers, await request.read()))
        return web.Response(status=418, body=b"tea", content_type="text/x-tea", headers={"Location": "/x", "X-A": "b"})


async def recorded(method: str, path: str, **more: Any) -> tuple[Any, list[tuple[str, str, dict[str, str], bytes]]]:
    app, recorder = web.Application(), Recorder()
    app.router.add_route("*", "/{path:.*}", recorder.take)
    async with TestServer(app) as server, Site.of(engine_at=f"127.0.0.1:{server.port}") as site:
        return await site.get(path, method=method, **more), recorder.asked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/metrics"),
        ("GET", "/health?a=1&b=%20"),
        ("DELETE", "/v1/things/a%2Fb"),
        ("POST", "/reset_prefix_cache"),
        ("GET", "/v1/chat/completions"),
        ("HEAD", "/v1/models"),
    ],
)
async def test_the_engine_gets_the_request_as_it_is_and_its_answer_comes_back(method: str, path: str) -> None:
    answer, ((asked_as, target, headers, body),) = await recorded(method, path, headers={"X-Own": "1"})
    assert (asked_as, target, headers["x-own"], body) == ("GET" if method == "HEAD" else method, path, "1", b"")
    assert (answer.status, answer.raw) == (418, b"" if method == "HEAD" else b"tea")
    assert answer.headers["Content-Type"].startswith("text/x-tea")
    assert (answer.headers["Location"], answer.headers["X-A"]) == ("/x", "b")


async def test_the_engine_gets_the_clients_headers_and_none_that_nobody_sent() -> None:
    given = {"Accept": "application/openmetrics-text", "X-Own": "1", "User-Agent": "a-client"}
    _, ((_, _, headers, _),) = await recorded("GET", "/metrics", headers=given)
    of_the_sidecar = {"host", "accept-encoding", "user-agent", "content-length", "x-ppd-hops"}
    assert {name: headers[name] for name in headers.keys() - of_the_sidecar} == {
        "accept": "application/openmetrics-text",
        "x-own": "1",
    }


async def test_objects_lose_their_transfer_members_and_forms_go_as_they_are() -> None:
    given = {"a": 1, "kv_transfer_params": {"remote_host": "10.9.9.9"}}
    _, ((_, _, headers, body),) = await recorded("POST", "/v1/embeddings", json=given)
    assert (headers["content-type"], json.loads(body)) == ("application/json", {"a": 1})
    form = FormData()
    form.add_field("file", BytesIO(b"x"), filename="f")
    _, ((_, _, headers, body),) = await recorded("POST", "/v1/audio/transcriptions", data=form)
    assert headers["content-type"].startswith("multipart/form-data; boundary=")
    assert b"filename" in body


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "data", "status"),
    [
        ("/inference/v1/generate", b"{}", 404),
        ("/inference/v1%2Fgenerate", b"{}", 404),
        ("/v1/embeddings", b"[1]", 400),
        ("/v1/embeddings", b'{"a": NaN}', 400),
        ("/v1/embeddings", b"[" * 100_000, 400),
    ],
)
async def test_what_could_hide_transfer_members_never_reaches_the_engine(path: str, data: bytes, status: int) -> None:
    answer, asked = await recorded("POST", path, data=data)
    assert (answer.status, asked) == (status, [])
    assert answer.body["error"]["message"]


async def test_an_answer_that_is_no_turns_is_streamed() -> None:
    async with Site.of() as site:
        assert b"vllm:num_requests_running" in (await site.get("/metrics")).raw
        assert (await site.get("/v1/models")).body["data"][0]["id"] == "sim"
        assert (await site.get("/health")).status == 200


async def test_tls_is_spoken_to_the_gateway_to_the_engine_and_to_p(tmp_path: Path) -> None:
    authority, worker, recorder = Authority(tmp_path), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), Recorder()
    own, ours = authority.issue("worker"), authority.issue("sidecar")
    worker.load_cert_chain(own.cert, own.key)
    files = {"tls_cert_file": ours.cert, "tls_key_file": ours.key, "worker_ca_file": authority.ca}
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", recorder.take)
    engine, p = TestServer(app, scheme="https"), TestServer(app, scheme="https")
    await engine.start_server(ssl=worker)
    await p.start_server(ssl=worker)
    options: dict[str, Any] = {"engine_at": f"127.0.0.1:{engine.port}", "engine_tls": True, "prefill_tls": True}
    async with engine, p, Site.of(tls=trusting(authority), settings=files, **options) as site:
        assert (await site.get("/metrics")).status == 418
        turn = await site.ask({"x-prefiller-host-port": f"127.0.0.1:{p.port}"})
        assert (turn.status, json.loads(recorder.asked[-1][3])["max_tokens"]) == (418, 1), "P's own refusal"


async def test_a_drain_says_so_first_and_lets_answers_end() -> None:
    async with Site.of(settings={"drain_delay_s": 0.2, "shutdown_timeout_s": 20.0}) as site:
        body = {**BODY, "max_tokens": 120, "ignore_eos": True, "stream": True}
        async with site.session.post(f"{site.base_url}/v1/chat/completions", json=body, headers=site.to_p) as response:
            await response.content.readany()
            site.stop.set()
            await site.until(lambda: site.sidecar.drain.is_announced)
            answer = await site.get("/health")
            assert (answer.status, answer.headers["X-PPD-Refused"]) == (503, "draining")
            assert (await site.ask(site.to_p)).status == 200, "turns are taken until the delay is over"
            await site.until(lambda: site.sidecar.drain.is_draining)
            rest = await response.content.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        await asyncio.wait_for(site.serving, 60)
        assert site.is_idle()
