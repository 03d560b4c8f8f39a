"""A look at an engine over HTTP, whatever it answers."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ppd.proxy.health.probe import UNTRUSTED, Card, EngineStatus, aliases_of, probe
from tests.support.credentials import Authority


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def look(session: aiohttp.ClientSession, answers: dict[str, Any], **options: Any) -> EngineStatus:
    """A probe of a server that has these paths: a status, or a text."""

    async def answer(request: web.Request) -> web.Response:
        given = answers.get(request.path, 404)
        return web.Response(status=given) if isinstance(given, int) else web.Response(text=given)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        return await probe(session, str(server.make_url("")).rstrip("/"), **options)


async def test_a_healthy_engine_tells_all(session: aiohttp.ClientSession) -> None:
    status = await look(
        session,
        {
            "/health": 200,
            "/v1/models": '{"data": [{"id": "a"}, {"id": "b"}]}',
            "/version": '{"version": "0.33.0"}',
            "/metrics": "vllm:num_requests_running 4\n",
        },
    )
    assert (status.healthy, status.models, status.version) == (True, ("a", "b"), "0.33.0")
    assert status.metrics.load.running == 4


async def test_names_with_one_root_are_one_models_and_adapters_are_not(session: aiohttp.ClientSession) -> None:
    cards = [("b", "/m", None), ("a", "/m", None), ("lora", "/l", "a"), ("same", "/l", "a"), ("other", None, None)]
    data = [{"id": name, "root": root, "parent": parent} for name, root, parent in cards]
    status = await look(session, {"/health": 200, "/v1/models": json.dumps({"data": data})})
    assert status.aliases == {"b": "a"}


def test_thousands_of_names_of_one_model_are_compared_once_each() -> None:
    class Name(str):
        compared = 0

        def __lt__(self, other: str) -> bool:
            Name.compared += 1
            return super().__lt__(other)

    cards = [Card(Name(f"name {at}"), "/m") for at in range(1000)]
    assert len(aliases_of(cards)) == 999
    assert Name.compared < 2000


DEEP = '{"data": [], "version": "1", "more": ' + 5000 * "[" + 5000 * "]" + "}"


@pytest.mark.parametrize("body", ["{", "[]", '{"data": 3}', '{"data": [{}]}', "\x00", DEEP])
async def test_answers_that_cannot_be_read_leave_a_gap(session: aiohttp.ClientSession, body: str) -> None:
    status = await look(session, {"/health": 200, "/v1/models": body, "/version": body, "/metrics": body})
    assert status == EngineStatus(healthy=True, scraped=True)


@pytest.mark.parametrize("version", ["9" * 5000, "1.²", "0.32 beta", "0.32\n"])
async def test_a_version_that_no_heartbeat_could_say_is_none(session: aiohttp.ClientSession, version: str) -> None:
    status = await look(session, {"/health": 200, "/version": json.dumps({"version": version})})
    assert (status.healthy, status.version) == (True, "")


@pytest.mark.parametrize("health", [503, 404, 500])
async def test_an_engine_that_is_not_well_is_not_asked_further(session: aiohttp.ClientSession, health: int) -> None:
    assert not (await look(session, {"/health": health, "/v1/models": '{"data": [{"id": "a"}]}'})).healthy


async def test_nobody_there_is_not_healthy(session: aiohttp.ClientSession) -> None:
    assert not (await probe(session, "http://127.0.0.1:1")).healthy
    assert not (await probe(session, "http://a..b:80")).healthy


@pytest.mark.parametrize(
    ("answers", "why", "wants_key"),
    [
        ({"/health": 503}, "/health answered 503", False),
        ({"/health": 401}, "/health answered 401", True),
        ({"/health": 200, "/v1/models": 401}, "", True),
        ({"/health": 200, "/v1/models": 404}, "", False),
    ],
)
async def test_it_is_said_why_an_engine_is_not_well(
    session: aiohttp.ClientSession, answers: dict[str, Any], why: str, wants_key: bool
) -> None:
    status = await look(session, answers)
    assert (status.why, status.wants_key) == (why, wants_key)


async def test_it_is_said_why_an_engine_is_not_reached(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    assert (await probe(session, "http://127.0.0.1:1")).why == "Connection refused"
    one = Authority(tmp_path).issue("one")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(one.cert, one.key)
    server = TestServer(web.Application())
    await server.start_server(ssl=context)
    try:
        seen = await probe(session, f"https://127.0.0.1:{server.port}")
    finally:
        await server.close()
    assert seen.why.startswith(f"{UNTRUSTED}: ") and "certificate" in seen.why.removeprefix(UNTRUSTED)


async def test_an_engine_that_does_not_answer_is_said_to_be_slow(session: aiohttp.ClientSession) -> None:
    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", hang)
    async with TestServer(app) as server:
        status = await probe(session, str(server.make_url("")).rstrip("/"), timeout_s=0.02)
    assert status.why == "no answer in 0.02 s"


async def test_metrics_that_did_not_come_are_told_from_an_idle_engines(
    session: aiohttp.ClientSession,
) -> None:
    assert not (await look(session, {"/health": 200, "/metrics": 500})).scraped
    assert (await look(session, {"/health": 200, "/metrics": ""})).scraped
