"""What is served beside conversations: pass-through, errors, the operator's endpoints."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import aiohttp
import pytest

from ppd.proxy.config import Mode
from ppd.proxy.runtime.loop_watch import TICK_S


@pytest.mark.parametrize(
    ("path", "body", "has"),
    [
        ("/v1/embeddings", {"model": "sim", "input": "text"}, "data"),
        ("/tokenize", {"model": "sim", "prompt": "text"}, "tokens"),
        ("/detokenize", {"model": "sim", "tokens": [116, 101]}, "prompt"),
        ("/v1/rerank", {"model": "sim", "query": "q", "documents": ["a", "b"]}, "results"),
        ("/v1/score", {"model": "sim", "text_1": "a", "text_2": "b"}, "data"),
        ("/classify", {"model": "sim", "input": "text"}, "data"),
        ("/pooling", {"model": "sim", "input": "text"}, "data"),
    ],
)
async def test_other_endpoints_are_passed_through(start_fleet: Any, path: str, body: Any, has: str) -> None:
    async with start_fleet("P1 D1 R1") as fleet:
        turn = await fleet.post(path, body)
        assert turn.status == 200
        assert has in turn.body


async def test_multipart_bodies_arrive_as_they_were_sent(start_fleet: Any) -> None:
    data = bytes(range(256)) * 400
    async with start_fleet("R1") as fleet:
        form = aiohttp.FormData()
        form.add_field("model", "sim")
        form.add_field("file", data, filename="a.wav", content_type="audio/wav")
        async with fleet.session.post(f"{fleet.base_url}/v1/audio/transcriptions", data=form) as response:
            assert response.status == 200
            assert hashlib.sha256(data).hexdigest()[:8] in await response.text()


async def test_a_model_nobody_serves_is_told_so(start_fleet: Any) -> None:
    async with start_fleet("P1 D1") as fleet:
        body = {"model": "other", "input": "x", "messages": [{"role": "user", "content": "x"}]}
        for path in ("/v1/embeddings", "/v1/chat/completions"):
            turn = await fleet.post(path, body)
            assert (turn.status, turn.body["error"]["code"]) == (404, "model_not_found")
            assert "other" in turn.body["error"]["message"]


async def test_models_lists_each_model_once(start_fleet: Any) -> None:
    async with start_fleet("P1 D1 R1") as fleet, fleet.session.get(f"{fleet.base_url}/v1/models") as response:
        assert [card["id"] for card in (await response.json())["data"]] == ["sim"]


@pytest.mark.parametrize(
    ("path", "data", "status", "param"),
    [
        ("/v1/chat/completions", b"{", 400, None),
        ("/v1/chat/completions", b"[]", 400, None),
        ("/v1/chat/completions", b"{}", 400, "model"),
        ("/v1/chat/completions", b'{"model":"sim"}', 400, "messages"),
        ("/v1/nothing", b"{}", 404, None),
        ("/health", b"{}", 405, None),
    ],
)
async def test_errors_have_openais_shape(
    start_fleet: Any, path: str, data: bytes, status: int, param: str | None
) -> None:
    async with start_fleet("D1") as fleet:
        headers = {"Content-Type": "application/json"}
        response = await fleet.session.post(fleet.base_url + path, data=data, headers=headers)
        assert response.status == status
        error = (await response.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param


async def test_a_405_says_which_methods_the_path_has(start_fleet: Any) -> None:
    async with start_fleet("D1") as fleet, fleet.session.get(f"{fleet.base_url}/v1/chat/completions") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["error"]["message"] == "/v1/chat/completions takes only POST"


async def test_a_body_over_the_limit_is_refused(start_fleet: Any) -> None:
    async with start_fleet("D1", body_limit_bytes=1000) as fleet:
        turn = await fleet.post("/v1/chat/completions", {"model": "sim", "messages": ["x" * 2000]})
        assert turn.status == 413
        assert "1000" in turn.body["error"]["message"]


async def test_health_is_the_process_and_ready_is_the_fleet(start_fleet: Any) -> None:
    async with start_fleet("") as fleet:

        async def ask(path: str) -> tuple[int, str]:
            async with fleet.session.get(fleet.base_url + path) as response:
                return response.status, await response.text()

        assert (await ask("/health"))[0] == 200
        assert (await ask("/ready"))[0] == 503
        await fleet.add("P1")
        assert (await ask("/ready"))[0] == 503
        await fleet.add("D1")
        status, body = await ask("/ready")
        assert status == 200
        assert '"split":true' in body


def stand_still() -> None:
    time.sleep(2 * TICK_S)


async def test_health_and_ready_tell_that_the_loop_stood_still(
    start_fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_fleet("R1") as fleet:

        async def ask(path: str) -> tuple[int, float]:
            async with fleet.session.get(fleet.base_url + path) as response:
                return response.status, (await response.json())["loop_lag_s"]

        stand_still()
        assert (await ask("/health"))[1] >= TICK_S / 2
        status, lag_s = await ask("/ready")
        assert (status, lag_s >= TICK_S / 2) == (200, True)
        monkeypatch.setattr("ppd.proxy.app.client_routes.LAG_LIMIT_S", TICK_S / 2)
        assert (await ask("/ready"))[0] == 503
        assert (await ask("/health"))[0] == 200, "it runs"
        assert await fleet.metric("ppd_loop_lag_seconds_sum") >= TICK_S / 2


async def test_the_admin_api_needs_its_key(start_fleet: Any) -> None:
    async with start_fleet("D1") as fleet:
        assert (await fleet.admin("GET", "/workers"))[0] == 200
        assert (await fleet.admin("GET", "/workers", key="guess"))[0] == 401
        assert (await fleet.admin("GET", "/workers", key=""))[0] == 401
    async with start_fleet("", admin_key="") as fleet:
        assert (await fleet.admin("GET", "/workers", key=""))[0] == 404


async def test_weights_change_the_next_decision(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", mode=Mode.TABLE, table="h100-llama-3.1-8b-1P_3D") as fleet:
        chat = fleet.conversation()
        await chat.say("A first message that is long enough to be worth something.")
        assert (await chat.say("And on.")).reason == "table_local"
        assert (await fleet.admin("PUT", "/weights", {"w_ttft": 0}))[0] == 200
        assert (await chat.say("And on.")).reason == "table_split"
        for wrong in ({"w_ttft": -1}, {"w_tpot": 0}):
            status, answer = await fleet.admin("PUT", "/weights", wrong)
            assert (status, answer["error"]["param"]) == (400, "w_ttft")
        assert (await fleet.admin("GET", "/weights"))[1]["w_ttft"] == 0


@pytest.mark.parametrize("lookup", ["nearest", "interpolated"])
async def test_a_turn_says_how_its_verdict_was_found_and_on_what_evidence(start_fleet: Any, lookup: str) -> None:
    async with start_fleet("P1 D1", mode=Mode.TABLE) as fleet:
        assert (await fleet.admin("PUT", "/weights", {"lookup": lookup}))[1]["lookup"] == lookup
        chat = fleet.conversation()
        first = await chat.say("A first message that is long enough to be worth something.")
        assert "X-PPD-Evidence" not in first.headers
        turn = await chat.say("And on.")
        cell = (await fleet.receipt(turn))["cell"]
        assert cell["lookup"] == lookup
        # One conversation in the rate's window: fewer a second than were measured.
        assert turn.headers["X-PPD-Evidence"] == cell["evidence"] == "extrapolated"


async def test_metrics_count_turns_by_route_and_reason(start_fleet: Any) -> None:
    async with start_fleet("P1 D1") as fleet:
        chat = fleet.conversation()
        await chat.say("one", stream=False)
        await chat.say("two")
        assert await fleet.metric('ppd_turns_total{reason="first_turn",route="SPLIT"}') == 1
        assert await fleet.metric('ppd_turns_total{reason="mode_always_local",route="LOCAL"}') == 1
        assert await fleet.metric('ppd_workers{role="D",state="up"}') == 1
        assert await fleet.metric("ppd_sessions") == 1
        assert await fleet.metric("ppd_handoffs_outstanding") == 0


async def test_sessions_and_receipts_are_listed_without_text(start_fleet: Any) -> None:
    async with start_fleet("P1 D1") as fleet:
        turn = await fleet.conversation().say("a secret thought")
        _, sessions = await fleet.admin("GET", "/sessions")
        _, receipts = await fleet.admin("GET", "/requests")
        assert sessions["count"] == 1
        (listed,) = sessions["newest"]
        assert (listed["prefill"], listed["decode"]) == ("P1", "D1")
        assert (await fleet.admin("GET", f"/sessions/{listed['session_id']}"))[1]["decode"] == "D1"
        assert receipts["newest"][0]["id"] == turn.headers["X-Request-Id"]
        assert "secret" not in str(sessions) + str(receipts)
        assert (await fleet.admin("GET", "/requests/unknown"))[0] == 404


async def test_a_harmless_request_id_of_the_client_is_kept(start_fleet: Any) -> None:
    async with start_fleet("D1") as fleet:
        kept = await fleet.conversation(X_Request_Id="mine-1").say("hi")
        replaced = await fleet.conversation(X_Request_Id="___prefill_addr_a b").say("hi")
        assert kept.headers["X-Request-Id"] == "mine-1"
        assert "prefill" not in replaced.headers["X-Request-Id"]


async def test_workers_answer_with_their_own_key(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", engine={"api_key": "inner"}, worker_api_key="inner") as fleet:
        assert (await fleet.conversation(Authorization="Bearer outer").say("hi")).status == 200
