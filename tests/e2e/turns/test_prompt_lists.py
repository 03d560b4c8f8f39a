"""Lists of prompts: one handoff a prompt, one answer to the client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ppd.proxy.config import Mode
from ppd.proxy.routing.prompt_fan_out import AT_ONCE
from ppd.servers.sim.core.fault_orders import Faults

PATH = "/v1/completions"
TEXTS = [f"Prompt number {n}. " + "There are blocks to move. " * (n + 2) for n in range(AT_ONCE + 4)]
TOKENS = [[ord(character) for character in text] for text in TEXTS]
LONG = {"max_tokens": 20_000, "ignore_eos": True}


def body(prompt: Any, **members: Any) -> dict[str, Any]:
    return {"model": "sim", "prompt": prompt, "max_tokens": 12, "temperature": 0, **members}


async def streamed(fleet: Any, request: dict[str, Any]) -> tuple[list[Any], str]:
    """The chunks of a stream, and the data of its last event."""
    async with fleet.session.post(fleet.base_url + PATH, json={**request, "stream": True}) as response:
        text = await response.text()
    assert response.status == 200, text
    *chunks, last = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return [json.loads(chunk) for chunk in chunks], last


async def answered(fleet: Any, request: dict[str, Any], *, streams: bool) -> list[str]:
    """The choices' texts, by their index."""
    if not streams:
        turn = await fleet.post(PATH, request)
        assert turn.status == 200, turn.body
        choices = turn.body["choices"]
        assert [choice["index"] for choice in choices] == [*range(len(choices))]
        return [choice["text"] for choice in choices]
    chunks, last = await streamed(fleet, request)
    assert last == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in range(len(texts))]


def handoffs_used(fleet: Any) -> list[str]:
    """What the Ds were told to pull, one entry a request."""
    received = [request for name, engine in fleet.engines.items() if name[0] == "D" for request in engine.received]
    params = [json.loads(request.body).get("kv_transfer_params") for request in received]
    return [one["remote_request_id"] for one in params if one]


def at_rest(fleet: Any) -> bool:
    """Nothing runs and nothing is reserved; what a D refused or never read may be pinned until its lease ends."""
    views = fleet.proxy.state.registry.views()
    running = any(list(engine.scheduler.sequences) for engine in fleet.engines.values())
    return not (running or any(view.inflight or view.queued_prefill_tokens for view in views))


def aborted(fleet: Any, name: str) -> int:
    return int(fleet.engines[name].counters.finished["abort"])


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("prompts", [TEXTS, TOKENS], ids=["texts", "tokens"])
async def test_each_prompt_gets_its_own_handoff_and_its_own_answer(
    start_fleet: Any, prompts: list[Any], streams: bool
) -> None:
    async with start_fleet("P1 D1 D2") as fleet:
        texts = await answered(fleet, body(prompts), streams=streams)
        used = handoffs_used(fleet)
        assert len(used) == len(set(used)) == len(prompts) == fleet.engines["P1"].counters.handoffs
        assert len(fleet.engines["P1"].received) == len(prompts)
        assert not any(engine.counters.traps for engine in fleet.engines.values())
        await fleet.until(fleet.idle)
        assert texts == [(await answered(fleet, body(one), streams=False))[0] for one in prompts]
        assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_several_choices_of_each_prompt_are_numbered_through(start_fleet: Any, streams: bool) -> None:
    async with start_fleet("P1 D1 D2") as fleet:
        texts = await answered(fleet, body(TEXTS[:3], n=2), streams=streams)
        assert not fleet.engines["P1"].received, "several choices of one prompt need one engine"
        alone = [await answered(fleet, body(one, n=2), streams=False) for one in TEXTS[:3]]
        assert texts == [text for choices in alone for text in choices]


