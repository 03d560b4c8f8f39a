"""KV that goes from D to P: what D keeps after its answer, who reads it, and what wrong uses come to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ppd.servers.sim.core.config import LoadFailurePolicy
from ppd.servers.sim.core.counters import Trap
from ppd.servers.sim.core.fault_orders import FaultKind, FaultPhase, Faults, Order
from tests.servers.sim.test_conversations import FIRST, assistant, user

BOTH = {"bidirectional_kv_xfer": True}
LONG = [*FIRST[:1], user("Tell me of primes. " * 12)]
SALT = {"cache_salt": "of-this-leg"}


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def kept(lab: Any, p: Any, d: Any, **fields: Any) -> tuple[list[Any], dict[str, Any], Any]:
    """After a first turn over both: the second turn's messages, D's handle, and D's answer."""
    one = await lab.chat(d, LONG, kv_transfer_params=await lab.prefill(p, LONG), return_token_ids=True, **fields)
    source = one.chunks[-1] if fields.get("stream") else one.json
    return [*LONG, assistant(one.text), user("And then?")], source["kv_transfer_params"], one


@pytest.mark.parametrize("stream", [False, True])
async def test_p_reads_back_what_d_keeps_and_computes_only_what_is_new(lab: Any, stream: bool) -> None:
    p, d, r = await lab.start("P", **BOTH), await lab.start("D", **BOTH), await lab.start("R")
    second, handle, _ = await kept(lab, p, d, stream=stream)
    assert (handle["do_remote_decode"], handle["do_remote_prefill"], d.pinned) == (True, False, 1)
    before = p.counters.external_kv_tokens, p.counters.local_compute_tokens
    params = await lab.prefill(p, second, kv_transfer_params=handle, **SALT)
    tokens = handle["remote_num_tokens"]
    prompt = params["remote_num_tokens"]
    assert p.counters.external_kv_tokens - before[0] == tokens
    assert p.counters.local_compute_tokens - before[1] == prompt - tokens
    assert d.pinned == 0
    pulled = d.counters.pulled_blocks
    two = await lab.chat(d, second, kv_transfer_params=params)
    assert two.text == (await lab.chat(r, second)).text
    assert d.counters.pulled_blocks - pulled <= (prompt - tokens) // 16 + 2, "only what D lacked"
    assert not p.counters.traps
    assert not d.counters.traps


async def test_what_p_holds_already_is_not_read_again_and_d_is_told_so(lab: Any) -> None:
    p, d = await lab.start("P", **BOTH), await lab.start("D", **BOTH)
    second, handle, _ = await kept(lab, p, d, max_tokens=10)
    before = p.counters.external_kv_tokens
    await lab.prefill(p, second, kv_transfer_params=handle)
    assert p.counters.external_kv_tokens == before
    await lab.until(lambda: d.pinned == 0)
    assert p.pinned == 1


async def test_another_history_reads_wrong_kv_which_shows_in_the_text(lab: Any) -> None:
    p, d, r = await lab.start("P", **BOTH), await lab.start("D", **BOTH), await lab.start("R")
    second, handle, _ = await kept(lab, p, d)
    edited = [second[0], user("Tell me of circles. " * 12), *second[2:]]
    await lab.prefill(p, edited, kv_transfer_params=handle, **SALT)
    assert (await lab.chat(p, edited, **SALT)).text != (await lab.chat(r, edited)).text, "P's cache has it now"
    assert (await lab.chat(p, edited)).text == (await lab.chat(r, edited)).text, "but only under the leg's salt"


async def test_a_second_use_is_counted_by_name_and_shows_in_the_text(lab: Any) -> None:
    p, d, r = await lab.start("P", **BOTH), await lab.start("D", **BOTH), await lab.start("R")
    second, handle, _ = await kept(lab, p, d)
    await lab.prefill(p, second, kv_transfer_params=handle, **SALT)
    await lab.prefill(p, second, kv_transfer_params=handle, cache_salt="another-leg")
    assert d.counters.traps[Trap.USED_HANDOFF] == 1
    assert (await lab.chat(p, second, cache_salt="another-leg")).text != (await lab.chat(r, second)).text


