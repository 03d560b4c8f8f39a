"""Turns through a sidecar, over real sockets: what the engines are asked, and what the client gets."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ppd.proxy.failures import Leg
from ppd.proxy.fleet.worker import Role
from ppd.proxy.upstream.sidecar import legs_told
from ppd.servers.sidecar.allow_list import AllowList
from tests.servers.sidecar.site import BODY, Site

pytestmark = pytest.mark.slow

PARAMS = "kv_transfer_params"
FORGED = {"do_remote_prefill": True, "remote_host": "10.9.9.9", "remote_port": 1}


async def replicas_text(site: Site) -> str:
    """Of the same conversation on one engine, asked directly."""
    url = f"http://{site.engines['P1'].address}/v1/chat/completions"
    async with site.session.post(url, json=BODY) as response:
        return str((await response.json())["choices"][0]["message"]["content"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_is_split_or_local_as_its_header_says(stream: bool) -> None:
    async with Site.of() as site:
        split = await site.ask({**site.to_p, "X-Request-Id": "gateway-1"}, stream=stream)
        asked_p, asked_d = site.received("P1"), site.received("D1")
        local = await site.ask(stream=stream)
        assert (split.status, split.text) == (local.status, local.text) == (200, await replicas_text(site))
        assert (split.headers["X-PPD-Route"], local.headers["X-PPD-Route"]) == ("SPLIT", "LOCAL")
        assert split.headers["X-Request-Id"] == "gateway-1"
        assert "X-PPD-Decode" not in split.headers, "which worker it is only the picker can say"
        legs = [engine.received[0] for engine in site.engines.values()]
        ids = [{k.lower(): v for k, v in leg.headers.items()}["x-request-id"] for leg in legs]
        assert all(leg_id.startswith("gateway-1-") for leg_id in ids) and len(set(ids)) == 2
        assert len(asked_p) == len(asked_d) == 1
        assert len(site.received("P1")) == 2, "the replica's question, and no leg of the turn without a header"
        await site.until(site.is_idle)


async def test_what_an_r_computes_alone_is_no_local_turn() -> None:
    async with Site.of(role=Role.REPLICA) as site:
        alone, split = await site.ask({"X-Request-Id": "a"}), await site.ask(site.to_p)
        assert (alone.headers["X-PPD-Route"], split.headers["X-PPD-Route"]) == ("REPLICA", "SPLIT")
        receipt = site.sidecar.state.receipts.find("a")
        assert receipt is not None
        assert [leg.kind for leg in receipt.legs] == [Leg.REPLICA]
        metrics = (await site.get("/ppd/metrics")).raw.decode()
        assert 'ppd_turns_total{reason="no_prefill_named",route="REPLICA"} 1.0' in metrics
        await site.until(site.is_idle)


async def test_what_d_gets_is_what_p_has_answered_and_no_claim_of_the_clients() -> None:
    async with Site.of() as site:
        answer = await site.ask(site.to_p, stream=True, kv_transfer_params=FORGED)
        ((to_p,), (to_d,)) = site.received("P1"), site.received("D1")
        assert to_p[PARAMS]["do_remote_decode"] and to_p[PARAMS]["remote_host"] is None
        assert to_d[PARAMS]["do_remote_prefill"]
        assert to_d[PARAMS]["remote_engine_id"] == site.engines["P1"].engine_id
        assert answer.status == 200


async def test_without_a_header_no_transfer_member_reaches_the_engine() -> None:
    async with Site.of() as site:
        answer = await site.ask(kv_transfer_params=FORGED, vllm_xargs={"kv_transfer_params": FORGED, "a": 1})
        assert answer.status == 200
        assert site.received("D1") == [{**BODY, "vllm_xargs": {"a": 1}}]


@pytest.mark.parametrize(
    "named", ["10.9.9.9:8100", "nowhere", "127.0.0.1", "127.0.0.1:0", "localhost:8100", "[::1]:8100", "127.0.0.1:1/x"]
)
async def test_a_p_that_is_not_allowed_is_sent_nothing(named: str) -> None:
    async with Site.of() as site:
        answer = await site.ask({"x-prefiller-host-port": named})
        assert answer.status == 403
        error = answer.body["error"]
        assert (error["param"], error["code"]) == ("x-prefiller-host-port", "prefill_not_allowed")
        assert named not in error["message"]
        assert site.received("P1") == site.received("D1") == []


async def test_of_several_p_the_first_is_asked() -> None:
    async with Site.of() as site:
        listed = f"{site.engines['P1'].address}, 127.0.0.1:1"
        assert (await site.ask({"x-prefiller-host-port": listed})).headers["X-PPD-Route"] == "SPLIT"
        assert len(site.received("P1")) == 1


async def test_each_prompt_of_a_list_is_split() -> None:
    async with Site.of() as site:
        body = {"model": "sim", "prompt": ["one " * 40, "two " * 40], "max_tokens": 4}
        async with site.session.post(f"{site.base_url}/v1/completions", json=body, headers=site.to_p) as response:
            choices = (await response.json())["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert len(site.received("P1")) == len(site.received("D1")) == 2


async def test_an_operators_header_for_the_picker_is_not_heard() -> None:
    async with Site.of() as site:
        assert (await site.ask({"X-PPD-Force-Route": "SPLIT"})).headers["X-PPD-Route"] == "LOCAL"


async def test_an_engine_is_not_its_own_p() -> None:
    async with Site.of() as site:
        answer = await site.ask({"x-prefiller-host-port": site.engines["D1"].address})
        assert (answer.status, answer.headers["X-PPD-Reason"]) == (200, "prefill_is_own")
        assert site.received("D1") == [BODY]


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/chat/completions", {**BODY, "n": 2}, "single_engine"),
        ("/v1/completions", {"model": "sim", "prompt": "hi", "echo": True, "max_tokens": 1}, "single_engine"),
        ("/v1/responses", {"model": "sim", "input": "hi", "previous_response_id": "resp_1"}, "stored_response"),
    ],
)
async def test_where_no_p_can_have_a_part_the_engine_computes_alone(path: str, body: Any, reason: str) -> None:
    async with Site.of() as site:
        async with site.session.post(site.base_url + path, json=body, headers=site.to_p) as response:
            assert response.headers["X-PPD-Reason"] == reason
        assert site.received("P1") == []


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_where_the_legs_carry_no_such_turn_the_engine_computes_alone(path: str) -> None:
    """TensorRT-LLM's would be computed twice, or refused."""
    said = {"model": "sim", "input": "hi"} if "responses" in path else {**BODY, "max_tokens": 4}
    async with Site.of(connector="trtllm", engine={"connector": "trtllm"}) as site:
        async with site.session.post(site.base_url + path, json=said, headers=site.to_p) as response:
            assert (response.status, response.headers["X-PPD-Reason"]) == (200, "endpoint_not_split")
        assert site.received("P1") == []
        assert (await site.ask(site.to_p)).headers["X-PPD-Route"] == "SPLIT"
        assert (await site.ask(priority=5)).status == 200, "a member that this engine refuses is not sent"


