"""P's first token ends its answer, as where the model's next token is the end of its turn: whose answer is it then?

TensorRT-LLM's P answers. vLLM's Mooncake and MoRIIO hand nothing over, and do not tell D, which waits for minutes: its
leg is ended, and it computes the prompt. NIXL's and SGLang's hand over.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from ppd.proxy.connectors import CONNECTORS
from ppd.proxy.failures import Leg
from ppd.proxy.leg_moves import LegOrder
from ppd.servers.sim.core.fault_orders import FaultKind, Order
from tests.e2e.fleet.connector_fleets import NAMES, ConnectorFleet, ConnectorFleets, shows_transfers

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEPT_BACK = {"mooncake": "not_ended_by_length", "moriio": "not_ended_by_length", "moriio_read": "params_missing"}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SOON_S = 10.0  # a limit: the legs' own time-outs are longer
CASES = [
    (connector, path)
    for connector in NAMES
    for path in (CHAT, MESSAGES)
    if not connector.startswith("trtllm") and (path == CHAT or CONNECTORS[connector].order is not LegOrder.D_FIRST)
]
"""SGLang's legs cannot carry a turn of Messages."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleets() -> AsyncIterator[ConnectorFleets]:
    async with AsyncExitStack() as stack:
        yield ConnectorFleets(stack, attempts=3)


async def text_of(fleet: ConnectorFleet, address: str, path: str, body: dict[str, Any]) -> str:
    """All that the answer says, in either form."""
    async with asyncio.timeout(SOON_S), fleet.field.session.post(f"http://{address}{path}", json=body) as answer:
        raw = await answer.text()
        assert answer.status == 200, raw
    if not body["stream"]:
        told = json.loads(raw)
        return str(told["choices"][0]["message"]["content"] if path == CHAT else told["content"][0]["text"])
    events = [json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: {")]
    if path == CHAT:
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    return "".join(event.get("delta", {}).get("text", "") for event in events)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("connector", "path"), CASES)
async def test_the_turn_is_answered_at_once_by_d(
    fleets: ConnectorFleets, connector: str, path: str, stream: bool
) -> None:
    fleet = await fleets.of(connector)
    field, body = fleet.field, fleet.talk().body(stream=stream)
    stopping = fleet.order(Leg.PREFILL, Order(FaultKind.STOP))
    right = await text_of(fleet, field.engines["reference"].address, path, body)
    assert await text_of(fleet, field.base_url.removeprefix("http://"), path, body) == right
    receipt = field.newest()
    assert receipt.outcome == "completed"
    assert receipt.handoff_missing == KEPT_BACK.get(connector)
    assert [leg.error for leg in receipt.legs if leg.error] == []
    assert all(leg.ended_s is not None for leg in receipt.legs)
    joint = fleet.connector.order.is_joint and connector in KEPT_BACK
    assert [leg.kind for leg in receipt.legs] == [Leg.PREFILL, Leg.DECODE] + [Leg.DECODE] * joint
    if joint:
        asked = [json.loads(one.body) for one in list(field.engines[receipt.decode].received)[-2:]]
        assert ["kv_transfer_params" in each for each in asked] == [True, False]
    assert stopping.orders[0].times == (1 if connector == "none" else 0), "it was provoked"
    await fleet.rest()
    assert not fleet.used_twice()


@pytest.mark.parametrize("connector", ["trtllm", "trtllm_gen_first"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_first_token_that_ends_the_answer_is_ps_and_d_is_not_asked(
    fleets: ConnectorFleets, connector: str, stream: bool
) -> None:
    """Or, generation first, was asked already: what it would say is the same."""
    fleet = await fleets.of(connector)
    field, body = fleet.field, fleet.talk().body()
    async with field.session.post(
        f"http://{field.engines['reference'].address}/v1/chat/completions", json={**body, "return_token_ids": True}
    ) as answer:
        (choice,) = (await answer.json())["choices"]
    asked = {name: len(engine.received) for name, engine in field.engines.items()}
    told = {"stream_options": {"include_usage": True}} if stream else {}
    seen = await field.ask(body | {"stop_token_ids": choice["token_ids"][:1], "stream": stream, **told})
    receipt = field.newest()
    assert (seen.is_complete, seen.is_stream) == (True, stream), seen.body
    assert not shows_transfers(seen)
    usage = seen.events[-2]["usage"] if stream else seen.json["usage"]
    assert (usage["completion_tokens"], receipt.completion_tokens) == (1, 1)
    assert (receipt.legs[0].kind, receipt.outcome) == (Leg.PREFILL, "completed")
    assert [leg.error for leg in receipt.legs if leg.error] == []
    if connector == "trtllm":
        assert len(receipt.legs) == 1
        assert all(len(field.engines[name].received) == asked[name] for name in ("D1", "D2"))
        (session,) = field.proxy.state.sessions.recent(1)
        assert (session.decode, session.prefill is not None) == (None, True), "nothing is believed of D"
    await field.until(field.idle)
    again = await field.ask(body)
    assert again.text == choice["message"]["content"]
    await field.until(field.idle)


@pytest.mark.parametrize("connector", ["trtllm", "trtllm_gen_first"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_first_token_that_shows_nothing_yet_takes_no_text_and_no_count_away(
    fleets: ConnectorFleets, connector: str, stream: bool
) -> None:
    """As one that ends within a character; here because of a stop that the text may become."""
    fleet = await fleets.of(connector)
    field = fleet.field
    body = fleet.talk().body() | {"stop": ["this is said nowhere"]}
    async with field.session.post(f"http://{field.engines['reference'].address}{CHAT}", json=body) as answer:
        right = await answer.json()
    told = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    seen = await field.ask(body | told)
    assert (seen.is_complete, seen.is_stream, seen.text) == (True, stream, right["choices"][0]["message"]["content"])
    usage = seen.events[-2]["usage"] if stream else seen.json["usage"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [usage[name] for name in counts] == [right["usage"][name] for name in counts]
    receipt = field.newest()
    assert [(leg.kind, leg.error) for leg in receipt.legs] == [(Leg.PREFILL, None), (Leg.DECODE, None)]
    assert (receipt.completion_tokens, receipt.handoff_missing) == (usage["completion_tokens"], None)
    await fleet.rest()
    assert not fleet.used_twice()


@pytest.mark.parametrize("connector", ["trtllm", "trtllm_gen_first"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_list_of_prompts_has_one_that_p_ends(fleets: ConnectorFleets, connector: str, stream: bool) -> None:
    fleet = await fleets.of(connector)
    fleet.order(Leg.PREFILL, Order(FaultKind.STOP))
    model = fleet.talk().body()["model"]
    body = {"model": model, "prompt": ["Say one.", "Say two."], "max_tokens": 8, "stream": stream}
    async with fleet.field.session.post(f"{fleet.field.base_url}/v1/completions", json=body) as answer:
        raw = await answer.text()
        assert answer.status == 200, raw
    whole = [json.loads(raw)] if not stream else [json.loads(line[6:]) for line in raw.split("\n") if "{" in line]
    assert not any("error" in one for one in whole)
    assert {choice["index"] for one in whole for choice in one["choices"] if choice["finish_reason"]} == {0, 1}
    assert not stream or raw.endswith("data: [DONE]\n\n")
    await fleet.rest()
