"""What joins a turn to its workers' logs, and what of their answers' heads a client gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support.credentials import bearer, client, write_keys
from tests.support.scripted_workers import odd_worker

SAY = [{"role": "user", "content": "Something that is long enough for a few blocks. " * 4}]
CHUNK = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"so"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
WHOLE = {"id": "a", "choices": [{"index": 0, "message": {"content": "so"}, "finish_reason": "stop"}], "total_tokens": 1}
SHOWN = {"endpoint-load-metrics": "TEXT a=1", "server-timing": "gpu;dur=5", "x-ratelimit-limit-tokens": "7"}
HIDDEN = {"x-request-id": "the worker's", "x-own": "x", "set-cookie": "a=b", "x-ppd-route": "NONE"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_receipt_holds_the_ids_that_the_workers_log(start_fleet: Any, stream: bool) -> None:
    async with start_fleet("P1 D1") as fleet:
        body = {"model": "sim", "messages": SAY, "max_tokens": 4, "stream": stream}
        async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as answer:
            text, turn_id = await answer.text(), answer.headers["X-Request-Id"]
        _, receipt = await fleet.admin("GET", f"/requests/{turn_id}")
        logged = [fleet.engines[name].received[0].headers["X-Request-Id"] for name in ("P1", "D1")]
        assert [leg["id"] for leg in receipt["legs"]] == logged
        assert len({*logged, turn_id}) == 3
        assert f"chatcmpl-{logged[1]}" in text, "clients see it too"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_headers_that_matter_pass_and_no_others(start_fleet: Any, path: str, stream: bool) -> None:
    asked: list[str | None] = []

    async def says(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers.get("endpoint-load-metrics-format"))
        headers = {**SHOWN, **HIDDEN, "endpoint-load-metrics-at": request.host}
        if not stream:
            return web.json_response(WHOLE, headers=headers)
        answer = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(CHUNK)
        return answer

    async with start_fleet("") as fleet, odd_worker(fleet, says, "R"):
        body = {"model": "sim", "messages": SAY, "stream": stream}
        wanted = {"endpoint-load-metrics-format": "TEXT"}
        async with fleet.session.post(fleet.base_url + path, json=body, headers=wanted) as answer:
            assert answer.status == 200
            await answer.read()
        shown = {name.lower(): value for name, value in answer.headers.items()}
        assert SHOWN.items() <= shown.items()
        assert not HIDDEN.items() & shown.items()
        assert "endpoint-load-metrics-at" not in shown
        assert asked == ["TEXT"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_a_keys_own_limits_stand_in_place_of_a_workers(start_fleet: Any, tmp_path: Path, path: str) -> None:
    async def says(_: web.Request) -> web.StreamResponse:
        return web.json_response(WHOLE, headers=SHOWN)

    keys = write_keys(tmp_path / "keys.toml", client("one", tokens_per_minute=60_000))
    async with start_fleet("", keys_file=keys) as fleet, odd_worker(fleet, says, "R"):
        body = {"model": "sim", "messages": SAY}
        async with fleet.session.post(fleet.base_url + path, json=body, headers=bearer("one")) as answer:
            assert answer.status == 200
            assert answer.headers.getall("X-RateLimit-Limit-Tokens") == ["60000"]
            assert answer.headers["Server-Timing"] == SHOWN["server-timing"]
