"""What clients, strangers and odd workers send, and what must not come of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
import yarl
from aiohttp import web

from ppd.proxy.config import Mode, build
from ppd.proxy.settings import ConfigSource, Settings
from ppd.servers.sim.core.fault_orders import Faults
from tests.support.scripted_workers import Handler, odd_worker

HELLO = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


async def events(request: web.Request, *parts: bytes, then: float = 0.0) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
        await asyncio.sleep(then)
    return response


@pytest.mark.parametrize(
    "path",
    [
        "/v1/audio/../chat/completions",
        "/v1/audio/%2e%2e/chat/completions",
        "/v1/audio/..%2fchat%2fcompletions",
        "/v1/audio/%252e%252e/chat/completions",
        "/v1/audio/speech/../../chat/completions",
        "/v1/audio/",
        "/v1/audio/%2e%2e/%2e%2e/collective_rpc",
        "/tokenize/../sleep",
    ],
)
async def test_no_path_reaches_an_endpoint_that_it_does_not_name(start_fleet: Any, path: str) -> None:
    async with start_fleet("D1") as fleet:
        url = yarl.URL(fleet.base_url + path, encoded=True)
        async with fleet.session.post(
            url, json={**HELLO, "kv_transfer_params": {"do_remote_prefill": True}}
        ) as response:
            assert response.status in (404, 405)
        assert not fleet.engines["D1"].received


async def test_a_model_name_without_end_is_refused_and_not_kept(start_fleet: Any) -> None:
    async with start_fleet("D1") as fleet:
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            turn = await fleet.post(path, {**HELLO, "model": "m" * 100_000})
            assert (turn.status, turn.body["error"]["param"]) == (400, "model")
            assert len(turn.body["error"]["message"]) < 200


async def test_requests_under_one_client_id_are_told_apart_by_engines(start_fleet: Any) -> None:
    async with start_fleet("P1 D1") as fleet:
        chats = [fleet.conversation(X_Request_Id="trace") for _ in range(3)]
        turns = await asyncio.gather(*(chat.say(f"number {n}") for n, chat in enumerate(chats)))
        assert {turn.headers["X-Request-Id"] for turn in turns} == {"trace"}
        ids = [r.headers["X-Request-Id"] for engine in fleet.engines.values() for r in engine.received]
        assert len(set(ids)) == len(ids) == 6


async def test_compressed_answers_are_not_asked_for(start_fleet: Any) -> None:
    async with start_fleet("P1 D1") as fleet:
        await fleet.conversation(Accept_Encoding="gzip").say("hi")
        for engine in fleet.engines.values():
            assert [r.headers["Accept-Encoding"] for r in engine.received] == ["identity"]


async def test_a_turn_is_json_to_the_worker_whichever_json_the_client_called_it(start_fleet: Any) -> None:
    async with start_fleet("D1") as fleet:
        async with fleet.session.post(
            f"{fleet.base_url}/v1/chat/completions", data=json.dumps(HELLO), headers={"Content-Type": "a/b+json"}
        ) as response:
            assert response.status == 200
        assert [r.headers["Content-Type"] for r in fleet.engines["D1"].received] == ["application/json"]


async def test_anthropics_key_header_reaches_a_keyed_worker(start_fleet: Any) -> None:
    async with start_fleet("D1", engine={"api_key": "k"}) as fleet:
        assert (await fleet.conversation(x_api_key="k").say("hi")).status == 200


async def test_the_errors_of_a_proxy_before_the_worker_stay_inside(start_fleet: Any) -> None:
    async def gateway(_: web.Request) -> web.StreamResponse:
        return web.Response(status=502, text="<html>upstream 10.1.2.3 failed</html>", content_type="text/html")

    async with start_fleet("", attempts=1) as fleet, odd_worker(fleet, gateway):
        turn = await fleet.post("/v1/chat/completions", HELLO)
        assert turn.status == 502
        assert "10.1.2.3" not in json.dumps(turn.body)
        assert set(turn.body["error"]) == {"message", "type", "param", "code"}


async def test_comments_are_no_answer(start_fleet: Any) -> None:
    async def chatter(request: web.Request) -> web.StreamResponse:
        return await events(request, *[b": keep-alive\n\n"] * 200, then=0.02)

    async with start_fleet("", attempts=1, first_event_timeout_s=0.2) as fleet, odd_worker(fleet, chatter):
        turn = await fleet.post("/v1/chat/completions", {**HELLO, "stream": True})
        assert turn.status == 504


async def test_a_flood_of_comments_is_no_answer(start_fleet: Any) -> None:
    async def chatter(request: web.Request) -> web.StreamResponse:
        return await events(request, *[b": keep-alive\n\n" * 50_000] * 20)

    async with start_fleet("", attempts=1) as fleet, odd_worker(fleet, chatter):
        turn = await fleet.post("/v1/chat/completions", {**HELLO, "stream": True})
        assert turn.status == 502


@pytest.mark.parametrize("stream", [False, True])
async def test_a_workers_nan_is_its_own_business(start_fleet: Any, stream: bool) -> None:
    part = b'{"id":"x","choices":[{"index":0,"%b":{"content":"hi"},"logprobs":NaN,"finish_reason":"stop"}],%b}'
    usage = b'"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":NaN}'

    async def odd(request: web.Request) -> web.StreamResponse:
        if stream:
            return await events(request, b"data: " + part % (b"delta", usage) + b"\n\n", b"data: [DONE]\n\n")
        return web.Response(body=part % (b"message", usage), content_type="application/json")

    async with start_fleet("", attempts=1) as fleet, odd_worker(fleet, odd):
        body = {**HELLO, "stream": stream, "stream_options": {"include_usage": True}}
        async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as response:
            assert (response.status, b'"logprobs":NaN' in await response.read()) == (200, True)
        assert await fleet.metric('ppd_failures_total{cause="malformed",leg="local",phase="first event"}') == 0


async def test_an_answer_that_has_opened_may_take_longer_for_its_first_token(start_fleet: Any) -> None:
    def chunk(**delta: str) -> bytes:
        return b"data: " + json.dumps({"id": "x", "choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"

    async def slow(request: web.Request) -> web.StreamResponse:
        return await events(request, chunk(role="assistant"), chunk(content="hi"), b"data: [DONE]\n\n", then=0.5)

    async with start_fleet("", attempts=1, first_event_timeout_s=0.2) as fleet, odd_worker(fleet, slow):
        url = f"{fleet.base_url}/v1/chat/completions"
        async with fleet.session.post(url, json={**HELLO, "stream": True}) as response:
            assert response.status == 200
            assert b"[DONE]" in await response.read()


ABORTED = {"id": "x", "choices": [{"index": 0, "message": {"content": ""}, "finish_reason": "abort"}], "usage": None}


@pytest.mark.parametrize("body", [json.dumps(ABORTED), "\x00garbage", ""], ids=["aborted", "garbage", "empty"])
async def test_a_200_that_is_no_answer_is_tried_elsewhere(start_fleet: Any, body: str) -> None:
    async def stopping(_: web.Request) -> web.StreamResponse:
        return web.Response(text=body, content_type="application/json")

    async with start_fleet("R1", mode=Mode.REPLICA) as fleet, odd_worker(fleet, stopping, "R"):
        turns = [await fleet.post("/v1/chat/completions", HELLO) for _ in range(8)]
        assert {turn.status for turn in turns} == {200}
        assert all(turn.body["choices"][0]["message"]["content"] for turn in turns)


async def test_a_stream_of_responses_that_fails_behind_its_opening_is_tried_elsewhere(start_fleet: Any) -> None:
    opening = (
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"r","status":"in_progress"}}\n\n'
    )
    failure = b'event: error\ndata: {"type":"error","message":"KV load failed","code":"500"}\n\n'

    async def failing(request: web.Request) -> web.StreamResponse:
        return await events(request, opening, failure)

    async with start_fleet("R1", mode=Mode.REPLICA) as fleet, odd_worker(fleet, failing, "R"):
        body = {"model": "sim", "input": "hi", "max_output_tokens": 8, "stream": True}
        for _ in range(8):
            async with fleet.session.post(f"{fleet.base_url}/v1/responses", json=body) as response:
                text = await response.text()
            assert response.status == 200
            assert "KV load failed" not in text
            assert text.rpartition("event: ")[2].startswith(("response.completed", "response.incomplete"))


async def test_more_failing_ps_than_attempts_still_leave_the_turn_to_d(start_fleet: Any) -> None:
    async with start_fleet("P1 P2 P3 P4 D1", attempts=2) as fleet:
        for name in ("P1", "P2", "P3", "P4"):
            fleet.engines[name].faults = Faults(refuse=100, refuse_status=500)
        turn = await fleet.conversation().say("hi")
        assert (turn.status, turn.route, turn.reason) == (200, "LOCAL", "no_prefill_worker")


async def test_a_d_that_cannot_load_kv_computes_the_prompt_itself(start_fleet: Any) -> None:
    async with start_fleet("P1 D1") as fleet:
        fleet.engines["D1"].faults = Faults(refuse=1, refuse_status=500)
        turn = await fleet.conversation().say("hi")
        assert (turn.status, turn.route, turn.reason) == (200, "LOCAL", "no_prefill_worker")


async def test_a_whole_answer_that_takes_too_long_is_not_computed_again(start_fleet: Any) -> None:
    async with start_fleet("D1 D2", answer_timeout_s=0.2, connect_timeout_s=0.2) as fleet:
        for engine in fleet.engines.values():
            engine.faults = Faults(hang=10)
        assert (await fleet.conversation().say("hi")).status == 504
        assert sum(len(engine.received) for engine in fleet.engines.values()) == 1


async def test_pass_through_is_spread_over_idle_workers(start_fleet: Any) -> None:
    asked: list[str] = []

    def slow(name: str) -> Handler:
        async def answer(_: web.Request) -> web.StreamResponse:
            asked.append(name)
            await asyncio.sleep(1.0)
            return web.Response(text="{}", content_type="application/json")

        return answer

    async with start_fleet("") as fleet, odd_worker(fleet, slow("a"), "R"), odd_worker(fleet, slow("b"), "R"):
        await asyncio.gather(*(fleet.post("/v1/embeddings", {"model": "sim", "input": "x"}) for _ in range(20)))
        assert asked.count("a") == asked.count("b") == 10


async def test_a_client_that_stops_reading_is_let_go(start_fleet: Any) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        chunk = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 60_000 + b'"}}]}\n\n'
        return await events(request, *[chunk] * 2000)

    async with start_fleet("", idle_timeout_s=0.3) as fleet, odd_worker(fleet, endless):
        body = json.dumps({**HELLO, "stream": True}).encode()
        port = int(fleet.base_url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += b"Content-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await writer.drain()
        views = fleet.proxy.state.registry.views
        await fleet.until(lambda: any(view.inflight for view in views()))
        await fleet.until(lambda: not any(view.inflight for view in views()))
        assert (await fleet.admin("GET", "/requests"))[1]["newest"][0]["outcome"] != "completed"
        writer.close()


async def test_an_edited_config_leaves_its_workers_serving(start_fleet: Any, tmp_path: Any) -> None:
    async with start_fleet("D1") as fleet:
        file = tmp_path / "ppd.toml"
        file.write_text(f'workers = ["D={fleet.engines["D1"].address}"]\n')
        settings = Settings(build(file, {}), ConfigSource(file, {}))
        assert fleet.proxy.settings is not settings
        before = fleet.states()
        status, _ = await fleet.admin("POST", "/workers", {"worker": f"D={fleet.engines['D1'].address}"})
        assert status == 201
        assert fleet.states() == before == {"D1": "up"}


async def test_a_worker_with_an_impossible_name_does_not_stop_the_probing_of_others(start_fleet: Any) -> None:
    async with start_fleet("") as fleet:
        status, answer = await fleet.admin("POST", "/workers", {"worker": "D=a..b:80"})
        assert (status, answer["error"]["param"]) == (400, "workers")
        await fleet.add("D1")
        async with aiohttp.ClientSession() as session, session.get(f"{fleet.base_url}/ready") as response:
            assert response.status == 200


async def test_a_d_that_counts_what_it_pulled_as_cached_is_corrected_by_p(start_fleet: Any) -> None:
    """vLLM before 0.31: after a handoff D reports the whole prompt as cached."""
    usage = {"prompt_tokens": 30, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 30}}
    choice = {"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}

    async def old(_: web.Request) -> web.StreamResponse:
        return web.json_response({"id": "x", "choices": [choice], "usage": usage})

    async with start_fleet("P1") as fleet, odd_worker(fleet, old):
        turn = await fleet.conversation().say("a prompt that P has never seen")
        assert (turn.status, turn.route) == (200, "SPLIT")
        assert turn.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await fleet.receipt(turn))["cached_tokens"] == 0
