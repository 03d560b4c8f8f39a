"""The legs are those of llm-d's sidecar, as `tests/data/llm_d` has them; each difference is named here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ppd.proxy.gateway.headers import ENCODERS
from ppd.servers.sidecar.prefills import HEADER
from tests.servers.sidecar.site import Site

EXCHANGES: dict[str, Any] = {
    file.stem: json.loads(file.read_text())
    for file in (Path(__file__).parents[2] / "data/llm_d").glob("sidecar_*.json")
}
ADDED = {"ignore_eos": True}  # P's one token is thrown away, whichever it is
ADDED_TO = {"/v1/responses": {"store": False}}  # D's answer is the one to keep
LIMITS = ("max_completion_tokens", "min_tokens")  # llm-d sets both; here P gets the first where the client sends it


class Recorder:
    """A worker that notes what it is asked, and gives the answers in order."""

    def __init__(self, *answers: Any) -> None:
        self.asked: list[dict[str, Any]] = []
        self._answers = list(answers)

    async def answer(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append(
            {"method": request.method, "path": request.path, "headers": headers, "body": await request.json()}
        )
        answer = self._answers.pop(0)
        if isinstance(answer, list):
            return web.Response(text=events(answer), content_type="text/event-stream")
        return web.json_response(answer)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/{path:.*}", self.answer)
        async with TestServer(app) as server:
            yield f"127.0.0.1:{server.port}"


def events(data: list[Any]) -> str:
    return "".join(f"data: {json.dumps(each)}\n\n" for each in data) + "data: [DONE]\n\n"


def unnamed(body: Any) -> Any:
    """Without the names that media get here on every leg."""
    if isinstance(body, dict):
        return {name: unnamed(value) for name, value in body.items() if name != "uuid"}
    return [unnamed(each) for each in body] if isinstance(body, list) else body


def assert_is(leg: Mapping[str, Any], recorded: Mapping[str, Any], body: Any) -> None:
    assert (leg["method"], leg["path"]) == (recorded["method"], recorded["path"])
    assert leg["headers"]["content-type"] == recorded["headers"]["content-type"]
    assert set(recorded["headers"]) <= set(leg["headers"])
    assert leg["headers"]["x-request-id"].startswith("gateway-1-"), "the legs' ids begin alike, but end differently"
    assert unnamed(leg["body"]) == body


def test_there_are_exchanges_of_each_endpoint() -> None:
    paths = {recorded["request"]["path"] for recorded in EXCHANGES.values()}
    assert paths == {"/v1/chat/completions", "/v1/completions", "/v1/responses"}


@pytest.mark.parametrize("exchange", sorted(EXCHANGES))
async def test_the_legs_are_those_of_llm_ds_sidecar(exchange: str) -> None:
    recorded = EXCHANGES[exchange]
    request, path = recorded["request"], recorded["request"]["path"]
    p, d, e = Recorder(recorded["from_P"]), Recorder(recorded["from_D"]), Recorder(*recorded.get("from_E", ()))
    async with p.serving() as at_p, d.serving() as at_d, e.serving() as at_e:
        named = {HEADER: at_p, ENCODERS: at_e}
        headers = {name: named.get(name, value) for name, value in request["headers"].items()}
        async with (
            Site.of(engine_at=at_d, names="") as site,
            site.session.post(
                site.base_url + path, json=request["body"], headers={**headers, "X-Request-Id": "gateway-1"}
            ) as answer,
        ):
            assert answer.status == 200, await answer.text()
            told = await answer.text()
    ((to_p,), (to_d,)) = p.asked, d.asked
    for_p = {**recorded["to_P"]["body"], **ADDED, **ADDED_TO.get(path, {})}
    for name in LIMITS:
        if name == "min_tokens" or name not in request["body"]:
            for_p.pop(name, None)
    assert_is(to_p, recorded["to_P"], for_p)
    assert_is(to_d, recorded["to_D"], recorded["to_D"]["body"])
    to_e = sorted(e.asked, key=lambda leg: json.dumps(unnamed(leg["body"]["messages"])))  # they come side by side
    for leg, one in zip(to_e, recorded.get("to_E", ()), strict=True):
        assert_is(leg, one, one["body"])
    # D counts as cached what it has pulled: the client is told P's count.
    if isinstance(recorded["answer"], list):
        assert [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")] == recorded["answer"]
    else:
        assert json.loads(told) == recorded["answer"]
