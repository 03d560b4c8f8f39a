"""The project's main job on real engines: the same greedy text on every route, and KV where the route says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ppd.proxy.config import Mode
from ppd.proxy.fleet.worker import Role
from ppd.servers.vllm.launch import TINY_NAME

pytestmark = pytest.mark.asyncio(loop_scope="session")

THREE = (
    "I am planning a hike. If more than 15 friends join, we take a bus. How should we travel?",
    "Now 4 more friends agreed to join. Does this change our mode of transportation?",
    "But now five more friends say they can't join? How should we travel?",
)
BLOCK = 32  # tokens; what is cached and moved is whole blocks
serial = itertools.count()


def salted(**body: Any) -> dict[str, Any]:
    """A prefix cache of its own for each conversation, so that no test finds another's KV."""
    return {"cache_salt": f"salt-{next(serial)}", **body}


async def play(fleet: Any, mode: Mode) -> tuple[list[str], list[str]]:
    """Routes and texts of a conversation in this mode."""
    await fleet.mode(mode)
    chat, body = fleet.conversation(), salted(max_tokens=48)
    turns = [await chat.say(text, **body) for text in THREE]
    assert [turn.status for turn in turns] == [200] * 3
    return [turn.route for turn in turns], [turn.text for turn in turns]


async def test_three_greedy_turns_come_out_the_same_on_every_route(fleet: Any) -> None:
    local_routes, local = await play(fleet, Mode.ALWAYS_LOCAL)
    split_routes, split = await play(fleet, Mode.ALWAYS_SPLIT)
    replica_routes, replica = await play(fleet, Mode.REPLICA)
    assert local_routes == ["SPLIT", "LOCAL", "LOCAL"]
    assert split_routes == ["SPLIT"] * 3
    assert replica_routes == ["REPLICA"] * 3
    assert local == split == replica
    assert len(set(local)) == 3
    assert all(len(text) > 20 for text in local)


async def test_turn_1_moves_its_kv_and_a_local_turn_2_moves_none(fleet: Any) -> None:
    await fleet.mode(Mode.ALWAYS_LOCAL)
    chat, body = fleet.conversation(), salted(max_tokens=48)
    before = await fleet.counters(Role.DECODE)
    first = await chat.say(THREE[0], **body)
    middle = await fleet.counters(Role.DECODE)
    second = await chat.say(THREE[1], **body)
    after = await fleet.counters(Role.DECODE)
    prompt = first.body["usage"]["prompt_tokens"]
    pulled = middle["external_kv_transfer"] - before.get("external_kv_transfer", 0.0)
    assert prompt - BLOCK <= pulled <= prompt
    assert (first.route, second.route) == ("SPLIT", "LOCAL")
    assert after["external_kv_transfer"] == middle["external_kv_transfer"]
    hits = after["local_cache_hit"] - middle.get("local_cache_hit", 0.0)
    # Of turn 1 D holds the prompt and its own answer, but for the last part of a block.
    held = prompt + first.body["usage"]["completion_tokens"]
    assert held - 2 * BLOCK <= hits <= held
    assert second.body["usage"]["prompt_tokens_details"]["cached_tokens"] == hits


async def test_a_split_turn_2_moves_only_what_d_lacks(fleet: Any) -> None:
    await fleet.mode(Mode.ALWAYS_SPLIT)
    chat, body = fleet.conversation(), salted(max_tokens=48)
    await chat.say(THREE[0], **body)
    before = await fleet.counters(Role.DECODE)
    second = await chat.say(THREE[1], **body)
    after = await fleet.counters(Role.DECODE)
    pulled = after["external_kv_transfer"] - before["external_kv_transfer"]
    assert 0 < pulled < second.body["usage"]["prompt_tokens"] - BLOCK


