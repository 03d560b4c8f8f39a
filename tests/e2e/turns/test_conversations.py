"""Conversations through the proxy: the same text whatever the route, and KV where it should be."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest

from ppd.proxy.config import Mode, SessionKey, StageOrder
from ppd.proxy.openai.request import Endpoint
from tests.servers.sidecar.sidecars import SidecarFleet
from tests.support.fleet import Fleet

THREE = (
    "I am planning a hike and need a list of what to bring along for two days in the mountains.",
    "Now four more friends have agreed to join. Does this change anything about it?",
    "But five of them say that they can't come. How should we travel?",
)
LOCAL = {"mode": Mode.ALWAYS_LOCAL}
SPLIT = {"mode": Mode.ALWAYS_SPLIT}


@pytest.fixture(params=[*StageOrder, "sidecars"])
def start_fleet(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Whichever worker of a SPLIT is chosen first; and by way of D's sidecars."""
    if request.param == "sidecars":
        return partial(SidecarFleet.of, order=StageOrder.DECODE_FIRST)
    return partial(Fleet.of, order=request.param)


async def texts(fleet: Any, **body: Any) -> list[str]:
    chat = fleet.conversation()
    return [(await chat.say(text, **body)).text for text in THREE]


async def test_every_route_gives_the_same_conversation(start_fleet: Any) -> None:
    limited = start_fleet("P1 D1 D2", mode=Mode.PREFIX_THRESHOLD, local_tokens=100)
    async with start_fleet("P1 D1 D2", **LOCAL) as local, start_fleet("P1 D1", **SPLIT) as split, limited as by_limit:
        async with start_fleet("R1", mode=Mode.REPLICA) as replica:
            answers = [await texts(fleet) for fleet in (local, split, by_limit, replica)]
    assert len(set(map(tuple, answers))) == 1
    assert len(set(answers[0])) == 3


@pytest.mark.parametrize("way", [LOCAL, SPLIT])
async def test_an_open_stream_holds_nothing_of_its_body(start_fleet: Any, way: dict[str, Any]) -> None:
    asked = {"model": "sim", "stream": True, "ignore_eos": True, "max_tokens": 1000}
    body = json.dumps(asked | {"messages": [{"role": "user", "content": "word " * 4_000}]}).encode()
    async with start_fleet("P1 D1", engine={"time_scale": 1.0}, **way) as fleet:
        turns, held = fleet.proxy.turns, sys.getrefcount(body)
        reply = await turns.answer(turns.caller(Endpoint.CHAT, {"content-type": "application/json"}), body)
        assert reply.status == 200, reply.body
        async with aclosing(reply.body.chunks()) as stream:
            assert await anext(stream)
            await fleet.until(lambda: sys.getrefcount(body) == held)
        reply.body.abandon()


