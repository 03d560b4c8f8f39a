"""Real P and D whose connectors want both legs at once: NIXL push and Mooncake, of one suite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from benchmarks.eviction.engines import tiny_engine
from ppd.proxy.config import Mode
from ppd.proxy.fleet.worker import Role
from ppd.servers.fleet.process import EngineProcess
from ppd.servers.vllm.cpu_install import ensure, unsupported_reason
from ppd.servers.vllm.launch import TINY_NAME, command
from ppd.servers.vllm.mooncake_parts import ensure_mooncake, environment_of
from ppd.servers.vllm.tiny_model import ModelShape, ensure_model
from tests.support.fleet import has_work
from tests.support.proxy import ProxyClient, running_proxy
from tests.vllm.conftest import START_S, VllmFleet, with_env
from tests.vllm.destructive.test_abandoned import LONG, SHORT, WITHIN_S, ask, both, leave
from tests.vllm.nursery.launches import Born
from tests.vllm.test_conversations import BLOCK, THREE, salted

pytestmark = pytest.mark.asyncio(loop_scope="session")

PULLED = "external_kv_transfer"
LEASE_S = 60.0  # twice that of NIXL, after which P frees what a dead D cannot say it has got


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["nixl_push", "mooncake"])
async def pair(
    request: pytest.FixtureRequest, born: Born, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[VllmFleet]:
    """P, D and a proxy that keeps later turns on D."""
    async with AsyncExitStack() as stack:
        yield await start(stack, request.param, born, tmp_path_factory.mktemp(request.param))


async def start(stack: AsyncExitStack, connector: str, born: Born, logs: Path) -> VllmFleet:
    if reason := unsupported_reason():
        pytest.skip(f"real vLLM is not tested here: {reason}")
    environment = ensure(print)
    model = ensure_model(environment)
    needs = environment_of(ensure_mooncake(environment, print)) if connector == "mooncake" else {}
    engines, urls, specs = {}, {}, {}
    for role in (Role.PREFILL, Role.DECODE):
        spec = replace(tiny_engine(role, model, environment.python), connector=connector)
        process = EngineProcess(born(with_env(command(spec), needs)), logs / f"{role}.log", name=role)
        engines[role] = await stack.enter_async_context(process)
        specs[role], urls[role] = spec, f"http://{spec.address}"
    await asyncio.gather(*(engines[role].wait_healthy(urls[role], timeout_s=START_S) for role in urls))
    p, d = specs[Role.PREFILL], specs[Role.DECODE]
    told = {
        "nixl_push": f"engine_id={p.address},side_channel_port={p.side_channel_port}",
        "mooncake": f"bootstrap_port={p.side_channel_port}",
    }[connector]
    workers = (f"P={p.address},connector={connector},{told}", f"D={d.address},connector={connector}")
    running = await stack.enter_async_context(
        running_proxy(workers=workers, mode=Mode.ALWAYS_LOCAL, probe_interval_s=0.5)
    )
    await ProxyClient(*running).until(lambda: up(running[0]) == 2, START_S)
    return VllmFleet(*running, TINY_NAME, engines, urls, specs, stack, needs, born=born)


def up(proxy: Any) -> int:
    """Workers; none while a breaker keeps turns from one that was gone a moment ago."""
    state = proxy.state
    return 0 if state.health.breakers.blocked(state.now()) else sum(view.up for view in state.registry.views())


async def test_p_moves_its_kv_to_d_and_d_says_what_p_would(pair: VllmFleet) -> None:
    chat, body = pair.conversation(), salted(max_tokens=48)
    routes = []
    for number, text in enumerate(THREE):
        before = await pair.counters(Role.DECODE)
        turn = await chat.say(text, **body)
        after = await pair.counters(Role.DECODE)
        routes.append(turn.route)
        pulled = after[PULLED] - before.get(PULLED, 0.0)
        prompt = turn.body["usage"]["prompt_tokens"]
        assert pulled == 0 if number else prompt - BLOCK <= pulled <= prompt
        assert turn.text == await pair.straight(Role.PREFILL, chat.messages[:-1], **body)
    assert routes == ["SPLIT", "LOCAL", "LOCAL"]


async def test_each_turn_moves_what_d_lacks(pair: VllmFleet) -> None:
    await pair.mode(Mode.ALWAYS_SPLIT)
    chat, body = pair.conversation(), salted(max_tokens=48)
    for text in THREE:
        before = await pair.counters(Role.DECODE)
        turn = await chat.say(text, **body)
        after = await pair.counters(Role.DECODE)
        assert turn.route == "SPLIT"
        brought = [after.get(name, 0.0) - before.get(name, 0.0) for name in (PULLED, "local_cache_hit")]
        assert sum(brought) >= turn.body["usage"]["prompt_tokens"] - BLOCK, "D computes next to nothing"
        assert brought[0] > 0
        assert turn.text == await pair.straight(Role.PREFILL, chat.messages[:-1], **body)


async def test_a_turn_of_responses_is_split_too(pair: VllmFleet) -> None:
    await pair.mode(Mode.ALWAYS_SPLIT)
    before = (await pair.counters(Role.DECODE)).get(PULLED, 0.0)
    body = {"model": TINY_NAME, "input": THREE[0], "temperature": 0, "max_output_tokens": 24, **salted()}
    turn = await pair.post("/v1/responses", body)
    assert (turn.status, turn.route) == (200, "SPLIT"), turn.body
    assert (await pair.counters(Role.DECODE))[PULLED] > before
    async with pair.session.post(f"{pair.urls[Role.PREFILL]}/v1/responses", json=body) as answer:
        alone = await answer.json()
    assert turn.body["output"][0]["content"] == alone["output"][0]["content"]


async def test_streams_and_conversations_side_by_side(pair: VllmFleet) -> None:
    await pair.mode(Mode.ALWAYS_SPLIT)
    asked = [([{"role": "user", "content": f"{number}: {THREE[0]}"}], salted(max_tokens=32)) for number in range(6)]
    seen = await asyncio.gather(*(pair.stream(messages, **body) for messages, body in asked))
    assert [one.done for one in seen] == [True] * 6
    for one, (messages, body) in zip(seen, asked, strict=True):
        assert one.text == await pair.straight(Role.PREFILL, messages, **body)


@both
async def test_of_a_client_that_leaves_while_d_answers_nothing_stays(pair: VllmFleet, stream: bool) -> None:
    await pair.mode(Mode.ALWAYS_SPLIT)
    asking = ask(pair, SHORT, stream=stream)
    await pair.eventually(lambda: pair.computes(Role.DECODE))
    await leave(asking)
    await pair.eventually(lambda: is_idle(pair), WITHIN_S)
    await pair.eventually(lambda: is_empty(pair, *pair.urls), WITHIN_S)


@both
async def test_of_a_client_that_leaves_while_p_computes_nothing_stays(pair: VllmFleet, stream: bool) -> None:
    """P goes on: vLLM 0.32 keeps the blocks that D has set aside until P has written into them."""
    await pair.mode(Mode.ALWAYS_SPLIT)
    asking = ask(pair, LONG * 3 // 4, stream=stream)
    await pair.eventually(lambda: pair.computes(Role.PREFILL))
    await leave(asking)
    await pair.eventually(lambda: is_idle(pair), LEASE_S)
    await pair.eventually(lambda: is_empty(pair, *pair.urls), WITHIN_S)
    messages, body = [{"role": "user", "content": f"Still there? {THREE[1]}"}], salted(max_tokens=32)
    turn = await pair.chat(messages, **body)
    assert (turn.route, turn.text) == ("SPLIT", await pair.straight(Role.PREFILL, messages, **body))


async def test_a_d_that_dies_ends_ps_leg_and_is_served_again_when_it_is_back(pair: VllmFleet) -> None:
    """One turn has begun to be answered, and of another one P computes the prompt while D waits for it."""
    await pair.mode(Mode.ALWAYS_SPLIT)
    messages, body = [{"role": "user", "content": f"Once more. {THREE[2]}"}], salted(ignore_eos=True)
    begins = await pair.straight(Role.PREFILL, messages, **body, max_tokens=16)
    seen = pair.new_stream()
    streaming = asyncio.create_task(pair.stream(messages, seen, **body, max_tokens=8000))
    await pair.until(lambda: len(seen.text) > len(begins), 60)
    # Long enough that P still computes it when D dies: of what it sends by then, Mooncake keeps the blocks for minutes.
    waiting = ask(pair, LONG * 3 // 2, stream=False, max_tokens=1000)
    await pair.until(lambda: [view.inflight for view in pair.proxy.state.registry.views()] == [1, 2])  # of P and D
    await pair.engines[Role.DECODE].kill()
    await streaming
    assert (seen.done, seen.error is not None, seen.text.startswith(begins)) == (False, True, True)
    assert (await waiting).status >= 500
    await pair.eventually(lambda: is_empty(pair, Role.PREFILL), LEASE_S)

    await pair.start_again(Role.DECODE)
    await pair.until(lambda: up(pair.proxy) == 2, START_S)
    messages, body = [{"role": "user", "content": f"And again. {THREE[0]}"}], salted(max_tokens=32)
    async with asyncio.timeout(60):
        turn = await pair.chat(messages, **body)
    assert (turn.status, turn.route) == (200, "SPLIT")
    assert turn.text == await pair.straight(Role.PREFILL, messages, **body)
    assert (await pair.counters(Role.DECODE))[PULLED] > 0


async def is_idle(pair: VllmFleet) -> bool:
    """No engine has a request, and the proxy's books say so too."""
    loads = [await pair.load(role) for role in pair.urls]
    booked = any(map(has_work, pair.proxy.state.registry.views()))
    return not booked and not any(load.running or load.waiting for load in loads)


