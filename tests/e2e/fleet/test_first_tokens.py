"""P's first token ends its answer, as where the model's next token is the end of its turn: whose answer is it then?

TensorRT-LLM's P hands nothing over and answers (`test_connectors`). vLLM's Mooncake and MoRIIO hand nothing over
either, and do not tell D, which waits for minutes: its leg is ended, and it computes the prompt. NIXL's and SGLang's
hand over.
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
from tests.e2e.fleet.connector_fleets import NAMES, ConnectorFleet, ConnectorFleets

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEPT_BACK = {"mooncake": "not_ended_by_length", "moriio": "not_ended_by_length", "moriio_read": "params_missing"}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SOON_S = 10.0  # a limit: the legs' own time-outs are longer
CASES = [
    (connector, path)
    for connector in NAMES
    for path in (CHAT, MESSAGES)
    if connector != "trtllm" and (path == CHAT or CONNECTORS[connector].order is not LegOrder.D_FIRST)
]
"""TensorRT-LLM's and SGLang's legs cannot carry a turn of Messages."""


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