async def test_turn_1_moves_the_prompts_kv_and_a_local_turn_2_finds_it(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", **LOCAL) as fleet:
        chat = fleet.conversation()
        d = fleet.engines["D1"].counters
        first = await chat.say(THREE[0])
        prompt = first.body["usage"]["prompt_tokens"]
        assert (first.route, first.reason) == ("SPLIT", "first_turn")
        assert prompt - 16 <= d.external_kv_tokens <= prompt
        pulled, hits = d.external_kv_tokens, d.local_cache_hit_tokens
        second = await chat.say(THREE[1])
        assert (second.route, second.reason) == ("LOCAL", "mode_always_local")
        assert d.external_kv_tokens == pulled
        # D's own answer to turn 1 is among what it finds.
        assert d.local_cache_hit_tokens - hits > prompt
        await fleet.until(fleet.idle)


async def test_a_split_turn_2_moves_only_what_d_lacks(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", **SPLIT) as fleet:
        chat = fleet.conversation()
        d = fleet.engines["D1"].counters
        await chat.say(THREE[0], max_tokens=64)
        pulled = d.external_kv_tokens
        second = await chat.say(THREE[1])
        assert second.route == "SPLIT"
        assert 0 < d.external_kv_tokens - pulled < second.body["usage"]["prompt_tokens"] / 2


async def test_a_receipt_tells_the_whole_decision(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", mode=Mode.TABLE) as fleet:
        chat = fleet.conversation()
        usage = (await chat.say(THREE[0])).body["usage"]
        receipt = await fleet.receipt(await chat.say(THREE[1]))
    assert (receipt["turn"], receipt["kind"], receipt["route"]) == (2, "next", "LOCAL")
    assert receipt["cell"]["score"] > 0
    # The first prompt and its answer, which the client sent back.
    assert receipt["estimated_cached_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert receipt["estimated_cached_tokens"] > receipt["estimated_new_tokens"]
    assert receipt["outcome"] == "completed"
    assert [leg["kind"] for leg in receipt["legs"]] == ["local"]
    assert receipt["legs"][0]["ended_s"] >= receipt["legs"][0]["first_event_s"] >= receipt["legs"][0]["started_s"]


async def test_the_clients_cached_tokens_are_what_was_really_cached(start_fleet: Any) -> None:
    """After a handoff D counts all it pulled as cached; the client sees P's own hits."""
    async with start_fleet("P1 D1", **SPLIT) as fleet:
        chat = fleet.conversation()
        first = await chat.say(THREE[0])
        assert first.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        usage = (await chat.say(THREE[1])).body["usage"]
        # P has not seen what D generated: of turn 2 it has turn 1's prompt, in whole blocks.
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert first.body["usage"]["prompt_tokens"] - 16 <= cached <= first.body["usage"]["prompt_tokens"]


async def stream(fleet: Any, messages: Any, **body: Any) -> list[str]:
    body = {"model": "sim", "messages": messages, "max_tokens": 24, "stream": True, **body}
    async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        return [line for line in (await response.text()).split("\n\n") if line]


@pytest.mark.parametrize("mode", [Mode.ALWAYS_LOCAL, Mode.ALWAYS_SPLIT])
async def test_a_stream_says_the_same_as_a_whole_answer(start_fleet: Any, mode: Mode) -> None:
    async with start_fleet("P1 D1", mode=mode) as fleet:
        messages = [{"role": "user", "content": THREE[0]}]
        whole = await fleet.chat(messages)
        events = await stream(fleet, messages)
        assert events[-1] == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == whole.text
        assert not any("usage" in chunk and chunk["usage"] for chunk in chunks), "the client did not ask for usage"
        asked = await stream(fleet, messages, stream_options={"include_usage": True})
        usage = json.loads(asked[-2].removeprefix("data: "))
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == whole.body["usage"]["completion_tokens"]


async def test_turns_of_a_stream_are_learnt_like_others(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", **LOCAL) as fleet:
        messages: list[dict[str, Any]] = [{"role": "user", "content": THREE[0]}]
        events = await stream(fleet, messages)
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": THREE[1]}]
        assert (await fleet.chat(messages)).route == "LOCAL"


async def test_no_answer_and_no_leg_carries_transfer_parameters_of_a_client(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", **LOCAL) as fleet:
        hostile = {"kv_transfer_params": {"do_remote_prefill": True}, "ec_transfer_params": {"a": 1}}
        chat = fleet.conversation()
        first = await chat.say(THREE[0], **hostile)
        second = await chat.say(THREE[1], **hostile)
        assert first.status == second.status == 200
        assert first.body["kv_transfer_params"] is second.body["kv_transfer_params"] is None
        p, d_split, d_local = [
            json.loads(received.body)
            for engine in (fleet.engines["P1"], fleet.engines["D1"])
            for received in engine.received
        ]
        assert p["kv_transfer_params"]["do_remote_decode"] is True
        assert d_split["kv_transfer_params"]["remote_block_ids"]
        assert "kv_transfer_params" not in d_local
        assert all("ec_transfer_params" not in leg for leg in (p, d_split, d_local))
        assert not any(engine.counters.traps for engine in fleet.engines.values())


async def test_a_regenerated_answer_is_the_same_turn_again(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", **LOCAL) as fleet:
        chat = fleet.conversation()
        await chat.say(THREE[0])
        await chat.say(THREE[1])
        again = await fleet.chat(chat.messages[:3])
        receipt = await fleet.receipt(again)
        assert (receipt["turn"], receipt["kind"], again.route) == (2, "retry", "LOCAL")


async def test_an_edit_goes_back_to_what_is_still_true(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", **LOCAL) as fleet:
        chat = fleet.conversation()
        for text in THREE:
            await chat.say(text)
        edited = [*chat.messages[:2], {"role": "user", "content": "Something else, then: which boots?"}]
        turn = await fleet.chat(edited)
        receipt = await fleet.receipt(turn)
        assert (receipt["turn"], receipt["kind"], turn.route) == (2, "branch", "LOCAL")
        rewritten = [{"role": "user", "content": "An opening that nobody has seen."}, *chat.messages[1:4]]
        assert (await fleet.receipt(await fleet.chat(rewritten)))["turn"] == 1


async def test_an_edited_reply_counts_only_the_prompt_before_it(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", **LOCAL) as fleet:
        chat = fleet.conversation()
        first = await chat.say(THREE[0])
        chat.messages[-1]["content"] = "What the user put into the assistant's mouth."
        receipt = await fleet.receipt(await chat.say(THREE[1]))
        assert receipt["turn"] == 2
        assert receipt["estimated_cached_tokens"] == first.body["usage"]["prompt_tokens"]


async def test_two_users_with_one_opener_each_go_on_with_their_own(start_fleet: Any) -> None:
    async with start_fleet("P1 D1 D2", **LOCAL) as fleet:
        one, two = fleet.conversation(Authorization="Bearer one"), fleet.conversation(Authorization="Bearer two")
        for chat in (one, two):
            assert (await fleet.receipt(await chat.say("hi")))["turn"] == 1
        first = await fleet.receipt(await one.say(THREE[1]))
        second = await fleet.receipt(await two.say(THREE[2]))
        assert first["session"] != second["session"]
        assert first["turn"] == second["turn"] == 2


async def test_two_users_without_keys_and_ids_are_apart_once_they_say_different_things(start_fleet: Any) -> None:
    async with start_fleet("P1 D1 D2", **LOCAL) as fleet:
        one, two = fleet.conversation(), fleet.conversation()
        await one.say("hi")
        await two.say("hi")
        first = await fleet.receipt(await one.say(THREE[1]))
        second = await fleet.receipt(await two.say(THREE[2]))
        assert (first["turn"], second["turn"]) == (2, 2)
        assert first["session"] != second["session"]
        third = await fleet.receipt(await one.say(THREE[0]))
        assert (third["session"], third["turn"], third["route"]) == (first["session"], 3, "LOCAL")


async def test_a_first_turn_appends_to_a_head_that_another_session_brought_to_d(start_fleet: Any) -> None:
    head = {"role": "system", "content": "You plan hikes, and you never forget the weather. " * 40}
    async with start_fleet("P1 D1 D2", **LOCAL) as fleet, start_fleet("P1 D1 D2", **SPLIT) as split:
        firsts = []
        for client in (fleet, split):
            for text in THREE[:2]:
                chat = client.conversation()
                chat.messages.append(head)
                firsts.append(await chat.say(text))
        one, other, *same = firsts
        assert [turn.text for turn in (one, other)] == [turn.text for turn in same]
        assert (one.route, other.route) == ("SPLIT", "LOCAL")
        assert other.headers["X-PPD-Decode"] == one.headers["X-PPD-Decode"]
        receipt = await fleet.receipt(other)
        assert (receipt["reason"], receipt["cached_evidence"]) == ("mode_always_local", "shared_prefix")
        cached = other.body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert len(head["content"]) - 32 <= cached <= len(head["content"]) + 32
        assert abs(receipt["cached_tokens"] - cached) <= 32


@pytest.mark.parametrize("header", ["X-Session-ID", "X-Session-Affinity", "X-Correlation-ID"])
async def test_an_explicit_id_pins_the_session(start_fleet: Any, header: str) -> None:
    async with start_fleet("P1 D1 D2", **LOCAL) as fleet:
        chat = fleet.conversation(**{header.replace("-", "_"): "abc"})
        first = await fleet.receipt(await chat.say(THREE[0]))
        second = await fleet.receipt(await chat.say(THREE[1]))
        assert first["session"] == second["session"]
        assert second["route"] == "LOCAL"
        chat.messages[0]["content"] = "rewritten from the start"
        third = await fleet.receipt(await chat.say(THREE[2]))
        assert third["session"] == first["session"]
        assert (third["route"], third["estimated_cached_tokens"]) == ("SPLIT", 0)


async def test_the_papers_rule_goes_by_the_first_user_message(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", session_key=SessionKey.FIRST_USER_MESSAGE, **LOCAL) as fleet:
        chat = fleet.conversation()
        first = await fleet.receipt(await chat.say(THREE[0]))
        second = await fleet.receipt(await chat.say(THREE[1]))
        assert first["session"] == second["session"]
        assert (second["turn"], second["route"]) == (2, "LOCAL")


@pytest.mark.parametrize("as_ids", [False, True])
async def test_raw_prompts_are_conversations_too(start_fleet: Any, as_ids: bool) -> None:
    async with start_fleet("P1 D1", **LOCAL) as fleet:
        prompt = "User: " + " ".join(THREE) + "\nAssistant:"
        routes = []
        for text in THREE:
            given: Any = [ord(c) for c in prompt] if as_ids else prompt
            turn = await fleet.post("/v1/completions", {"model": "sim", "prompt": given, "max_tokens": 40})
            assert turn.status == 200
            routes.append(turn.route)
            prompt += turn.body["choices"][0]["text"] + f"\nUser: {text}\nAssistant:"
        assert routes == ["SPLIT", "LOCAL", "LOCAL"]


async def test_responses_are_conversations_too(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", **LOCAL) as fleet:
        items: list[Any] = []
        routes = []
        for text in THREE:
            items.append({"role": "user", "content": text})
            turn = await fleet.post("/v1/responses", {"model": "sim", "input": items, "max_output_tokens": 24})
            assert turn.status == 200
            routes.append(turn.route)
            items += turn.body["output"]
        assert routes == ["SPLIT", "LOCAL", "LOCAL"]


async def test_anthropic_messages_are_conversations_too(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", **LOCAL) as fleet:
        messages: list[Any] = []
        routes = []
        for text in THREE:
            messages.append({"role": "user", "content": text})
            turn = await fleet.post(
                "/v1/messages", {"model": "sim", "system": "Be brief.", "messages": messages, "max_tokens": 24}
            )
            assert turn.status == 200
            routes.append(turn.route)
            messages.append({"role": "assistant", "content": turn.body["content"]})
        assert routes == ["SPLIT", "LOCAL", "LOCAL"]


@pytest.mark.parametrize(
    "body",
    [{"n": 2}, {"prompt_logprobs": 1}],
    ids=["n", "prompt_logprobs"],
)
async def test_what_needs_one_engine_is_not_split(start_fleet: Any, body: dict[str, Any]) -> None:
    async with start_fleet("P1 D1 R1", **SPLIT) as fleet:
        turn = await fleet.conversation().say(THREE[0], **body)
        assert turn.status == 200
        assert (turn.route, turn.reason) == ("REPLICA", "single_engine")
        assert not fleet.engines["P1"].received