async def is_empty(pair: VllmFleet, *roles: Role) -> bool:
    loads = [await pair.load(role) for role in roles]
    return not any(load.running or load.waiting or load.kv_usage for load in loads)


async def test_a_p_that_is_gone_keeps_d_waiting_for_no_time_out(pair: VllmFleet) -> None:
    """Alone, D would wait for P for eight minutes."""
    await pair.mode(Mode.ALWAYS_SPLIT)
    messages, body = [{"role": "user", "content": f"And now? {THREE[1]}"}], salted(max_tokens=32)
    right = await pair.straight(Role.PREFILL, messages, **body)
    await pair.engines[Role.PREFILL].kill()
    async with asyncio.timeout(120):
        seen = await pair.stream(messages, **body)
    assert (seen.status, seen.text, seen.done) == (200, right, True)


EVERY_TOKEN = list(range(ModelShape().vocabulary))


async def test_a_first_token_that_ends_ps_answer_keeps_d_waiting_for_no_time_out(
    pair: VllmFleet, tmp_path: Path
) -> None:
    """In Messages no request can say that it is not to end. NIXL's P hands over all the same.

    By another P, at the address of the one that is gone. NIXL's has the same id too: D gets no KV of it until it begins
    anew, and would wait.
    """
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": EVERY_TOKEN}))
    spec = pair.specs[Role.PREFILL]
    args = (*spec.extra_args, "--generation-config", str(tmp_path))
    pair.specs[Role.PREFILL] = replace(spec, extra_args=args)
    await pair.start_again(Role.PREFILL)
    await pair.until(lambda: up(pair.proxy) == 2, START_S)
    await pair.mode(Mode.ALWAYS_SPLIT)
    if spec.connector == "nixl_push":
        messages, body = [{"role": "user", "content": f"So? {THREE[0]}"}], salted(max_tokens=16)
        async with asyncio.timeout(60):
            turn = await pair.chat(messages, **body)
        assert (turn.route, turn.text) == ("LOCAL", await pair.straight(Role.DECODE, messages, **body))
        await pair.engines[Role.DECODE].kill()
        await pair.start_again(Role.DECODE)
        await pair.until(lambda: up(pair.proxy) == 2 and not pair.proxy.state.health.strangers.pairs, START_S)
    body = {"model": TINY_NAME, "messages": [{"role": "user", "content": THREE[0]}], "max_tokens": 24}
    async with asyncio.timeout(60):
        turn = await pair.post("/v1/messages", body | {"temperature": 0})
    assert (turn.status, turn.route) == (200, "SPLIT"), turn.body
    receipt = pair.proxy.state.receipts.newest(1)[0]
    assert receipt.handoff_missing == ("not_ended_by_length" if spec.connector == "mooncake" else None)
    async with pair.session.post(f"{pair.urls[Role.DECODE]}/v1/messages", json=body | {"temperature": 0}) as answer:
        alone = await answer.json()
    assert turn.body["content"] == alone["content"]
    await pair.eventually(lambda: is_idle(pair), LEASE_S)
    messages = [{"role": "user", "content": f"Then? {THREE[1]}"}]
    again = await pair.chat(messages, **salted(max_tokens=16))
    assert (again.status, again.route) == (200, "SPLIT")
    assert pair.proxy.state.receipts.newest(1)[0].handoff_missing is None, "chats say that it is not to end"
