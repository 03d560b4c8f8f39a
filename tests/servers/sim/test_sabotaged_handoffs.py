"""Faults between two engines: whose blocks stay pinned, and who is told."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from ppd.servers.sim.core.config import LoadFailurePolicy
from ppd.servers.sim.core.fault_orders import FaultKind, FaultLeg, FaultPhase, Faults, Order

HI = [{"role": "user", "content": "Tell me about the sea and the ships on it, at some length."}]
HAND_OVER = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


async def answer_or_none(lab: Any, engine: Any, **fields: Any) -> Any:
    with suppress(aiohttp.ClientError):
        return await lab.chat(engine, HI, **fields)
    return None


@pytest.mark.parametrize(
    "member", ["remote_engine_id", "remote_block_ids", "remote_host", "remote_port", "remote_request_id", "tp_size"]
)
async def test_p_answers_with_an_incomplete_handoff(lab: Any, member: str) -> None:
    p = await lab.start("P")
    p.faults = Faults([Order(FaultKind.HANDOFF, member=member)])
    params = await lab.prefill(p, HI)
    complete = await lab.prefill(p, HI)
    assert complete.keys() - params.keys() == {member}
    assert p.pinned == 2


async def test_p_answers_without_a_handoff(lab: Any) -> None:
    p = await lab.start("P")
    p.faults = Faults([Order(FaultKind.HANDOFF)])
    answer = await lab.chat(p, HI, **HAND_OVER)
    assert answer.status == 200
    assert "kv_transfer_params" not in answer.json
    assert p.pinned == 1


async def test_a_prefill_that_p_aborts_pins_nothing(lab: Any) -> None:
    p = await lab.start("P")
    p.faults = Faults([Order(FaultKind.ABORT)])
    answer = (await lab.chat(p, HI, **HAND_OVER)).json
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["kv_transfer_params"] is None
    await lab.until(lambda: lab.is_quiet(p))
    assert p.counters.finished == {"abort": 1}


@pytest.mark.parametrize("phase", [FaultPhase.HEAD, FaultPhase.EVENTS])
async def test_a_prefill_whose_answer_is_lost_stays_pinned_for_its_lease(
    lab: Any, phase: FaultPhase, clock: Any
) -> None:
    p = await lab.start("P", now=clock)
    p.faults = Faults([Order(FaultKind.RESET, phase=phase)])
    assert await answer_or_none(lab, p, **HAND_OVER) is None
    assert p.pinned == 1
    clock.advance(30)
    await lab.fetch(p, "/metrics")
    assert (lab.is_quiet(p), p.counters.expired_handoffs) == (True, 1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("order", "pinned"),
    [
        (Order(FaultKind.ERROR, status=503), 1),
        (Order(FaultKind.RESET), 1),
        (Order(FaultKind.CLOSE), 1),
        (Order(FaultKind.PAGE), 1),
        (Order(FaultKind.BODY), 1),
        (Order(FaultKind.LOAD), 1),
        (Order(FaultKind.ABORT), 0),
        (Order(FaultKind.ERROR, phase=FaultPhase.HEAD), 0),
        (Order(FaultKind.RESET, phase=FaultPhase.HEAD), 0),
        (Order(FaultKind.BODY, phase=FaultPhase.HEAD), 0),
        (Order(FaultKind.CLOSE, phase=FaultPhase.EVENTS), 0),
    ],
    ids=lambda value: f"{value.kind}-{value.phase}" if isinstance(value, Order) else "",
)
async def test_what_never_reached_ds_engine_leaves_ps_blocks_pinned(
    lab: Any, order: Order, pinned: int, stream: bool
) -> None:
    p, d = await lab.start("P"), await lab.start("D")
    params = await lab.prefill(p, HI)
    d.faults = Faults([Order(order.kind, phase=order.phase, status=order.status, leg=FaultLeg.DECODE)])
    await answer_or_none(lab, d, stream=stream, kv_transfer_params=params)
    await lab.until(lambda: lab.is_quiet(d) and p.pinned == pinned)
    assert not p.counters.traps and not d.counters.traps
    again = await lab.split(p, d, HI)
    assert again.status == 200
    assert p.pinned == pinned


@pytest.mark.parametrize(("policy", "status"), [(LoadFailurePolicy.FAIL, 500), (LoadFailurePolicy.RECOMPUTE, 200)])
async def test_a_load_that_fails_on_order(lab: Any, policy: LoadFailurePolicy, status: int) -> None:
    p, d = await lab.start("P"), await lab.start("D", load_failure_policy=policy)
    d.faults = Faults([Order(FaultKind.LOAD)])
    assert (await lab.split(p, d, HI)).status == status
    assert (d.counters.failed_transfers, p.pinned) == (1, 1)


@pytest.mark.parametrize("is_on_p", [True, False])
async def test_a_wedged_transfer_never_arrives_and_health_stays_green(lab: Any, is_on_p: bool) -> None:
    p, other, d = await lab.start("P"), await lab.start("P"), await lab.start("D", peer_timeout_s=0.2)
    if is_on_p:
        p.faults = Faults(wedge=["*"])
    else:
        d.faults = Faults(wedge=[p.engine_id])
    leg = asyncio.create_task(lab.split(p, d, HI))
    await lab.until(lambda: d.scheduler.pulling == 1)
    assert (await lab.split(other, d, [{"role": "user", "content": "by another way"}])).status == 200
    assert (await lab.chat(d, [{"role": "user", "content": "here"}])).status == 200
    assert {(await lab.fetch(engine, "/health")).status for engine in (p, d)} == {200}
    assert (leg.done(), d.scheduler.pulling, p.pinned) == (False, 1, 1)
    (p if is_on_p else d).faults = Faults()
    assert (await leg).status == 500
    assert d.counters.failed_transfers == 1
    await lab.until(lambda: lab.is_quiet(d))


@pytest.mark.parametrize("leaks", [False, True])
async def test_a_client_that_leaves_a_wedged_transfer_frees_ds_blocks_only_when_it_ends(lab: Any, leaks: bool) -> None:
    p, d = await lab.start("P"), await lab.start("D")
    d.faults = Faults([Order(FaultKind.LEAK)] if leaks else [], wedge=["*"])
    leg = asyncio.create_task(lab.split(p, d, HI))
    await lab.until(lambda: d.scheduler.pulling == 1)
    leg.cancel()
    await lab.until(lambda: d.counters.finished["abort"] == 1)
    assert d.pool.used > 0
    d.faults = Faults()
    await lab.until(lambda: d.scheduler.pulling == 0)
    assert (d.pool.used > 0) == leaks


@pytest.mark.parametrize(("policy", "status"), [(LoadFailurePolicy.FAIL, 500), (LoadFailurePolicy.RECOMPUTE, 200)])
async def test_a_p_that_dies_as_d_reads(lab: Any, policy: LoadFailurePolicy, status: int) -> None:
    p, d = await lab.start("P"), await lab.start("D", load_failure_policy=policy)
    params = await lab.prefill(p, HI)
    p.faults = Faults([Order(FaultKind.KILL_AT_TRANSFER)])
    assert (await lab.chat(d, HI, kv_transfer_params=params)).status == status
    assert (p.is_dead, d.counters.failed_transfers, d.pool.used) == (True, 1, 0)


async def test_a_deaf_engine_refuses_connections_and_finishes_what_it_has(lab: Any) -> None:
    r = await lab.start(time_scale=0.2)
    before = r.address
    await asyncio.gather(lab.chat(r, HI), lab.chat(r, HI))  # leaves one connection for the stream, and an idle one
    streaming = asyncio.create_task(lab.chat(r, HI, max_tokens=50, ignore_eos=True))
    await lab.until(lambda: r.scheduler.running == 1)
    r.faults = Faults(deaf_s=3600)
    with pytest.raises(aiohttp.ClientError):
        await lab.chat(r, HI)
    assert (await streaming).status == 200
    r.faults = Faults()
    await until_answered(lab, r)
    assert r.address == before


async def test_deafness_is_ordered_over_http(lab: Any) -> None:
    r = await lab.start()
    assert (await lab.post(r, "/faults", {"deaf_s": 3600})).status == 200
    host, _, port = r.address.partition(":")
    with pytest.raises(ConnectionRefusedError):
        async with asyncio.timeout(60):
            while True:
                with suppress(ConnectionResetError):  # whoever was just being accepted is dropped
                    _, writer = await asyncio.open_connection(host, int(port))
                    writer.close()


async def test_deafness_ends_by_itself(lab: Any) -> None:
    r = await lab.start()
    r.faults = Faults(deaf_s=0.01)
    await until_answered(lab, r)
    assert (await lab.chat(r, HI)).status == 200


async def test_deafness_is_not_cut_short_by_an_earlier_one(lab: Any) -> None:
    r = await lab.start()
    r.faults = Faults(deaf_s=3600)
    r.faults = Faults(deaf_s=3600)
    for _ in range(20):
        await asyncio.sleep(0)
    with pytest.raises(aiohttp.ClientConnectorError):
        await lab.chat(r, HI)


async def until_answered(lab: Any, engine: Any) -> None:
    async with asyncio.timeout(60):
        while await answer_or_none(lab, engine) is None:
            await asyncio.sleep(0)


async def test_a_killed_engine_takes_all_it_has_along(lab: Any) -> None:
    p, d, r = await lab.start("P"), await lab.start("D"), await lab.start("R")
    params = await lab.prefill(p, HI)
    bystander = asyncio.create_task(answer_or_none(lab, p, max_tokens=20_000, ignore_eos=True))
    await lab.until(lambda: p.scheduler.running == 1)
    p.faults = Faults([Order(FaultKind.KILL, leg=FaultLeg.PREFILL)])
    assert await answer_or_none(lab, p, **HAND_OVER) is None
    assert await bystander is None
    assert lab.is_quiet(p)
    with pytest.raises(aiohttp.ClientConnectorError):
        await lab.fetch(p, "/health")
    assert (await lab.chat(d, HI, kv_transfer_params=params)).status == 500, "its KV went with it"
    host, _, port = p.address.partition(":")
    risen = await lab.start("P", host=host, port=int(port))
    assert (await lab.split(risen, d, HI)).text == (await lab.chat(r, HI)).text


async def test_a_killed_d_tells_nobody(lab: Any) -> None:
    p, d = await lab.start("P"), await lab.start("D", max_num_seqs=1, time_scale=0.2)
    params = await lab.prefill(p, HI)
    busy = asyncio.create_task(answer_or_none(lab, d, stream=True, max_tokens=20_000, ignore_eos=True))
    await lab.until(lambda: d.scheduler.running == 1)
    queued = asyncio.create_task(answer_or_none(lab, d, kv_transfer_params=params))
    await lab.until(lambda: d.scheduler.waiting == 1)
    d.faults = Faults([Order(FaultKind.KILL)])
    assert await answer_or_none(lab, d) is None
    assert (await busy, await queued) == (None, None)
    await lab.fetch(p, "/health")  # a turn of P, in which a notice would have come
    assert (p.pinned, lab.is_quiet(d)) == (1, True)
