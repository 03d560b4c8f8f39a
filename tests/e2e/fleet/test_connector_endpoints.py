"""Turns of each API, by each connector: split where its legs can carry them, and else computed by one engine."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from ppd.proxy.connectors import CONNECTORS
from ppd.proxy.failures import Leg
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.policy import Route
from ppd.servers.sim.core.fault_orders import FaultKind, Order
from tests.e2e.fleet.connector_fleets import NAMES, WORDS, ConnectorFleet
from tests.support.credentials import bearer, client, write_keys

OTHER_APIS: dict[Endpoint, tuple[dict[str, Any], str]] = {
    Endpoint.RESPONSES: ({"input": WORDS, "max_output_tokens": 8}, "resp_"),
    Endpoint.MESSAGES: ({"messages": [{"role": "user", "content": WORDS}], "max_tokens": 8}, "msg_"),
}


@pytest.mark.parametrize("endpoint", OTHER_APIS)
@pytest.mark.parametrize("connector", NAMES)
async def test_a_turn_is_split_where_the_legs_can_carry_it(connector: str, endpoint: Endpoint) -> None:
    body, id_prefix = OTHER_APIS[endpoint]
    async with AsyncExitStack() as stack:
        fleet = await ConnectorFleet.start(stack, connector, "P1 D1")
        field = fleet.field
        turn = await field.post(endpoint, {"model": "sim", **body})
        receipt = field.newest()
        if endpoint in fleet.connector.endpoints:
            assert (turn.status, receipt.route) == (200, Route.SPLIT)
            assert turn.body["id"].startswith(id_prefix)
        elif fleet.connector.decodes_alone:
            assert (turn.status, receipt.route, receipt.reason) == (200, Route.LOCAL, "endpoint_not_split")
            assert not fleet.engines(Leg.PREFILL)[0].received
        else:
            assert (turn.status, receipt.error) == (503, "NoWorkerError")
        assert fleet.used_twice() == 0
        await fleet.rest()


@pytest.mark.parametrize("connector", [name for name in NAMES if Endpoint.RESPONSES in CONNECTORS[name].endpoints])
async def test_a_tenants_response_is_asked_for_again_under_another_name(connector: str, tmp_path: Path) -> None:
    """Its id shows whose it is; some legs meet by it, which they may once."""
    keys = tmp_path / "keys.toml"
    write_keys(keys, client("one"))
    async with AsyncExitStack() as stack:
        fleet = await ConnectorFleet.start(stack, connector, "P1 P2 D1", keys_file=str(keys))
        field = fleet.field
        failing = fleet.order(Leg.PREFILL, Order(FaultKind.ERROR, status=500))
        body = {"model": "sim", "input": WORDS, "max_output_tokens": 8, "request_id": "mine"}
        turn = await field.post("/v1/responses", body, bearer("one"))
        assert (turn.status, failing.orders[0].times) == (200, 0), turn.body
        named = [json.loads(one.body)["request_id"] for each in fleet.engines(Leg.PREFILL) for one in each.received]
        assert len(set(named)) == 2
        assert "mine" not in named
        assert fleet.used_twice() == 0
        await fleet.rest()


@pytest.mark.parametrize("connector", NAMES)
async def test_what_is_passed_through_goes_to_who_can_compute_it(connector: str) -> None:
    """To an engine that needs a peer for each request it would be a refusal, or the end. None is needed for tokens."""
    said = {"model": "sim", "messages": [{"role": "user", "content": WORDS}]}
    async with AsyncExitStack() as stack:
        fleet = await ConnectorFleet.start(stack, connector, "P1 D1")
        field = fleet.field
        for path, is_computed in (("/v1/chat/completions/batch", True), ("/v1/embeddings", True), ("/tokenize", False)):
            turn = await field.post(path, said)
            is_sent = fleet.connector.decodes_alone or not is_computed
            assert (turn.status != 503) is is_sent, turn.body
        await field.add("R1")
        assert (await field.post("/v1/embeddings", said)).status != 503
        await fleet.rest()