async def test_p_does_not_read_what_d_is_about_to_give_up(lab: Any) -> None:
    clock = Clock()
    p = await lab.start("P", now=clock, **BOTH)
    d = await lab.start("D", now=clock, decoder_kv_blocks_ttl=60, **BOTH)
    second, handle, _ = await kept(lab, p, d)
    clock.now_s += 56.0
    asked = {"max_tokens": 1, "kv_transfer_params": handle}
    assert (await lab.chat(p, second, **asked, **SALT)).status == 500
    assert (p.pool.used, d.pinned) == (0, 1)
    clock.now_s += 5.0
    await lab.fetch(d, "/metrics")
    assert (d.pinned, d.counters.expired_handoffs) == (0, 1)


async def test_a_p_that_recomputes_what_it_cannot_read_waits_for_it_again_and_loses_its_blocks(lab: Any) -> None:
    """As seen on vLLM 0.32."""
    p = await lab.start("P", load_failure_policy=LoadFailurePolicy.RECOMPUTE, **BOTH)
    d = await lab.start("D", **BOTH)
    second, handle, _ = await kept(lab, p, d)
    p.faults = Faults([Order(FaultKind.LOAD)])
    asking = asyncio.create_task(lab.chat(p, second, max_tokens=1, kv_transfer_params=handle, **SALT))
    await lab.until(lambda: p.counters.traps[Trap.READ_AGAIN] == 1)
    used = p.pool.used
    asking.cancel()
    await asyncio.wait({asking})
    await lab.until(lambda: p.counters.finished["abort"] == 1)
    assert (p.pool.used, p.scheduler.sequences) == (used, [])
    assert used > 0


@pytest.mark.parametrize(
    ("member", "value", "named"),
    [
        *((name, None, name) for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")),
        ("remote_num_tokens", None, "remote_num_tokens"),
        ("remote_num_tokens", "734", "remote_num_tokens"),
        ("remote_block_ids", [1, 2], "remote_block_ids[0]"),
    ],
)
async def test_a_wrong_handle_is_refused_by_the_name_of_what_is_wrong(
    lab: Any, member: str, value: object, named: str
) -> None:
    p, d = await lab.start("P", **BOTH), await lab.start("D", **BOTH)
    second, handle, _ = await kept(lab, p, d)
    wrong = {name: value if name == member else each for name, each in handle.items()}
    answer = await lab.chat(p, second, max_tokens=1, kv_transfer_params=wrong)
    assert (answer.status, answer.json["error"]["param"]) == (400, f"kv_transfer_params.{named}")
    assert d.pinned == 1


async def test_a_d_keeps_nothing_of_a_turn_without_p_or_that_is_aborted(lab: Any) -> None:
    p, d = await lab.start("P", **BOTH), await lab.start("D", **BOTH)
    answer = await lab.chat(d, LONG)
    assert (answer.json["kv_transfer_params"], d.pinned) == (None, 0)
    d.faults = Faults([Order(FaultKind.ABORT, phase=FaultPhase.EVENTS)])
    answer = await lab.chat(d, LONG, kv_transfer_params=await lab.prefill(p, LONG), stream=True)
    assert (answer.chunks[-1]["choices"][0]["finish_reason"], d.pinned) == ("abort", 0)


async def test_a_p_that_cannot_read_back_hangs_on_a_handle(lab: Any) -> None:
    p, d = await lab.start("P"), await lab.start("D", **BOTH)
    second, handle, _ = await kept(lab, p, d)
    asking = asyncio.create_task(lab.chat(p, second, max_tokens=1, kv_transfer_params=handle))
    await lab.until(lambda: p.counters.traps[Trap.NOT_BIDIRECTIONAL] == 1)
    asking.cancel()
    await asyncio.wait({asking})
    await lab.until(lambda: not p.scheduler.sequences)
    assert d.pinned == 1, "nobody tells D"


async def test_a_handle_stands_for_all_tokens_but_the_last(lab: Any) -> None:
    p, d = await lab.start("P", **BOTH), await lab.start("D", **BOTH)
    _, handle, one = await kept(lab, p, d, max_tokens=10)
    ids = one.json["prompt_token_ids"] + one.json["choices"][0]["token_ids"]
    assert handle["remote_num_tokens"] == len(ids) - 1
    assert len(handle["remote_block_ids"][0]) == -(-(len(ids) - 1) // 16)
