"""A subset that Envoy names binds, however it is written, and whatever else the turn asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppd.proxy.config import Mode
from ppd.proxy.gateway.headers import DESTINATION, PREFILLER, SUBSET, SUBSET_NAMESPACE, subset
from ppd.proxy.gateway.messages import ProcessingRequest
from tests.proxy.gateway.envoy import D1, D2, P1, R1, USAGE, Envoy, mutation, proxy_of, refused

FLEET = (f"P={P1}", f"D={D1}", f"D={D2}", f"R={R1}")


def hint(value: Any) -> dict[str, Any]:
    return {SUBSET_NAMESPACE: {SUBSET: value}}


@pytest.mark.parametrize(
    ("metadata", "workers"),
    [
        ({}, None),
        ({SUBSET_NAMESPACE: {}}, None),
        ({SUBSET_NAMESPACE: {"another": D1}}, None),
        ({"envoy.lb": {SUBSET: D1}}, None),
        (hint(D1), {D1}),
        (hint(f"{D1}, {D2},"), {D1, D2}),
        (hint([D1, f" {D2} "]), {D1, D2}),
        (hint([]), set()),
        (hint(""), set()),
        (hint(None), set()),
        (hint([7, {"a": D1}]), set()),
    ],
)
def test_who_is_in_it(metadata: dict[str, dict[str, Any]], workers: set[str] | None) -> None:
    request = ProcessingRequest()
    for namespace, told in metadata.items():
        request.metadata_context.filter_metadata[namespace].update(told)
    assert subset(request.metadata_context) == workers


@pytest.mark.parametrize(
    ("value", "chosen"),
    [([D2], D2), ([R1, "10.9.9.9:1"], R1), (f"10.9.9.9:1,{D1}", D1), ([], None), (["10.9.9.9:1"], None), ([P1], None)],
)
async def test_a_turn_goes_to_one_of_these_or_nowhere(value: Any, chosen: str | None) -> None:
    envoy = Envoy(proxy_of(FLEET))
    await envoy.turn(metadata=hint(value))
    if chosen is None:
        status, headers, _ = refused(envoy.answers[-1])
        assert (status, headers["x-ppd-refused"]) == (503, "no_worker")
        assert envoy.is_idle
    else:
        assert mutation(envoy.answers[-1])[0][DESTINATION] == chosen
        envoy.call.lost()


async def test_a_split_takes_its_p_from_outside() -> None:
    envoy = Envoy(proxy_of(FLEET, mode=Mode.ALWAYS_SPLIT))
    await envoy.turn(metadata=hint([D2]))
    sent, _ = mutation(envoy.answers[-1])
    assert (sent[DESTINATION], sent[PREFILLER]) == (D2, P1)
    envoy.call.lost()


async def test_fallbacks_are_of_the_subset_too() -> None:
    envoy = Envoy(proxy_of(FLEET, mode=Mode.ALWAYS_LOCAL, picker_fallbacks=3))
    await envoy.turn(metadata=hint([D1, D2]))
    sent, _ = mutation(envoy.answers[-1])
    assert set(sent[DESTINATION].split(",")) == {D1, D2}
    envoy.call.lost()


@pytest.mark.parametrize("route", ["REPLICA", "LOCAL", "SPLIT"])
async def test_a_forced_route_does_not_lead_out_of_it(route: str) -> None:
    inside = [R1] if route != "REPLICA" else [D1]
    envoy = Envoy(proxy_of(FLEET, admin_key="operator"))
    await envoy.turn(headers={"x-ppd-force-route": route, "x-admin-key": "operator"}, metadata=hint(inside))
    if envoy.answers[-1].WhichOneof("response") == "immediate_response":
        assert refused(envoy.answers[-1])[0] == 503
    else:
        assert mutation(envoy.answers[-1])[0][DESTINATION] == inside[0]
    envoy.call.lost()
    assert envoy.is_idle


async def test_a_session_that_lives_outside_moves_in() -> None:
    proxy = proxy_of(FLEET, mode=Mode.ALWAYS_LOCAL)
    first, second = Envoy(proxy), Envoy(proxy)
    await first.turn(metadata=hint([D1]))
    answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "So"}}], "usage": USAGE}
    first.tell("response_headers", headers={":status": "200", "content-type": "application/json"})
    first.tell("response_body", body=json.dumps(answer).encode(), end_of_stream=True)
    await second.turn(metadata=hint([D2]))
    assert mutation(second.answers[-1])[0][DESTINATION] == D2
    second.call.lost()


async def test_a_stored_response_that_lies_outside_does_not_lead_out_of_it() -> None:
    proxy = proxy_of(FLEET, mode=Mode.ALWAYS_LOCAL)
    first, second = Envoy(proxy), Envoy(proxy)
    path = "/v1/responses"
    await first.turn(json.dumps({"model": "m", "input": "hi"}).encode(), path=path, metadata=hint([D1]))
    made = {"id": "resp_1", "output": [], "usage": {"input_tokens": 9, "output_tokens": 1, "total_tokens": 10}}
    first.tell("response_headers", headers={":status": "200", "content-type": "application/json"})
    first.tell("response_body", body=json.dumps(made).encode(), end_of_stream=True)
    body = {"model": "m", "input": "and?", "previous_response_id": "resp_1"}
    await second.turn(json.dumps(body).encode(), path=path, metadata=hint([D2]))
    assert mutation(second.answers[-1])[0][DESTINATION] == D2  # which says that it does not know the response
    second.call.lost()
    third = Envoy(proxy)
    await third.turn(json.dumps(body).encode(), path=path, metadata=hint([D1, D2]))
    assert mutation(third.answers[-1])[0][DESTINATION] == D1
    third.call.lost()
