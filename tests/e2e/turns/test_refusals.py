"""What workers refuse: whose fault it is, what it leaves behind, and how little of it a client may see."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from ppd.proxy.config import Mode
from ppd.servers.sim.core.fault_orders import FaultKind, Faults, Order
from tests.support.credentials import bearer, client, write_keys
from tests.support.scripted_workers import odd_worker

LONG = "A message of some length, so that there are blocks to move. " * 20


@pytest.mark.parametrize("stream", [False, True])
async def test_a_d_that_repeats_what_it_was_asked_tells_the_client_nothing(start_fleet: Any, stream: bool) -> None:
    asked: list[dict[str, Any]] = []

    async def repeats(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body.get("kv_transfer_params"))
        return web.json_response({"error": {"message": f"bad: {json.dumps(body)}", "code": 400}}, status=400)

    async with start_fleet("P1") as fleet, odd_worker(fleet, repeats):
        turn = await fleet.conversation().say(LONG, stream=stream)
        assert asked[0]["remote_engine_id"]
        assert turn.status == 400
        shown = json.dumps(turn.body)
        assert not any(str(value) in shown for value in asked[0].values() if isinstance(value, str) and value)


FIRST = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"so far"}}]}\n\n'


@pytest.mark.parametrize("names", ["remote_engine_id", "remote_host", "address"])
@pytest.mark.parametrize("form", ["whole", "first event", "mid-stream"])
async def test_an_error_in_an_answer_of_200_names_nobody(start_fleet: Any, form: str, names: str) -> None:
    told = list[str]()

    async def names_its_peers(request: web.Request) -> web.StreamResponse:
        known = {**(await request.json())["kv_transfer_params"], "address": request.host}
        told.append(str(known[names]))
        error = {"error": {"message": f"lost {told[0]}", "type": "BadRequestError", "code": 422}}
        if form == "whole":
            return web.json_response(error)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        begun = FIRST if form == "mid-stream" else b""
        await answer.write(begun + b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
        return answer

    async with start_fleet("P1") as fleet, odd_worker(fleet, names_its_peers):
        body = {"model": "sim", "messages": [{"role": "user", "content": LONG}], "stream": form != "whole"}
        async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as answer:
            text = await answer.text()
        assert told[0] not in text
        assert answer.status == (200 if form == "mid-stream" else 422)
        assert '"error"' in text and "[DONE]" not in text
        assert ("so far" in text) == (form == "mid-stream")


async def test_a_key_of_the_proxys_own_is_not_the_clients_fault(start_fleet: Any) -> None:
    async with start_fleet("", mode=Mode.REPLICA, worker_api_key="right") as fleet:
        await fleet.add("R1", api_key="right")
        await fleet.add("R2", api_key="right")
        fleet.engines["R2"].faults = Faults([Order(FaultKind.ERROR, status=401, times=100)])
        for number in range(200):  # the third that R2 is given opens its breaker
            assert (await fleet.conversation().say(f"{number}")).status == 200
            if fleet.engines["R2"].address in fleet.proxy.state.health.breakers.states(fleet.proxy.state.now()):
                break
        else:
            pytest.fail("a worker that refuses the proxy's own key counts as well")


async def test_overload_counts_as_no_failure_and_is_not_for_ever(start_fleet: Any) -> None:
    async with start_fleet("D1 D2", queue_timeout_s=0.3) as fleet:
        for engine in fleet.engines.values():
            order = Order(FaultKind.ERROR, status=503, retry_after_s=86_400, times=100)
            engine.faults = Faults([order])
        budget, now_s = fleet.proxy.state.retries.tokens, fleet.proxy.state.now()
        assert (await fleet.conversation().say("hi")).status == 503
        assert fleet.proxy.state.retries.tokens == budget - 1, "for the other worker; to wait costs nothing"
        assert fleet.proxy.state.health.breakers.blocked(fleet.proxy.state.now())
        assert not fleet.proxy.state.health.breakers.blocked(now_s + 65.0)


async def test_a_list_of_prompts_counts_as_its_prompts_for_its_key(start_fleet: Any, tmp_path: Any) -> None:
    keys = write_keys(tmp_path / "keys.toml", client("a", requests_per_minute=10))
    async with start_fleet("P1 D1", keys_file=keys) as fleet:
        body = {"model": "sim", "prompt": ["one", "two", "three", "four", "five"], "max_tokens": 2}
        answers = [await fleet.post("/v1/completions", body, bearer("a")) for _ in range(4)]
        assert [turn.status for turn in answers] == [200, 200, 429, 429]
        assert len(answers[0].body["choices"]) == 5
        assert await fleet.metric('ppd_rate_limited_total{reason="requests_per_minute"}') == 2


@pytest.mark.parametrize(("given", "status"), [("0", 503), ("0.2", 503), ("x", 400), ("-1", 400), ("nan", 400)])
async def test_a_client_says_how_long_it_waits(start_fleet: Any, given: str, status: int) -> None:
    async with start_fleet("D1", max_inflight=1, engine={"time_scale": 1.0}) as fleet:
        body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20_000, "stream": True}
        async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as busy:
            assert busy.status == 200
            late = await fleet.post("/v1/chat/completions", body, {"X-PPD-Queue-Timeout": given})
            assert late.status == status
        await fleet.until(fleet.idle)