@pytest.mark.parametrize("mode", [Mode.ALWAYS_LOCAL, Mode.ALWAYS_SPLIT, Mode.REPLICA])
async def test_the_openai_client_streams_and_does_not(fleet: Any, mode: Mode) -> None:
    from openai import AsyncOpenAI

    await fleet.mode(mode)
    ask: dict[str, Any] = {
        "model": TINY_NAME,
        "messages": [{"role": "user", "content": THREE[0]}],
        "max_tokens": 32,
        "temperature": 0,
        "extra_body": salted(),
    }
    async with AsyncOpenAI(base_url=f"{fleet.base_url}/v1", api_key="any", max_retries=0) as client:
        whole = await client.chat.completions.create(**ask)
        chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **ask)]
        asked = {**ask, "stream_options": {"include_usage": True}}
        counted = [chunk async for chunk in await client.chat.completions.create(stream=True, **asked)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert all(chunk.usage is None for chunk in chunks)
    assert counted[-1].usage is not None
    assert counted[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize(
    ("path", "body", "text_of"),
    [
        ("/v1/completions", {"prompt": THREE[0]}, lambda b: b["choices"][0]["text"]),
        ("/v1/responses", {"input": THREE[0]}, lambda b: b["output"][0]["content"][0]["text"]),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": THREE[0]}]},
            lambda b: b["content"][0]["text"],
        ),
    ],
)
async def test_the_other_endpoints_hand_over_too(fleet: Any, path: str, body: dict[str, Any], text_of: Any) -> None:
    cap = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    texts, pulled = [], []
    for mode in (Mode.ALWAYS_SPLIT, Mode.REPLICA):
        await fleet.mode(mode)
        before = (await fleet.counters(Role.DECODE)).get("external_kv_transfer", 0.0)
        turn = await fleet.post(path, {"model": TINY_NAME, "temperature": 0, cap: 24, **body, **salted()})
        assert turn.status == 200, turn.body
        assert "kv_transfer_params" not in turn.body or turn.body["kv_transfer_params"] is None
        texts.append(text_of(turn.body))
        pulled.append((await fleet.counters(Role.DECODE)).get("external_kv_transfer", 0.0) - before)
    assert texts[0] == texts[1]
    if path != "/v1/messages":  # it has no cache_salt, so D may know the prompt from another test
        assert pulled[0] > 0
    assert pulled[1] == 0


async def test_forced_tools_several_choices_and_stops_pass_through_p(fleet: Any) -> None:
    await fleet.mode(Mode.ALWAYS_SPLIT)
    chat = fleet.conversation()
    assert (await chat.say(THREE[0], **salted(n=2, temperature=0.5))).status == 200
    turn = await fleet.chat(
        [{"role": "user", "content": THREE[0]}],
        **salted(min_tokens=4, stop=["zzz"], logprobs=True, top_logprobs=2, max_completion_tokens=8),
    )
    assert (turn.status, turn.route) == (200, "SPLIT")
    assert turn.body["usage"]["completion_tokens"] <= 8
    assert turn.body["choices"][0]["logprobs"]["content"]


async def test_a_request_error_is_the_engines_own(fleet: Any) -> None:
    await fleet.mode(Mode.ALWAYS_SPLIT)
    turn = await fleet.chat([{"role": "user", "content": "hi"}], max_tokens=-1)
    assert turn.status == 400
    assert turn.body["error"]["message"]


async def test_a_client_that_leaves_frees_everything(fleet: Any) -> None:
    await fleet.mode(Mode.ALWAYS_SPLIT)
    body = {"model": TINY_NAME, "messages": [{"role": "user", "content": THREE[0]}], "max_tokens": 8000}
    body |= salted(stream=True, ignore_eos=True)
    async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as response:
        assert response.status == 200
        await response.content.readany()
        response.close()

    def is_idle() -> bool:
        return not any(view.inflight for view in fleet.proxy.state.registry.views())

    await fleet.until(is_idle)
    from ppd.proxy.health.probe import probe

    for _ in range(200):
        load = (await probe(fleet.session, fleet.urls[Role.DECODE])).metrics.load
        if load.running + load.waiting == 0:
            return
    pytest.fail("D still runs a request that nobody waits for")
