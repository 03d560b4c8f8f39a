"""A route that a measurement forces on single requests: who may, what it does, and what else it must not change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppd.proxy.config import Mode
from tests.support.proxy import ADMIN_KEY, Chat

pytestmark = pytest.mark.e2e

LONG = "A message of some length, so that there are blocks to move. " * 20


def forcing(fleet: Any, route: str, key: str = ADMIN_KEY, **headers: str) -> Chat:
    chat: Chat = fleet.conversation(X_PPD_Force_Route=route, **headers)
    chat.headers |= {"X-Admin-Key": key} if key else {}
    return chat


async def test_both_arms_are_measured_on_one_deployment(start_fleet: Any) -> None:
    async with start_fleet("P1 D1 R1", mode=Mode.TABLE) as fleet:
        chat = forcing(fleet, "SPLIT")
        assert (await chat.say(LONG)).reason == "forced"
        for route in ("LOCAL", "SPLIT", "REPLICA", "SPLIT", "LOCAL"):
            chat.headers["X-PPD-Force-Route"] = route
            turn = await chat.say("and on")
            assert (turn.status, turn.route, turn.reason) == (200, route, "forced")
            assert "X-PPD-Evidence" not in turn.headers
            receipt = await fleet.receipt(turn)
            assert (receipt["forced"], receipt["wanted"], receipt["cell"]) == (route, route, None)
        del chat.headers["X-PPD-Force-Route"]
        turn = await chat.say("and now as you like")
        receipt = await fleet.receipt(turn)
        assert (turn.reason, receipt["turn"], receipt["kind"], receipt["forced"]) == ("table_local", 7, "next", "")


async def test_the_first_turn_is_never_local_and_says_why(start_fleet: Any) -> None:
    async with start_fleet("P1 D1") as fleet:
        turn = await forcing(fleet, "LOCAL").say(LONG)
        assert (turn.status, turn.route, turn.reason) == (200, "SPLIT", "not_resident")
        assert (await fleet.receipt(turn))["forced"] == "LOCAL"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("headers", [{}, {"X-Admin-Key": "guess"}, {"Authorization": f"Bearer {ADMIN_KEY}"}])
async def test_without_the_admin_key_nothing_is_asked(start_fleet: Any, path: str, headers: dict[str, str]) -> None:
    async with start_fleet("P1 D1") as fleet:
        body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "input": "hi", "max_tokens": 4}
        turn = await fleet.post(path, body, {"X-PPD-Force-Route": "SPLIT", **headers})
        assert turn.status == 403
        assert "X-PPD-Force-Route" in turn.body["error"]["message"]
        assert turn.body["error"].get("param") == (None if path == "/v1/messages" else "X-PPD-Force-Route")
        assert ADMIN_KEY not in json.dumps(turn.body)
        assert not any(engine.received for engine in fleet.engines.values())
        assert len(fleet.proxy.state.sessions) == 0


async def test_a_proxy_without_an_admin_key_forces_nothing(start_fleet: Any) -> None:
    async with start_fleet("", admin_key="") as fleet:
        assert (await forcing(fleet, "SPLIT", key="").say("hi")).status == 403
        assert (await forcing(fleet, "SPLIT", key="anything").say("hi")).status == 403


async def test_an_unknown_route_is_a_400(start_fleet: Any) -> None:
    async with start_fleet("P1 D1") as fleet:
        turn = await forcing(fleet, "SIDEWAYS").say("hi")
        assert (turn.status, turn.body["error"]["param"]) == (400, "X-PPD-Force-Route")
        assert not any(engine.received for engine in fleet.engines.values())


async def test_neither_header_reaches_a_worker_or_a_record(start_fleet: Any, tmp_path: Any, caplog: Any) -> None:
    log = tmp_path / "receipts.jsonl"
    with caplog.at_level("DEBUG"):
        async with start_fleet("P1 D1", receipt_log=str(log), log_level="debug") as fleet:
            chat = forcing(fleet, "SPLIT", Authorization="Bearer tenant")
            turns = [await chat.say(LONG), await chat.say("and on", stream=False)]
            assert {turn.status for turn in turns} == {200}
            received = [r for engine in fleet.engines.values() for r in engine.received]
            assert len(received) == 4
            for request in received:
                assert not {"x-admin-key", "x-ppd-force-route"} & {name.lower() for name in request.headers}
                assert request.headers["Authorization"] == "Bearer tenant"
    assert ADMIN_KEY not in log.read_text()
    assert ADMIN_KEY not in caplog.text


async def test_a_forced_conversation_is_the_tenants_own(start_fleet: Any) -> None:
    """The same history under the same key goes on, forced or not: the admin key names no tenant."""
    async with start_fleet("P1 D1") as fleet:
        chat = forcing(fleet, "SPLIT", Authorization="Bearer tenant")
        await chat.say(LONG)
        plain = fleet.conversation(Authorization="Bearer tenant")
        plain.messages = list(chat.messages)
        turn = await plain.say("and on")
        assert (turn.route, turn.reason) == ("LOCAL", "mode_always_local")
