"""What clients of other APIs and habits expect: paths, headers, shapes of errors, compressed bodies."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ppd.proxy.config import Mode
from ppd.proxy.routing import router
from ppd.servers.sim.core.fault_orders import FaultKind, Faults, Order
from tests.support.credentials import bearer, client, key_of, write_keys
from tests.support.scripted_workers import odd_worker

SAY = [{"role": "user", "content": "Something that is long enough for a few blocks. " * 4}]
CHAT = {"model": "sim", "messages": SAY, "max_tokens": 8}
STORES = {"stores_responses": True}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    limited = client("limited", requests_per_minute=2, tokens_per_minute=60_000)
    return write_keys(tmp_path / "keys.toml", client("one"), client("two"), limited)


async def get(fleet: Any, path: str, headers: Any = None, method: str = "GET") -> tuple[int, Any]:
    async with fleet.session.request(method, fleet.base_url + path, headers=headers) as answer:
        text = await answer.text()
        return answer.status, json.loads(text) if text else None


# -- paths


@pytest.mark.parametrize(
    ("path", "body", "has"),
    [
        ("/v1/messages/count_tokens", {"model": "sim", "messages": SAY}, "input_tokens"),
        ("/v2/embed", {"model": "sim", "texts": ["text"], "embedding_types": ["float"]}, "embeddings"),
        ("/v1/chat/completions/batch", {"model": "sim", "messages": [SAY, SAY], "max_tokens": 4}, "choices"),
    ],
)
async def test_vllms_other_paths_are_passed_through(start_fleet: Any, path: str, body: Any, has: str) -> None:
    async with start_fleet("P1 D1") as fleet:
        turn = await fleet.post(path, body)
        assert (turn.status, has in turn.body) == (200, True)


async def test_the_fleet_says_what_one_engine_would(start_fleet: Any) -> None:
    async with start_fleet("D1", engine={"time_scale": 1.0}) as fleet:
        assert (await get(fleet, "/version"))[1] == {"version": "0.33.0"}
        for method in ("GET", "POST"):
            assert await get(fleet, "/ping", method=method) == (200, None)
        assert (await get(fleet, "/load"))[1] == {"server_load": 0}
        body = {**CHAT, "max_tokens": 20_000, "stream": True}
        async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            assert (await get(fleet, "/load"))[1] == {"server_load": 1}


async def test_a_fleet_without_workers_has_no_version(start_fleet: Any, keys: str) -> None:
    async with start_fleet("", keys_file=keys) as fleet:
        assert (await get(fleet, "/version", bearer("one")))[0] == 503
        assert (await get(fleet, "/version"))[0] == (await get(fleet, "/load"))[0] == 401
        assert (await get(fleet, "/ping"))[0] == 200


@pytest.mark.parametrize("forgets", [False, True])
async def test_a_stored_response_is_read_where_it_is(start_fleet: Any, forgets: bool) -> None:
    async with start_fleet("P1 D1 D2 D3", engine=STORES) as fleet:
        made = [
            (await fleet.post("/v1/responses", {"model": "sim", "input": f"{at}. hi"})).body["id"] for at in range(6)
        ]
        if forgets:
            for session in fleet.proxy.state.sessions.all():
                fleet.proxy.state.sessions.drop(session.id)
        for at, response_id in enumerate(made):
            status, response = await get(fleet, f"/v1/responses/{response_id}")
            assert (status, response["id"], response["status"]) == (200, response_id, "completed"), at
        assert (await get(fleet, "/v1/responses/resp_unknown"))[0] == 404
        assert (await get(fleet, "/v1/responses/a.b"))[0] == 404
        assert (await get(fleet, f"/v1/responses/{made[0]}/cancel", method="POST"))[0] == 400


@pytest.mark.parametrize(("names", "mode"), [("P1 D1 D2 D3 R1", Mode.TABLE), ("R1 R2 R3", Mode.REPLICA)])
async def test_a_turn_goes_on_from_a_stored_response_whose_session_is_forgotten(
    start_fleet: Any, names: str, mode: Mode
) -> None:
    """As after a restart of the proxy: only the engine that has stored it knows it. No limit of retries holds here."""
    async with start_fleet(names, mode=mode, engine=STORES, attempts=1, retry_share=0.0, retry_burst=0) as fleet:
        made = [
            (await fleet.post("/v1/responses", {"model": "sim", "input": f"{at}. hi"})).body["id"] for at in range(6)
        ]
        for session in fleet.proxy.state.sessions.all():
            fleet.proxy.state.sessions.drop(session.id)
        for previous in made:
            body = {"model": "sim", "input": "And?", "previous_response_id": previous}
            assert (await fleet.post("/v1/responses", body)).status == 200, previous


async def test_a_response_that_no_engine_has_stored_is_asked_of_each_once(start_fleet: Any) -> None:
    async with start_fleet("D1 D2 R1", engine=STORES) as fleet:
        body = {"model": "sim", "input": "And?", "previous_response_id": "resp_unknown"}
        turn = await fleet.post("/v1/responses", body)
        assert (turn.status, turn.body["error"]["param"]) == (404, "previous_response_id")
        assert [len(engine.received) for engine in fleet.engines.values()] == [1, 1, 1]
        assert (await fleet.post("/v1/responses", {"model": "sim", "input": "hi"})).status == 200
        assert not fleet.proxy.state.health.breakers.blocked(fleet.proxy.state.now())


async def test_a_turn_is_told_where_not_all_engines_were_asked_for_a_stored_response(
    start_fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "MOST_SEARCHED", 2)
    async with start_fleet("R1 R2 R3", mode=Mode.REPLICA, engine=STORES) as fleet:
        body = {"model": "sim", "input": "And?", "previous_response_id": "resp_unknown"}
        turn = await fleet.post("/v1/responses", body)
        assert sum(len(engine.received) for engine in fleet.engines.values()) == 2
        error = turn.body["error"]
        assert (turn.status, error["param"]) == (404, "previous_response_id")
        assert error["message"] == "Response with id 'resp_unknown' not found on 2 workers; no others were asked."


async def test_an_engine_that_stores_nothing_is_believed(start_fleet: Any) -> None:
    async with start_fleet("D1 D2 D3") as fleet:
        made = (await fleet.post("/v1/responses", {"model": "sim", "input": "hi"})).body["id"]
        turn = await fleet.post("/v1/responses", {"model": "sim", "input": "And?", "previous_response_id": made})
        assert turn.status == 404
        assert sum(len(engine.received) for engine in fleet.engines.values()) == 2


async def test_a_response_in_the_background_is_cancelled_where_it_runs(start_fleet: Any) -> None:
    async with start_fleet("R1 R2", mode=Mode.REPLICA, engine={**STORES, "time_scale": 1.0}) as fleet:
        body = {"model": "sim", "input": "hi", "background": True, "max_output_tokens": 20_000}
        queued = await fleet.post("/v1/responses", body)
        assert (queued.status, queued.body["status"]) == (200, "queued")
        status, response = await get(fleet, f"/v1/responses/{queued.body['id']}/cancel", method="POST")
        assert (status, response["status"]) == (200, "cancelled")
        await fleet.until(fleet.idle)


async def test_a_tenant_reads_and_cancels_its_own_responses_only(start_fleet: Any, keys: str) -> None:
    async with start_fleet("P1 D1", engine=STORES, keys_file=keys) as fleet:
        made = (await fleet.post("/v1/responses", {"model": "sim", "input": "hi"}, bearer("one"))).body["id"]
        assert (await get(fleet, f"/v1/responses/{made}", bearer("one")))[0] == 200
        for method, path in (("GET", made), ("POST", f"{made}/cancel")):
            assert (await get(fleet, f"/v1/responses/{path}", bearer("two"), method))[0] == 404
            assert (await get(fleet, f"/v1/responses/{path}", method=method))[0] == 401


async def test_a_response_is_not_known_while_a_worker_that_may_have_it_is_silent(start_fleet: Any) -> None:
    async def busy(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "later"}}, status=503)

    async with start_fleet("D1", engine=STORES) as fleet, odd_worker(fleet, busy):
        status, _ = await get(fleet, "/v1/responses/resp_unknown/cancel", method="POST")
        assert status == 503


# -- errors


def is_anthropics(error: Any, kind: str) -> bool:
    return set(error) == {"type", "error"} and error["type"] == "error" and error["error"]["type"] == kind


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_errors_of_messages_have_anthropics_shape(start_fleet: Any, keys: str, path: str) -> None:
    async with start_fleet("D1", keys_file=keys, body_limit_bytes=5000, header_limit=20, queue_timeout_s=0.2) as fleet:

        async def error(status: int, kind: str, data: bytes, headers: Any = None) -> None:
            given = {"x-api-key": key_of("one"), "Content-Type": "application/json", **(headers or {})}
            async with fleet.session.post(fleet.base_url + path, data=data, headers=given) as answer:
                body = await answer.json()
                assert answer.status == status, body
                assert is_anthropics(body, kind), body

        await error(401, "authentication_error", b"{}", {"x-api-key": "guess"})
        await error(400, "invalid_request_error", b"{")
        await error(413, "request_too_large", b"x" * 6000)
        await error(415, "invalid_request_error", b"{}", {"Content-Encoding": "br"})
        await error(415, "invalid_request_error", b"{}", {"Content-Type": "text/plain"})
        await error(431, "invalid_request_error", b"{}", {f"X-{at}": "" for at in range(30)})
        await error(404, "not_found_error", json.dumps({**CHAT, "model": "other"}).encode())
        for _ in range(2):
            await fleet.post(path, CHAT, {"x-api-key": key_of("limited")})
        await error(429, "rate_limit_error", json.dumps(CHAT).encode(), {"x-api-key": key_of("limited")})
        await fleet.admin("DELETE", f"/workers/{fleet.engines['D1'].address}")
        await error(503, "overloaded_error", json.dumps(CHAT).encode())
    async with start_fleet("") as fleet:
        assert is_anthropics((await get(fleet, "/v1/messages/nothing"))[1], "not_found_error")
        assert is_anthropics((await get(fleet, path))[1], "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"type": "error", "error": {"type": "bad", "message": "no!"}}, "bad"),
        ({"error": {"message": "no!", "type": "BadRequestError", "code": 400}}, "invalid_request_error"),
        ({"error": "no!"}, "invalid_request_error"),
    ],
)
async def test_a_workers_error_on_messages_has_anthropics_shape_too(
    start_fleet: Any, said: Any, kind: str, stream: bool
) -> None:
    async def refuses(_: web.Request) -> web.Response:
        return web.json_response(said, status=400)

    async with start_fleet("") as fleet, odd_worker(fleet, refuses, "R"):
        turn = await fleet.post("/v1/messages", {**CHAT, "stream": stream})
        assert turn.status == 400
        assert is_anthropics(turn.body, kind)
        assert turn.body["error"]["message"] == "no!"


async def test_a_worker_that_fails_is_told_in_anthropics_shape(start_fleet: Any) -> None:
    async with start_fleet("D1", attempts=1) as fleet:
        fleet.engines["D1"].faults = Faults([Order(FaultKind.ERROR, status=500, times=10)])
        turn = await fleet.post("/v1/messages", CHAT)
        assert turn.status == 502
        assert is_anthropics(turn.body, "api_error")


# -- what a request may look like


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_compressed_bodies_are_read_and_bounded(start_fleet: Any, path: str) -> None:
    async with start_fleet("D1", body_limit_bytes=100_000) as fleet:

        async def sent(data: bytes, coding: str) -> int:
            headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
            async with fleet.session.post(fleet.base_url + path, data=data, headers=headers) as answer:
                status: int = answer.status
                return status

        body = json.dumps({**CHAT, "input": "text"}).encode()
        assert await sent(gzip.compress(body), "gzip") == 200
        assert await sent(gzip.compress(json.dumps({**CHAT, "input": "x" * 90_000}).encode()), "gzip") == 200
        assert await sent(body, "identity") == 200
        assert await sent(gzip.compress(b" " * 50_000_000), "gzip") == 413
        assert await sent(body, "gzip") == 400
        assert await sent(body, "br") == 415


@pytest.mark.parametrize("header", ["Api-Key", "api-key"])
async def test_azures_header_brings_a_key(start_fleet: Any, keys: str, header: str) -> None:
    async with start_fleet("D1", keys_file=keys) as fleet:
        assert (await fleet.post("/v1/chat/completions", CHAT, {header: key_of("one")})).status == 200
        assert (await fleet.post("/v1/chat/completions", CHAT, {header: "guess"})).status == 401
    async with start_fleet("D1", engine={"api_key": "inner"}) as fleet:
        assert (await fleet.post("/v1/chat/completions", CHAT, {header: "inner"})).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_a_limited_key_is_told_what_it_has_left(start_fleet: Any, keys: str, path: str, stream: bool) -> None:
    async with start_fleet("D1", keys_file=keys) as fleet:

        async def limits(who: str) -> tuple[int, dict[str, str]]:
            body = {**CHAT, "input": "x", "stream": stream}
            async with fleet.session.post(fleet.base_url + path, json=body, headers=bearer(who)) as answer:
                await answer.read()
                shown = {name.lower(): value for name, value in answer.headers.items()}
                return answer.status, {
                    name.removeprefix("x-ratelimit-"): value
                    for name, value in shown.items()
                    if name.startswith("x-ratelimit-")
                }

        assert (await limits("one"))[1] == {}
        status, first = await limits("limited")
        assert (status, first["limit-requests"], first["remaining-requests"]) == (200, "2", "1")
        assert first["limit-tokens"] == "60000"
        assert 0 < int(first["remaining-tokens"]) < 60_000
        assert first["reset-requests"].endswith("s")
        assert (await limits("limited"))[1]["remaining-requests"] == "0"
        status, refused = await limits("limited")
        assert (status, refused["remaining-requests"]) == (429, "0")


# -- names of models


@pytest.mark.parametrize("names", [("sim", "alias"), ("alias", "sim")])
async def test_a_models_other_name_continues_its_conversations(start_fleet: Any, names: tuple[str, str]) -> None:
    async with start_fleet("P1 D1", engine={"aliases": ("alias",)}, mode=Mode.ALWAYS_LOCAL) as fleet:
        chat = fleet.conversation()
        assert (await chat.say("A first message that fills a block or two.", model=names[0])).status == 200
        turn = await chat.say("And?", model=names[1])
        assert (turn.route, turn.body["model"]) == ("LOCAL", names[1])
        assert turn.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_an_adapter_is_another_model(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", engine={"loras": ("adapter",)}, mode=Mode.ALWAYS_LOCAL) as fleet:
        chat = fleet.conversation()
        assert (await chat.say("A first message that fills a block or two.")).status == 200
        assert (await chat.say("And?", model="adapter")).route == "SPLIT"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapter_that_one_worker_no_longer_has_is_found_on_another(
    start_fleet: Any, path: str, stream: bool
) -> None:
    engine = {"loras": ("adapter", "other")}
    async with start_fleet("P1 P2 D1 D2 R1 R2", probe_interval_s=60.0, engine=engine) as fleet:
        body = {**CHAT, "model": "adapter", "input": "text", "stream": stream}
        for name in ("P1", "D1", "R1", "R2"):
            unload(fleet.engines[name], "adapter")
        for at in range(6):
            words = [{"role": "user", "content": f"{at}. {SAY[0]['content']}"}]
            async with fleet.session.post(fleet.base_url + path, json={**body, "messages": words}) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
        serving = {view.name for view in fleet.proxy.state.registry.views() if view.takes_turns("adapter")}
        assert {"D2"} <= serving
        assert await fleet.metric("ppd_breakers_open") == 0
        for name in ("P2", "D2"):
            unload(fleet.engines[name], "adapter")
        assert (await fleet.post(path, body)).status == 404


def unload(engine: Any, adapter: str) -> None:
    kept = tuple(name for name in engine.config.loras if name != adapter)
    object.__setattr__(engine.config, "loras", kept)