@pytest.mark.parametrize("stream", [False, True])
async def test_who_names_a_p_is_told_how_its_leg_went(stream: bool) -> None:
    async with Site.of() as site:
        split, again, local = [await site.ask(to, stream=stream) for to in (site.to_p, site.to_p, None)]
        assert "X-PPD-Legs" not in local.headers
        first, second = (legs_told(answer.headers["X-PPD-Legs"]) for answer in (split, again))
        assert first is not None and second is not None
        assert (first.is_handed_over, first.cached_tokens) == (True, 0)
        assert second.cached_tokens, "it has been there before"
        ((leg,), _) = first.legs, second.legs
        assert (leg.kind, leg.status, leg.error) == ("prefill", 200, "")
        assert 0 <= leg.started_s <= leg.ended_s


async def test_who_names_a_p_that_is_not_allowed_is_told_so() -> None:
    async with Site.of(allow_list=AllowList("10.0.0.0/8")) as site:
        answer = await site.ask(site.to_p)
        told = legs_told(answer.headers["X-PPD-Legs"])
        assert (answer.status, answer.body["error"]["code"]) == (403, "prefill_not_allowed")
        assert told is not None
        assert [(leg.kind, leg.error) for leg in told.legs] == [("prefill", "prefill_not_allowed")]


class Defective:
    """In place of the dispatcher."""

    async def open(self, _: object) -> None:
        raise ValueError


async def test_a_defect_of_the_sidecar_closes_the_receipt_too() -> None:
    async with Site.of() as site:
        cast(Any, site.sidecar.turns)._router._dispatcher = Defective()
        answer = await site.ask({"X-Request-Id": "a"})
        receipt = site.sidecar.state.receipts.find("a")
        assert answer.status == 500 and receipt is not None
        assert (receipt.outcome, receipt.error) == ("failed", "internal_error")
