"""Turns through P and D, on D alone and on R, over real sockets: one text everywhere, and counters that say how."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ppd.servers.sim.core.counters import Trap
from tests.support.announcements import needs_ipv6

SYSTEM = {"role": "system", "content": "You are a patient teacher of arithmetic and of the history of numbers."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


FIRST = [SYSTEM, user("What is a prime number, and who wrote about them first?")]


@needs_ipv6
async def test_kv_is_pulled_from_an_ipv6_address(lab: Any) -> None:
    p, d = await lab.start("P", host="::1"), await lab.start("D")
    assert p.address.startswith("[::1]:")
    assert (await lab.split(p, d, FIRST)).text == await lab.expected(FIRST)
    assert d.counters.external_kv_tokens > 0


async def test_a_split_turn_answers_as_a_replica_does(lab: Any) -> None:
    p, d, r = await lab.start("P"), await lab.start("D"), await lab.start("R")
    expected = await lab.chat(r, FIRST)
    params = await lab.prefill(p, FIRST)
    assert p.pinned == 1
    answer = await lab.chat(d, FIRST, kv_transfer_params=params)
    assert answer.text == expected.text
    assert (p.pinned, p.pool.used, d.pool.used) == (0, 0, 0)
    prompt_tokens = expected.json["usage"]["prompt_tokens"]
    assert d.counters.external_kv_tokens == prompt_tokens
    assert d.counters.local_compute_tokens == 0
    assert not p.counters.traps
    assert not d.counters.traps


async def test_the_second_turn_on_d_hits_what_d_generated(lab: Any) -> None:
    p, d, r = await lab.start("P"), await lab.start("D"), await lab.start("R")
    one = await lab.split(p, d, FIRST)
    second = [*FIRST, assistant(one.text), user("And the second one?")]
    two = await lab.chat(d, second)
    assert two.text == (await lab.chat(r, second)).text
    first_tokens = one.json["usage"]["total_tokens"]
    assert d.counters.local_cache_hit_tokens == (first_tokens - 1) // 16 * 16
    assert d.counters.local_cache_hit_tokens > one.json["usage"]["prompt_tokens"]
    assert d.counters.external_kv_tokens == one.json["usage"]["prompt_tokens"]
    assert two.cached_tokens == d.counters.local_cache_hit_tokens


async def test_a_second_turn_through_p_pulls_only_what_d_lacks(lab: Any) -> None:
    p, d, r = await lab.start("P"), await lab.start("D"), await lab.start("R")
    one = await lab.split(p, d, FIRST)
    pulled = d.counters.pulled_blocks
    second = [*FIRST, assistant(one.text), user("And the second one?")]
    two = await lab.split(p, d, second)
    assert two.text == (await lab.chat(r, second)).text
    prompt_tokens = two.json["usage"]["prompt_tokens"]
    held = (one.json["usage"]["total_tokens"] - 1) // 16
    assert d.counters.pulled_blocks - pulled == -(-prompt_tokens // 16) - held
    # usage echoes P's hits, which end with the first prompt; D's own reach into the first answer.
    assert two.cached_tokens == one.json["usage"]["prompt_tokens"] // 16 * 16 < held * 16


async def test_three_turns_come_out_alike_by_every_route(lab: Any) -> None:
    p, split, local, r = await lab.start("P"), await lab.start("D"), await lab.start("D"), await lab.start("R")
    messages = list(FIRST)
    for turn in range(3):
        expected = await lab.chat(r, messages)
        assert (await lab.split(p, split, messages)).text == expected.text
        assert (await lab.chat(local, messages)).text == expected.text
        messages += [assistant(expected.text), user(f"go on, {turn}")]


async def test_a_changed_history_changes_the_answer(lab: Any) -> None:
    r = await lab.start()
    told = [*FIRST, assistant("Two is one."), user("More?")]
    edited = [*FIRST, assistant("Two is one!"), user("More?")]
    assert (await lab.chat(r, told)).text != (await lab.chat(r, edited)).text


async def test_engines_of_one_model_and_seed_answer_alike(lab: Any) -> None:
    texts = [
        (await lab.chat(await lab.start(**settings), FIRST)).text
        for settings in ({}, {"block_size": 4, "num_blocks": 8192}, {"seed": 1}, {"model": "other"})
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


async def test_many_conversations_at_once_keep_their_answers(lab: Any) -> None:
    p, d, r = await lab.start("P"), await lab.start("D", max_num_seqs=8), await lab.start("R")
    conversations = [[user(f"conversation number {number}, please")] for number in range(40)]
    split = await asyncio.gather(*(lab.split(p, d, messages) for messages in conversations))
    whole = await asyncio.gather(*(lab.chat(r, messages) for messages in conversations))
    assert [answer.text for answer in split] == [answer.text for answer in whole]
    assert (p.pinned, d.pool.used, r.pool.used) == (0, 0, 0)


async def test_a_full_cache_evicts_the_oldest_conversation(lab: Any) -> None:
    r = await lab.start(num_blocks=16, max_model_len=256)
    old, new = [user("o" * 100)], [user("n" * 100)]
    text = (await lab.chat(r, old, max_tokens=8)).text
    assert (await lab.chat(r, old, max_tokens=8)).cached_tokens > 0
    for _ in range(2):
        await lab.chat(r, new, max_tokens=8)
    await lab.chat(r, [user("x" * 100)], max_tokens=8)
    again = await lab.chat(r, old, max_tokens=8)
    assert again.cached_tokens < 96
    assert again.text == text
    assert r.pool.cached <= 16


async def test_a_small_cache_preempts_and_still_answers_right(lab: Any) -> None:
    small, big = await lab.start(num_blocks=16, max_model_len=256), await lab.start()
    conversations = [[user(f"{number}" * 60)] for number in range(6)]
    asked = {"max_tokens": 60, "ignore_eos": True}
    answers = await asyncio.gather(*(lab.chat(small, messages, **asked) for messages in conversations))
    assert [answer.text for answer in answers] == [(await lab.chat(big, m, **asked)).text for m in conversations]
    assert small.counters.preemptions > 0
    assert small.pool.used == 0


async def test_an_engine_without_a_connector_ignores_kv_transfer_params(lab: Any) -> None:
    r = await lab.start("R", connector="none")
    answer = await lab.chat(r, FIRST, kv_transfer_params={"do_remote_decode": True})
    assert answer.json["kv_transfer_params"] is None
    assert (await lab.chat(r, FIRST, kv_transfer_params={"do_remote_prefill": True})).status == 200
    assert (r.pinned, r.is_dead) == (0, False)


async def test_a_streamed_prefill_leg_carries_no_handoff_but_pins_one(lab: Any) -> None:
    p = await lab.start("P")
    params = {"do_remote_decode": True}
    answer = await lab.chat(p, FIRST, kv_transfer_params=params, max_tokens=1, stream=True)
    assert b"kv_transfer_params" not in answer.body
    assert p.pinned == 1


async def test_a_list_of_prompts_hands_over_only_the_first(lab: Any) -> None:
    p = await lab.start("P")
    body = {"prompt": ["one prompt", "another"], "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    answer = await lab.post(p, "/v1/completions", body)
    assert answer.json["kv_transfer_params"]["remote_num_tokens"] == len("one prompt")
    assert p.pinned == 2


async def test_several_choices_share_one_handoff_at_their_peril(lab: Any) -> None:
    p, d, r = await lab.start("P"), await lab.start("D", max_num_seqs=1), await lab.start("R")
    answer = await lab.split(p, d, FIRST, n=2)
    expected = (await lab.chat(r, FIRST)).text
    assert answer.text == expected
    # The first choice's notification frees P's blocks; what the second one gets depends on which came first.
    assert p.pinned == 0
    assert p.counters.traps[Trap.USED_HANDOFF] + (p.counters.notifications_after_expiry == 1) >= 1


async def test_p_hands_over_every_field_that_d_needs(lab: Any) -> None:
    p = await lab.start("P", engine_id="p-1")
    params = await lab.prefill(p, FIRST)
    tokens = (await lab.chat(p, FIRST, max_tokens=1)).json["usage"]["prompt_tokens"]
    (blocks,) = params.pop("remote_block_ids")
    assert len(blocks) == -(-tokens // 16)
    assert params.pop("remote_request_id").startswith("chatcmpl-")
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p-1",
        "remote_host": "127.0.0.1",
        "remote_port": p.side_address[1],
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "remote_registration_generation": 0,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }


async def test_peers_are_told_the_name_that_reaches_p(lab: Any) -> None:
    p, d, r = await lab.start("P", side_channel_host="localhost"), await lab.start("D"), await lab.start("R")
    params = await lab.prefill(p, FIRST)
    assert params["remote_host"] == "localhost"
    assert (await lab.chat(d, FIRST, kv_transfer_params=params)).text == (await lab.chat(r, FIRST)).text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
async def test_every_api_can_be_split(lab: Any, path: str) -> None:
    p, d, r = await lab.start("P"), await lab.start("D"), await lab.start("R")
    shapes: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Once upon a time there was", "max_tokens": 12},
        "/v1/responses": {"input": "Once upon a time there was", "max_output_tokens": 12},
        "/v1/messages": {"messages": FIRST[1:], "max_tokens": 12},
    }
    body = shapes[path]
    limit = next(name for name in body if name.startswith("max_"))
    leg = await lab.post(p, path, body | {limit: 1, "kv_transfer_params": {"do_remote_decode": True}})
    answer = await lab.post(d, path, body | {"kv_transfer_params": leg.json["kv_transfer_params"]})
    expected = await lab.post(r, path, body)
    part = {"/v1/completions": "choices", "/v1/responses": "output", "/v1/messages": "content"}[path]

    def shown(whole: Any) -> Any:
        (item,) = whole[part]
        return item.get("content", item) if path == "/v1/responses" else item["text"]

    assert shown(answer.json) == shown(expected.json)
    assert d.counters.external_kv_tokens > 0
    assert p.pinned == 0
