"""Turns through a sidecar with each connector whose legs it can run, before the strict simulated engines of each."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from ppd.proxy.connectors import CONNECTORS, is_of_sidecars
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.upstream.sidecar import legs_told
from ppd.servers.fleet.ports import free_ports
from ppd.servers.sidecar.allow_list import AllowList
from ppd.servers.sidecar.failed_legs import FailurePolicy, OnFailure
from ppd.servers.sidecar.prefills import HEADER
from ppd.servers.sim.core.fault_orders import FaultKind, FaultLeg, Faults, Order
from tests.servers.sidecar.site import BODY, CHAT, Answer, Site
from tests.support.fleet import start_engine

pytestmark = pytest.mark.slow

NAMES = [name for name in CONNECTORS if is_of_sidecars(name)]
NEEDY = ["nixl_push", "offload_p2p", "p2p_nccl"]  # without what they must know of P there is no SPLIT
THREE = "P1 D1 R1"


async def right_text(site: Site, **changes: Any) -> str:
    url = f"http://{site.engines['R1'].address}{CHAT}"
    async with site.session.post(url, json={**BODY, **changes, "stream": False}) as response:
        return str((await response.json())["choices"][0]["message"]["content"])


@pytest.mark.parametrize("connector", NAMES)
async def test_a_turn_is_split_as_the_proxy_splits_it(connector: str) -> None:
    async with Site.of(names=THREE, connector=connector) as site:
        for number, stream in enumerate((False, True)):
            said: Any = {"messages": [{"role": "user", "content": f"{number} {BODY['messages'][0]['content']}"}]}
            answer = await site.ask(site.to_p, stream=stream, **said)
            assert (answer.status, answer.text) == (200, await right_text(site, **said)), answer.raw
            assert answer.headers["X-PPD-Route"] == "SPLIT"
            told = legs_told(answer.headers["X-PPD-Legs"])
            assert told is not None and told.is_handed_over
            await site.until(site.is_idle)
        assert len(site.received("P1")) == len(site.received("D1")) == 2
        counters = [engine.counters for engine in site.engines.values()]
        assert not any(each.traps for each in counters)
        assert counters[1].external_kv_tokens > 0 or connector in ("none", "lmcache"), "D has taken P's KV"


@pytest.mark.parametrize("connector", NAMES)
async def test_where_p_fails_the_engine_computes_the_prompt_if_it_can(connector: str) -> None:
    async with Site.of(names=THREE, connector=connector) as site:
        site.engines["P1"].faults = Faults([Order(FaultKind.ERROR, status=500)])
        answer = await site.ask(site.to_p)
        if CONNECTORS[connector].decodes_alone:
            assert (answer.status, answer.text) == (200, await right_text(site)), answer.raw
            assert answer.headers["X-PPD-Reason"] == "prefill_failed"
        else:
            assert answer.status == 500, "its D could not"
        site.engines["D1"].pulls.expire()  # what it would keep for a P that has failed
        await site.until(site.is_idle)
        assert (await site.ask(site.to_p)).status == 200, "the next turn"
        await site.until(site.is_idle)


@pytest.mark.parametrize("connector", ["nixl", "nixl_push", "sglang"])  # P then D; both at once; and P waits for D
async def test_a_client_that_leaves_ends_both_legs(connector: str) -> None:
    async with Site.of(names=THREE, connector=connector, engine={"time_scale": 20.0}) as site:
        asking = asyncio.create_task(site.ask(site.to_p, stream=True))
        await site.until(lambda: bool(site.engines["P1"].scheduler.sequences))
        asking.cancel()
        await asyncio.wait({asking})
        p_goes_on = connector == "nixl_push"  # until it has written
        ended = "D1" if p_goes_on else "P1"
        await site.until(lambda: site.engines[ended].counters.finished["abort"] == 1)
        if not p_goes_on:
            await site.until(site.is_idle)
        aborts = {name: engine.counters.finished["abort"] for name, engine in site.engines.items()}
        assert (aborts["P1"], aborts["D1"]) == {"nixl": (1, 0), "nixl_push": (0, 1), "sglang": (1, 1)}[connector]


@pytest.mark.parametrize("connector", ["nixl", "nixl_push", "sglang"])
async def test_where_p_is_asked_again_both_legs_have_another_key(connector: str) -> None:
    async def at_once(_: float) -> None:
        """In place of the pause."""

    policy = FailurePolicy(OnFailure.RETRY, 2)
    async with Site.of(names=THREE, connector=connector, policy=policy, pause=at_once) as site:
        site.engines["P1"].faults = Faults([Order(FaultKind.ERROR, status=503, leg=FaultLeg.PREFILL)])
        answer = await site.ask(site.to_p)
        assert (answer.status, answer.text) == (200, await right_text(site)), answer.raw
        assert len(site.received("P1")) == 2
        assert not any(engine.counters.traps for engine in site.engines.values()), "no key is used twice"


@pytest.mark.parametrize("connector", NEEDY)
async def test_of_a_p_that_is_only_listed_too_little_is_known(connector: str) -> None:
    async with Site.of(names=THREE, connector=connector, prefills={}) as site:  # which is in the list
        answer = await site.ask(site.to_p)
        assert not site.received("P1")
        if CONNECTORS[connector].decodes_alone:
            assert (answer.status, answer.headers["X-PPD-Reason"]) == (200, "missing_coordinates")
            assert answer.text == await right_text(site)
        else:
            assert is_left_alone(site, answer, "missing_coordinates")


async def test_a_p_whose_coordinates_are_told_need_not_be_listed() -> None:
    async with Site.of(names=THREE, connector="nixl_push", allow_list=AllowList()) as site:
        assert (await site.ask(site.to_p)).headers["X-PPD-Route"] == "SPLIT"
        assert (await site.ask({"x-prefiller-host-port": "127.0.0.1:9"})).status == 403


async def test_an_engine_that_would_stop_at_a_prompt_without_a_p_is_sent_none() -> None:
    async with Site.of(names=THREE, connector="p2p_nccl") as site:
        assert is_left_alone(site, await site.ask(), "no_prefill_named")
        assert is_left_alone(site, await site.ask(site.to_p, n=2), "single_engine")
        assert is_left_alone(site, await site.ask(path="/v1/chat/completions/batch"), "")
        assert (await site.ask(path="/tokenize")).status != 503, "no KV is needed for that"
        assert (await site.ask(site.to_p)).status == 200


async def test_an_sglang_engine_is_sent_what_its_d_refuses_and_its_r_answers() -> None:
    """A sidecar is not told which it is."""
    async with Site.of(names=THREE, connector="sglang") as site:
        assert (await site.ask()).status == 400
    async with Site.of(names="R1 D1", connector="sglang", engine_of="R1") as site:
        answer = await site.ask()
        assert (answer.status, answer.text) == (200, await right_text(site)), answer.raw


async def test_one_of_p2p_nccl_that_is_patched_and_says_so_is_sent_its_prompts() -> None:
    async with Site.of(names=THREE, connector="p2p_nccl", engine={"takes_plain": True}) as site:
        answer = await site.ask()
        assert (answer.status, answer.text) == (200, await right_text(site)), answer.raw


def is_left_alone(site: Site, answer: Answer, reason: str) -> bool:
    """Whether the turn was refused for want of a P, and the engine was sent nothing: another worker may take it."""
    told = (answer.status, answer.headers.get("X-PPD-Refused"), reason in answer.raw.decode())
    return told == (503, "no_worker", True) and not site.received("D1")


@pytest.mark.parametrize(("connector", "engine"), [("p2p_nccl", {"takes_plain": True}), ("nixl_push", {})])
async def test_a_turn_of_responses_is_split_where_the_legs_can_carry_it(connector: str, engine: dict[str, Any]) -> None:
    async with Site.of(names=THREE, connector=connector, engine=engine) as site:
        body = {"model": "sim", "input": "hi " * 40, "max_output_tokens": 4}
        async with site.session.post(f"{site.base_url}/v1/responses", json=body, headers=site.to_p) as response:
            reason = response.headers["X-PPD-Reason"]
            assert (response.status, reason) == (
                200,
                "prefill_named" if Endpoint.RESPONSES in CONNECTORS[connector].endpoints else "endpoint_not_split",
            )


async def test_trtllms_engine_is_sent_nothing_that_it_refuses() -> None:
    async with Site.of(connector="trtllm") as site:
        for to in (site.to_p, None):
            assert (await site.ask(to, priority=7, session_id="mine")).status == 200


async def test_a_p_that_is_named_by_its_host_is_followed_to_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, at = asyncio.get_running_loop(), "127.0.0.1"
    look_up = loop.getaddrinfo

    async def looked_up(host: str, port: int, **options: Any) -> Any:
        return await look_up(at if host == "p.test" else host, port, **options)

    monkeypatch.setattr(loop, "getaddrinfo", looked_up)
    (port,) = free_ports(1)
    async with Site.of(names="D1 R1", prefills={f"p.test:{port}": {}}) as site:
        for at in ("127.0.0.1", "127.0.0.2"):
            async with AsyncExitStack() as life:
                prefill = await start_engine(life, "P1", host=at, port=port)
                said: Any = {"messages": [{"role": "user", "content": f"{at} {BODY['messages'][0]['content']}"}]}
                answer = await site.ask({HEADER: f"p.test:{port}"}, **said)
                assert (answer.status, answer.text) == (200, await right_text(site, **said)), answer.raw
                assert answer.headers["X-PPD-Reason"] == "prefill_named"
                assert len(prefill.received) == 1
                await site.until(site.is_idle)


async def test_what_was_told_of_a_p_that_is_another_one_by_now_costs_no_time() -> None:
    """Its coordinates are those that were told at the start."""
    async with Site.of(names=THREE, connector="nixl_push") as site:
        port = int(site.engines["P1"].address.rpartition(":")[2])
        await site.kill("P1")
        async with AsyncExitStack() as life:
            await start_engine(life, "P1", port=port, connector="nixl_push")
            async with asyncio.timeout(10):
                answer = await site.ask(site.to_p)
            assert (answer.status, answer.text) == (200, await right_text(site)), answer.raw
            assert answer.headers["X-PPD-Reason"] == "handoff_failed"
            await site.until(lambda: not any(view.inflight for view in site.sidecar.state.registry.views()))
