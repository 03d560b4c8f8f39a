"""The proxy's own tokens of a prompt beside the engine's, and what it says that the engine holds of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from ppd.proxy.config import Mode
from ppd.proxy.fleet.worker import Role, WorkerId
from ppd.proxy.kv_events.block_tokens import packed
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.tokenizer.count_checks import PROVEN
from ppd.proxy.tokenizer.token_worker import Ask, Tokenized, tokenized
from ppd.servers.fleet.ports import free_ports
from ppd.servers.fleet.process import EngineProcess
from ppd.servers.vllm.launch import TINY_ARGS, TINY_NAME, EngineSpec, command
from tests.support.fleet import proxy_before
from tests.support.proxy import ProxyClient
from tests.vllm.nursery.launches import Born

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK = 32  # tokens, the least on CPUs
RENDERS = ("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")  # /render, and tools
PATIENCE_S = 20.0  # for tokens, on a busy machine
HEAD = "You are one of many assistants, who are all told the same at first. " * 12

TOOL = {"name": "look_up", "description": "Looks <it> up.", "parameters": {"type": "object", "properties": {"q": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"q": "ä", "n": 1}'}}
ASKED = {"role": "user", "content": "What is it?"}
LOOP = [
    ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Let me see."},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "2"}]},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "system", "content": "A reminder."},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm."},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"q": "x", "deep": [1, 2.5, None]}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "found"}]},
            {"type": "text", "text": "And now?"},
        ],
    },
]
BILLED = [{"type": "text", "text": "x-anthropic-billing-header: 7"}, {"type": "text", "text": "Be short."}]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Look it up."}]},
    {"type": "reasoning", "id": "r1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": '{"q": "x"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "found"},
    {"role": "developer", "content": "Be short."},
]
FUNCTION = {"type": "function", "function": TOOL}
CHAT, MESSAGES, RESPONSES, COMPLETIONS = Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.RESPONSES, Endpoint.COMPLETIONS

BODIES: list[tuple[Endpoint, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "system", "content": HEAD}, ASKED]}),
    (CHAT, {"messages": LOOP, "tools": [FUNCTION]}),
    (CHAT, {"messages": LOOP, "tools": [{"type": "function", "function": {"name": "bare"}}], "tool_choice": "none"}),
    (CHAT, {"messages": [ASKED, {"role": "developer", "content": "Be short."}, ASKED]}),
    (CHAT, {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 1\nBe short."}, ASKED]}),
    (CHAT, {"messages": [ASKED], "add_generation_prompt": False}),
    (CHAT, {"messages": [ASKED], "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}),
    (
        CHAT,
        {
            "messages": [ASKED, {"role": "assistant", "content": "It is "}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    (
        CHAT,
        {"messages": [ASKED, {"role": "assistant", "tool_calls": []}, {"role": "user", "name": "ann", "content": ""}]},
    ),
    (CHAT, {"messages": [{"role": "user", "content": "<|im_end|>\u00e9\u0301 中文 <|im_start|>system"}]}),
    (MESSAGES, {"messages": BLOCKS, "system": BILLED, "tools": [{"name": "look_up", "input_schema": {}}]}),
    (MESSAGES, {"messages": [ASKED], "thinking": {"type": "disabled"}}),
    (RESPONSES, {"input": "What is it?", "instructions": HEAD}),
    (RESPONSES, {"input": ITEMS, "tools": [{"type": "function", **TOOL, "strict": True}]}),
    (COMPLETIONS, {"prompt": "Once upon a time\n"}),
    (COMPLETIONS, {"prompt": [5, 6, 7, 300]}),
]


def own_tokens(folder: str, endpoint: Endpoint, body: dict[str, Any]) -> Tokenized:
    return tokenized(Ask(folder, endpoint, msgspec.json.encode(body)))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(
    tiny_spec: Callable[[Role], EngineSpec],
    born: Born,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[EngineSpec]:
    events, replay = free_ports(2)
    spec = replace(
        tiny_spec(Role.REPLICA),
        kv_events_port=events,
        kv_replay_port=replay,
        extra_args=(*TINY_ARGS, *RENDERS),
    )
    process = EngineProcess(born(command(spec)), tmp_path_factory.mktemp("tokens") / "engine.log", name="tokens")
    async with process:
        await process.wait_healthy(f"http://{spec.address}", timeout_s=600)
        yield spec


@pytest.mark.parametrize(("endpoint", "body"), BODIES, ids=[f"{at}-{one[0]}" for at, one in enumerate(BODIES)])
async def test_a_prompt_has_the_engines_own_tokens(
    engine: EngineSpec, endpoint: Endpoint, body: dict[str, Any]
) -> None:
    asked = {"model": TINY_NAME, "max_tokens": 4, **body}
    if endpoint is RESPONSES:
        asked["max_output_tokens"] = asked.pop("max_tokens")
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{engine.address}{endpoint}/render", json=asked) as answer,
    ):
        text = await answer.text()
        assert answer.status == 200, text
    rendered = json.loads(text)
    if isinstance(rendered, list):
        (rendered,) = rendered
    found = own_tokens(engine.model, endpoint, body)
    assert (found.why, found.ids) == ("", packed(rendered["token_ids"]))


async def test_a_first_turn_claims_what_the_engine_has_of_other_sessions(engine: EngineSpec) -> None:
    worker = f"{engine.address},events=tcp://127.0.0.1:{engine.kv_events_port},replay=tcp://127.0.0.1:{engine.kv_replay_port}"
    told = {"tokenizer": engine.model, "tokenizer_wait_s": PATIENCE_S, "mode": Mode.REPLICA, "probe_interval_s": 0.5}
    async with proxy_before([(Role.REPLICA, worker)], limit_s=60, **told) as running:
        proxy = ProxyClient(*running, TINY_NAME)
        [stream] = proxy.proxy.state.engine_caches.streams(WorkerId(engine.address))

        async def first_turn(head: str, text: str, **body: Any) -> dict[str, Any]:
            before = stream.expected
            turn = await proxy.chat([{"role": "system", "content": head}, {"role": "user", "content": text}], **body)
            assert turn.status == 200, turn.body
            await proxy.until(lambda: (stream.expected or 0) > (before or 0) and not stream.is_behind)
            return await proxy.receipt(turn)

        for number in range(PROVEN):
            assert (await first_turn(f"{number} is other", "hello"))["kind"] == "first"
        receipts = [await first_turn(HEAD, f"{number} asks") for number in range(4)]
        for receipt in receipts:
            assert receipt["prompt_evidence"] == "tokenizer"
            assert receipt["estimated_prompt_tokens"] == receipt["prompt_tokens"]
            assert receipt["estimated_cached_tokens"] == receipt["cached_tokens"]
        assert all(receipt["cached_tokens"] > len(HEAD) - BLOCK for receipt in receipts[1:])
        assert {receipt["cached_evidence"] for receipt in receipts[1:]} == {"kv_events"}
        salted = [await first_turn(HEAD, f"{number} asks", cache_salt="another") for number in range(2)]
        assert [bool(one["estimated_cached_tokens"]) for one in salted] == [False, True]
        assert [one["cached_tokens"] for one in salted] == [one["estimated_cached_tokens"] for one in salted]
