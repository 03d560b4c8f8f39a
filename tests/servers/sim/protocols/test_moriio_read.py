"""MoRIIO's READ mode: D is given what P answered, and reads the blocks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ppd.servers.sim.core.config import LoadFailurePolicy
from ppd.servers.sim.core.counters import Trap
from ppd.servers.sim.core.fault_orders import FaultKind, Faults, Order
from tests.servers.sim.protocols.keyed_legs import HI, Proxy, start


async def answered(proxy: Proxy) -> dict[str, Any]:
    """What D must be told of P's answer."""
    params = (await proxy.leg(proxy.p, "k")).json["kv_transfer_params"]
    return {name: params[name] for name in ("remote_engine_id", "remote_block_ids", "tp_size")}


async def test_d_is_given_what_p_answered(lab: Any) -> None:
    proxy = await start(lab, "moriio_read")
    blocks = await answered(proxy)
    for name in blocks:
        refused = await proxy.leg(proxy.d, "k", change=blocks | {name: None})
        assert (refused.status, refused.json["error"]["param"]) == (400, f"kv_transfer_params.{name}")
    assert (await proxy.leg(proxy.d, "k", change=blocks)).text == await lab.expected(HI)
    assert proxy.d.counters.external_kv_tokens == proxy.d.counters.prompt_tokens
    assert lab.is_quiet(proxy.p)
    assert (await proxy.leg(proxy.d, "k", change=blocks)).status == 500, "a second time"
    assert proxy.p.counters.traps == {Trap.USED_KEY: 1}


@pytest.mark.parametrize(("policy", "status"), [(LoadFailurePolicy.FAIL, 500), (LoadFailurePolicy.RECOMPUTE, 200)])
@pytest.mark.parametrize("kind", [FaultKind.EXPIRE, FaultKind.ABSENT, FaultKind.KILL_AT_TRANSFER])
async def test_a_prefill_that_is_gone(lab: Any, kind: FaultKind, policy: LoadFailurePolicy, status: int) -> None:
    late = {"meeting_timeout_s": 0.05} if kind is FaultKind.ABSENT else {}
    proxy = await start(lab, "moriio_read", load_failure_policy=policy, **late)
    proxy.p.faults = Faults([Order(kind)])
    from_d = await proxy.leg(proxy.d, "k", change=await answered(proxy))
    assert (from_d.status, proxy.d.counters.failed_transfers, lab.is_quiet(proxy.d)) == (status, 1, True)
    assert proxy.d.counters.external_kv_tokens == 0


@pytest.mark.parametrize("leaks", [False, True])
async def test_a_client_that_leaves_while_d_reads(lab: Any, leaks: bool) -> None:
    proxy = await start(lab, "moriio_read")
    p, d = proxy.p, proxy.d
    blocks = await answered(proxy)
    p.faults, d.faults = Faults(wedge=["*"]), Faults([Order(FaultKind.LEAK)] if leaks else [])
    leg = asyncio.create_task(proxy.leg(d, "k", change=blocks))
    await lab.until(lambda: d.scheduler.pulling == 1)
    leg.cancel()
    await lab.until(lambda: d.counters.finished["abort"] == 1)
    p.faults = Faults()
    await lab.until(lambda: d.scheduler.pulling == 0)
    assert (d.pool.used > 0) == leaks
