"""What goes wrong with handoffs, as it does on real engines: counted, and visible in status or text."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from ppd.servers.sim.core.config import LoadFailurePolicy
from ppd.servers.sim.core.counters import Trap

HI = [{"role": "user", "content": "Tell me about the sea and the ships on it, at some length."}]


@pytest.mark.parametrize("block_ids", [None, [], [[]]])
async def test_a_pull_without_blocks_kills_the_engine_and_all_its_requests(lab: Any, block_ids: Any) -> None:
    p, d = await lab.start("P"), await lab.start("D", time_scale=0.2)
    bystander = asyncio.create_task(lab.chat(d, HI, max_tokens=1000, ignore_eos=True))
    await lab.until(lambda: d.scheduler.running == 1)
    params = await lab.prefill(p, HI)
    answer = await lab.chat(d, HI, kv_transfer_params=params | {"remote_block_ids": block_ids})
    assert answer.status == 500
    assert answer.json["error"]["type"] == "InternalServerError"
    assert (await bystander).status == 500
    assert (await lab.chat(d, HI)).status == 500
    assert (await lab.fetch(d, "/health")).status == 503
    assert d.counters.traps == {Trap.NO_REMOTE_BLOCKS: 1}


async def test_fewer_blocks_than_the_prompt_needs_kill_the_engine(lab: Any) -> None:
    p, d = await lab.start("P"), await lab.start("D")
    params = await lab.prefill(p, HI)
    answer = await lab.chat(d, [*HI, *HI], kv_transfer_params=params)
    assert answer.status == 500
    assert d.counters.traps == {Trap.TOO_FEW_BLOCKS: 1}


@pytest.mark.parametrize("field", ["remote_host", "remote_port", "remote_engine_id", "remote_request_id"])
async def test_a_pull_without_an_address_hangs_until_the_client_leaves_and_its_blocks_are_lost(
    lab: Any, field: str
) -> None:
    p, d = await lab.start("P"), await lab.start("D")
    params = await lab.prefill(p, HI)
    del params[field]
    leg = asyncio.create_task(lab.chat(d, HI, kv_transfer_params=params))
    await lab.until(lambda: d.scheduler.pulling == 1)
    assert (await lab.chat(d, [{"role": "user", "content": "another"}])).status == 200
    assert not leg.done()
    used = d.pool.used
    leg.cancel()
    await lab.until(lambda: d.counters.finished["abort"] == 1)
    assert (d.pool.used, d.scheduler.pulling) == (used, 0)
    assert used > 0
    assert d.counters.traps == {Trap.NO_REMOTE_ADDRESS: 1}


async def test_a_used_handoff_brings_wrong_text(lab: Any) -> None:
    p, first, second, r = await lab.start("P"), await lab.start("D"), await lab.start("D"), await lab.start("R")
    params = await lab.prefill(p, HI)
    expected = (await lab.chat(r, HI)).text
    assert (await lab.chat(first, HI, kv_transfer_params=params)).text == expected
    again = await lab.chat(second, HI, kv_transfer_params=params)
    assert again.status == 200
    assert again.text != expected
    assert p.counters.traps == {Trap.USED_HANDOFF: 1}
    assert p.counters.notifications_after_expiry == 1


async def test_an_expired_handoff_brings_wrong_text(lab: Any, clock: Any) -> None:
    p, d, r = await lab.start("P", now=clock), await lab.start("D"), await lab.start("R")
    params = await lab.prefill(p, HI)
    clock.advance(30)
    answer = await lab.chat(d, HI, kv_transfer_params=params)
    assert answer.status == 200
    assert answer.text != (await lab.chat(r, HI)).text
    assert p.counters.traps == {Trap.EXPIRED_HANDOFF: 1}
    assert (p.counters.expired_handoffs, p.pool.used) == (1, 0)


async def test_a_lease_in_time_is_no_trap(lab: Any, clock: Any) -> None:
    p, d, r = await lab.start("P", now=clock), await lab.start("D"), await lab.start("R")
    params = await lab.prefill(p, HI)
    clock.advance(29)
    answer = await lab.chat(d, HI, kv_transfer_params=params)
    assert answer.text == (await lab.chat(r, HI)).text
    assert not p.counters.traps


async def test_leases_end_by_themselves_when_nobody_asks(lab: Any) -> None:
    p = await lab.start("P", lease_s=0.01)
    await lab.prefill(p, HI)
    await lab.until(lambda: p.counters.expired_handoffs == 1)
    assert p.pool.used == 0


async def test_an_unknown_request_id_brings_wrong_text(lab: Any) -> None:
    p, d, r = await lab.start("P"), await lab.start("D"), await lab.start("R")
    params = await lab.prefill(p, HI)
    answer = await lab.chat(d, HI, kv_transfer_params=params | {"remote_request_id": "never"})
    assert answer.text != (await lab.chat(r, HI)).text
    assert p.counters.traps == {Trap.UNKNOWN_HANDOFF: 1}
    assert p.pinned == 1


async def test_another_engine_at_the_address_is_a_failed_load(lab: Any) -> None:
    p, other, d = await lab.start("P"), await lab.start("P"), await lab.start("D")
    params = await lab.prefill(p, HI)
    answer = await lab.chat(d, HI, kv_transfer_params=params | {"remote_port": other.side_address[1]})
    assert answer.status == 500
    assert other.counters.traps == {Trap.WRONG_ENGINE: 1}
    assert d.counters.failed_transfers == 1


@pytest.mark.parametrize("settings", [{"model": "other"}, {"block_size": 32}])
async def test_engines_of_another_make_do_not_exchange_kv(lab: Any, settings: dict[str, Any]) -> None:
    p, d = await lab.start("P"), await lab.start("D", **settings)
    answer = await lab.chat(d, HI, kv_transfer_params=await lab.prefill(p, HI))
    assert answer.status == 500
    assert d.counters.failed_transfers == 1


@pytest.mark.parametrize(("policy", "status"), [(LoadFailurePolicy.FAIL, 500), (LoadFailurePolicy.RECOMPUTE, 200)])
async def test_an_unreachable_p_is_a_failed_load(lab: Any, policy: LoadFailurePolicy, status: int) -> None:
    p, d, r = await lab.start("P"), await lab.start("D", load_failure_policy=policy), await lab.start("R")
    params = await lab.prefill(p, HI)
    answer = await lab.chat(d, HI, kv_transfer_params=params | {"remote_port": 1})
    assert answer.status == status
    assert (d.counters.failed_transfers, d.pool.used) == (1, 0)
    if status == 200:
        assert answer.text == (await lab.chat(r, HI)).text
        assert d.counters.external_kv_tokens == 0
    else:
        assert d.counters.finished["error"] == 1


async def test_a_failed_load_in_a_stream_comes_after_the_status(lab: Any) -> None:
    p, d = await lab.start("P"), await lab.start("D")
    params = await lab.prefill(p, HI)
    answer = await lab.chat(d, HI, stream=True, kv_transfer_params=params | {"remote_port": 1})
    assert answer.status == 200
    assert [chunk["error"]["code"] for chunk in answer.chunks] == [500]
    assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_a_rejected_decode_leg_frees_ps_blocks(lab: Any) -> None:
    p, d = await lab.start("P"), await lab.start("D")
    params = await lab.prefill(p, HI)
    answer = await lab.chat(d, HI, kv_transfer_params=params, max_tokens=0)
    assert answer.status == 400
    await lab.until(lambda: p.pinned == 0)
    assert (p.pool.used, p.counters.notifications_after_expiry) == (0, 0)


async def test_a_queued_decode_leg_that_leaves_frees_ps_blocks(lab: Any) -> None:
    p, d = await lab.start("P"), await lab.start("D", max_num_seqs=1, time_scale=0.2)
    busy = asyncio.create_task(lab.chat(d, HI, max_tokens=1000, ignore_eos=True))
    await lab.until(lambda: d.scheduler.running == 1)
    leg = asyncio.create_task(lab.chat(d, HI, kv_transfer_params=await lab.prefill(p, HI)))
    await lab.until(lambda: d.scheduler.waiting == 1)
    leg.cancel()
    await lab.until(lambda: p.pinned == 0)
    assert d.counters.external_kv_tokens == 0, "it never reached the engine's batch"
    busy.cancel()
    for task in (leg, busy):
        with suppress(asyncio.CancelledError):
            await task


async def test_heartbeats_keep_a_queued_prompts_lease(lab: Any, clock: Any) -> None:
    p = await lab.start("P", now=clock)
    d = await lab.start("D", max_num_seqs=1, time_scale=0.2, lease_s=0.05)
    busy = asyncio.create_task(lab.chat(d, HI, max_tokens=1000, ignore_eos=True))
    await lab.until(lambda: d.scheduler.running == 1)
    leg = asyncio.create_task(lab.chat(d, HI, kv_transfer_params=await lab.prefill(p, HI)))
    await lab.until(lambda: d.scheduler.waiting == 1)
    clock.advance(25)
    begun = clock()
    await lab.until(lambda: p.handoffs.next_deadline == begun + 20)
    assert p.pinned == 1
    for task in (leg, busy):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(lab: Any, stream: bool) -> None:
    r = await lab.start("R", time_scale=0.2)
    body = {"messages": HI, "max_tokens": 5000, "ignore_eos": True, "stream": stream}
    if stream:
        async with lab.session.post(f"http://{r.address}/v1/chat/completions", json=body) as answer:
            await answer.content.readline()
            assert r.pool.used > 0
    else:
        leg = asyncio.create_task(lab.post(r, "/v1/chat/completions", body))
        await lab.until(lambda: r.scheduler.running == 1)
        leg.cancel()
    await lab.until(lambda: r.counters.finished["abort"] == 1)
    assert (r.pool.used, r.scheduler.running) == (0, 0)


async def test_a_client_that_leaves_ps_leg_leaves_no_handoff(lab: Any) -> None:
    p = await lab.start("P", time_scale=1.0)
    leg = asyncio.create_task(
        lab.chat(p, [{"role": "user", "content": "x" * 20_000}], kv_transfer_params={"do_remote_decode": True})
    )
    await lab.until(lambda: p.scheduler.running == 1)
    leg.cancel()
    await lab.until(lambda: p.counters.finished["abort"] == 1)
    assert (p.pinned, p.pool.used) == (0, 0)