async def test_a_prompt_of_a_list_is_a_session_of_its_own(start_fleet: Any) -> None:
    async with start_fleet("P1 D1 D2") as fleet:
        prompts = TEXTS[:4]
        first = await answered(fleet, body(prompts), streams=False)
        fleet.engines["P1"].received.clear()
        longer = [prompt + text + " And on." for prompt, text in zip(prompts, first, strict=True)]
        turn = await fleet.post(PATH, body(longer))
        assert (turn.status, turn.route) == (200, "LOCAL")
        assert not fleet.engines["P1"].received
        held = turn.body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert held > sum(map(len, prompts)) * 0.8


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_usage_is_that_of_all_prompts(start_fleet: Any, streams: bool) -> None:
    async with start_fleet("P1 D1 D2") as fleet:
        if streams:
            chunks, _ = await streamed(fleet, body(TEXTS, stream_options={"include_usage": True}))
            told = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
            assert len(told) == 1 and not chunks[-1]["choices"]
            usage = told[0]
        else:
            usage = (await fleet.post(PATH, body(TEXTS))).body["usage"]
        prompt, completion = sum(map(len, TEXTS)), 12 * len(TEXTS)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, completion)
        assert usage["total_tokens"] == prompt + completion


async def test_a_stream_without_usage_shows_none(start_fleet: Any) -> None:
    async with start_fleet("P1 D1") as fleet:
        chunks, _ = await streamed(fleet, body(TEXTS[:3]))
        assert not any("usage" in chunk for chunk in chunks)


async def test_each_prompt_has_a_receipt_and_the_request_one_id(start_fleet: Any) -> None:
    async with start_fleet("P1 D1 D2") as fleet:
        turn = await fleet.post(PATH, body(TEXTS[:4]), {"X-Request-Id": "list"})
        assert turn.headers["X-Request-Id"] == "list"
        assert (turn.route, turn.reason, turn.headers["X-PPD-Prefill"]) == ("SPLIT", "first_turn", "P1")
        receipts = [(await fleet.admin("GET", f"/requests/list-{at}"))[1] for at in range(4)]
        assert {receipt["outcome"] for receipt in receipts} == {"completed"}
        assert [receipt["prompt_tokens"] for receipt in receipts] == [len(text) for text in TEXTS[:4]]
        assert [[leg["kind"] for leg in receipt["legs"]] for receipt in receipts] == [["prefill", "decode"]] * 4
        assert len({receipt["session"] for receipt in receipts}) == 4
        assert turn.headers["X-PPD-Decode"].split(", ") == [*dict.fromkeys(receipt["decode"] for receipt in receipts)]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_a_list_takes_only_so_many_places_and_leaves_them_with_its_client(
    start_fleet: Any, streams: bool
) -> None:
    async with start_fleet("P1 D1") as fleet:
        p, d = fleet.engines["P1"], fleet.engines["D1"]
        d.faults = Faults(hang=1000)
        asking = asyncio.create_task(fleet.post(PATH, body(TEXTS, stream=streams)))
        await fleet.until(lambda: len(d.received) == AT_ONCE)
        assert len(p.received) == AT_ONCE
        asking.cancel()
        await fleet.until(lambda: at_rest(fleet))
        outcomes = [receipt["outcome"] for receipt in (await fleet.admin("GET", "/requests"))[1]["newest"]]
        assert outcomes == ["cancelled"] * AT_ONCE


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_leaves_ends_all_its_legs(start_fleet: Any, phase: str, streams: bool) -> None:
    engine = {"time_scale": 40.0 if phase == "prefill" else 1.0}
    async with start_fleet("P1 D1 D2", engine=engine, mode=Mode.ALWAYS_SPLIT) as fleet:
        p, ds = fleet.engines["P1"], [fleet.engines["D1"], fleet.engines["D2"]]
        asking = asyncio.create_task(fleet.post(PATH, body(TEXTS[:4], stream=streams, **LONG)))
        if phase == "prefill":
            await fleet.until(lambda: len(list(p.scheduler.sequences)) == 4)
        else:
            await fleet.until(lambda: sum(d.counters.generation_tokens for d in ds) > 20)
        asking.cancel()
        await fleet.until(fleet.idle)
        ended = {"P1": aborted(fleet, "P1"), "D": aborted(fleet, "D1") + aborted(fleet, "D2")}
        assert ended == ({"P1": 4, "D": 0} if phase == "prefill" else {"P1": 0, "D": 4})


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_a_prompt_that_fails_for_good_fails_the_list_and_ends_the_others(start_fleet: Any, streams: bool) -> None:
    engine = {"max_model_len": 512, "num_blocks": 1024, "time_scale": 1.0}
    async with start_fleet("P1 D1", engine=engine) as fleet:
        prompts = [*TEXTS[:3], "too long " * 100]
        turn = await fleet.post(PATH, body(prompts, stream=streams) | {"max_tokens": 300, "ignore_eos": True})
        assert (turn.status, turn.body["error"]["type"]) == (400, "BadRequestError")
        await fleet.until(lambda: at_rest(fleet))
        assert fleet.engines["D1"].counters.generation_tokens < 3 * 300, "no other was answered whole"


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_each_prompt_is_tried_again_by_itself(start_fleet: Any, streams: bool) -> None:
    async with start_fleet("P1 P2 D1 D2") as fleet:
        fleet.engines["P1"].faults = Faults(refuse=1)
        prompts = TEXTS[:6]
        texts = await answered(fleet, body(prompts), streams=streams)
        assert sum(len(fleet.engines[name].received) for name in ("P1", "P2")) == len(prompts) + 1
        assert texts == [(await answered(fleet, body(one), streams=False))[0] for one in prompts]
        assert not any(engine.counters.traps for engine in fleet.engines.values())
        await fleet.until(fleet.idle)


async def test_one_broken_stream_breaks_the_whole_and_ends_the_others(start_fleet: Any) -> None:
    async with start_fleet("P1 D1 D2", engine={"time_scale": 1.0}) as fleet:
        for name in ("D1", "D2"):
            fleet.engines[name].faults = Faults(cut=1, cut_after_events=3)
        chunks, last = await streamed(fleet, body(TEXTS[:4], **LONG))
        assert chunks, "something had come before"
        assert json.loads(last)["error"]["type"] == "upstream_error"
        await fleet.until(fleet.idle)
        assert aborted(fleet, "D1") + aborted(fleet, "D2") == 4


async def test_a_prompt_refused_after_the_first_byte_ends_the_stream_with_the_workers_words(start_fleet: Any) -> None:
    engine = {"max_model_len": 1024, "num_blocks": 1024}
    async with start_fleet("P1 D1", engine=engine) as fleet:
        chunks, last = await streamed(fleet, body([*TEXTS, "too long " * 200]))
        assert any(chunk["choices"] for chunk in chunks)
        assert json.loads(last)["error"]["type"] == "BadRequestError"
        await fleet.until(fleet.idle)


@pytest.mark.parametrize("prompt", [["a"] * 1025, ["a", []], [[1], ["b"]], ["a", 5], []])
async def test_a_list_that_is_none_is_refused_before_any_worker_is_asked(start_fleet: Any, prompt: list[Any]) -> None:
    async with start_fleet("P1 D1") as fleet:
        turn = await fleet.post(PATH, body(prompt))
        assert (turn.status, turn.body["error"]["param"]) == (400, "prompt")
        assert not any(engine.received for engine in fleet.engines.values())


async def test_a_chat_that_has_a_list_of_prompts_too_is_one_turn(start_fleet: Any) -> None:
    async with start_fleet("P1 D1") as fleet:
        chat = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "prompt": ["a", "b"], "max_tokens": 4}
        turn = await fleet.post("/v1/chat/completions", chat)
        assert turn.status == 200, turn.body
        assert len(turn.body["choices"]) == len(fleet.engines["P1"].received) == 1
