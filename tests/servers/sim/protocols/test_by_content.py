"""The protocols of vLLM in which D finds KV by its content: LMCache's own transfer, and peers of its offloading."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from ppd.servers.sim.core.counters import Trap
from ppd.servers.sim.core.fault_orders import FaultKind, Faults, Order

HI = [{"role": "user", "content": "Tell me about the sea and the ships on it, at some length."}]


async def start(lab: Any, connector: str, **settings: Any) -> tuple[Any, Any]:
    both = {"connector": connector, "meeting_timeout_s": 5.0} | settings
    return await lab.start("P", **both), await lab.start("D", **both)


def peer(engine: Any, key: str) -> dict[str, Any]:
    host, port = engine.side_address
    return {"kv_request_id": key, "remote_host": host, "remote_port": port}


def receiver(engine: Any, key: str) -> dict[str, Any]:
    host, port = engine.side_address
    spec = {"req_id": key, "receiver_host": host, "receiver_init_port": [port], "receiver_alloc_port": [port]}
    return {"ret_first_tok": True, "disagg_spec": spec}


async def test_lmcaches_p_sends_full_blocks_and_d_finds_them_as_its_own(lab: Any) -> None:
    p, d = await start(lab, "lmcache")
    from_p = await lab.chat(p, HI, max_tokens=1, kv_transfer_params=receiver(d, "k"))
    assert list(from_p.json["kv_transfer_params"]) == ["first_tok"]
    await lab.until(lambda: d.pool.cached > 0 and lab.is_quiet(p))
    assert (await lab.chat(d, HI)).text == await lab.expected(HI)
    size = d.pool.block_size
    assert d.counters.local_cache_hit_tokens == (d.counters.prompt_tokens - 1) // size * size
    again = await lab.chat(p, HI, max_tokens=1, kv_transfer_params=receiver(d, "k"))
    assert (again.status, again.json["error"]["param"]) == (400, "kv_transfer_params.disagg_spec.req_id")


async def test_where_nobody_receives_d_computes_the_prompt(lab: Any) -> None:
    p, d = await start(lab, "lmcache")
    params = receiver(d, "k")
    params["disagg_spec"]["receiver_init_port"] = [1]
    assert (await lab.chat(p, HI, max_tokens=1, kv_transfer_params=params)).status == 200
    await lab.until(lambda: p.counters.failed_transfers == 1 and lab.is_quiet(p))


@pytest.mark.parametrize("kind", [FaultKind.ABSENT, FaultKind.EXPIRE, FaultKind.KILL_AT_TRANSFER])
async def test_by_a_fault_p_sends_nothing_and_d_computes_the_prompt(lab: Any, kind: FaultKind) -> None:
    p, d = await start(lab, "lmcache")
    p.faults = Faults([Order(kind)])
    with suppress(aiohttp.ClientError):  # a P that dies may have answered
        await lab.chat(p, HI, max_tokens=1, kv_transfer_params=receiver(d, "k"))
    await lab.until(lambda: lab.is_quiet(p) and p.is_dead == (kind is FaultKind.KILL_AT_TRANSFER))
    assert (await lab.chat(d, HI)).text == await lab.expected(HI)
    assert d.counters.local_compute_tokens == d.counters.prompt_tokens


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_peers_d_computes_what_p_does_not_have(lab: Any, is_there: bool) -> None:
    p, d = await start(lab, "offload_p2p", meeting_timeout_s=5.0 if is_there else 0.05)
    if not is_there:
        p.faults = Faults([Order(FaultKind.ABSENT)])
    to_p = {"remote_decoder": {"kv_request_id": "k"}, "remote_kv_source": peer(d, "k2")}
    _, from_d = await asyncio.gather(
        lab.chat(p, HI, max_tokens=1, kv_transfer_params=to_p),
        lab.chat(d, HI, kv_transfer_params={"remote_prefiller": peer(p, "k")}),
    )
    assert from_d.text == await lab.expected(HI)
    assert (d.counters.external_kv_tokens > 0, d.counters.local_compute_tokens == 0) == (is_there, is_there)


async def test_a_peers_p_finds_at_its_source_what_d_holds_and_computes_the_rest(lab: Any) -> None:
    p, d = await start(lab, "offload_p2p")
    first = (await lab.chat(d, HI)).text
    talk = [*HI, {"role": "assistant", "content": first}, {"role": "user", "content": "And then?"}]
    held = d.pool.cached * d.pool.block_size

    async def split(key: str) -> Any:
        to_p = {"remote_decoder": {"kv_request_id": key}, "remote_kv_source": peer(d, "source")}
        return await asyncio.gather(
            lab.chat(p, talk, max_tokens=1, kv_transfer_params=to_p),
            lab.chat(d, talk, kv_transfer_params={"remote_prefiller": peer(p, key)}),
        )

    _, from_d = await split("k1")
    assert from_d.text == await lab.expected(talk)
    assert p.counters.external_hits == held
    assert p.counters.local_compute_tokens == p.counters.prompt_tokens - held
    assert 0 < d.counters.external_kv_tokens < d.counters.prompt_tokens / 2, "D pulls what it lacks"
    p.pool.clear()
    assert (await split("k2"))[1].text == from_d.text
    assert (d.counters.traps[Trap.USED_KEY], p.counters.external_hits) == (1, held), "a source is asked once"


async def test_where_the_source_is_gone_p_computes_all(lab: Any) -> None:
    p, d = await start(lab, "offload_p2p")
    source = {**peer(d, "source"), "remote_port": 1}
    to_p = {"remote_decoder": {"kv_request_id": "k"}, "remote_kv_source": source}
    assert (await lab.chat(p, HI, max_tokens=1, kv_transfer_params=to_p)).status == 200
    assert (p.counters.failed_transfers, p.counters.local_compute_tokens) == (1, p.counters.prompt_tokens)


@pytest.mark.parametrize(
    ("connector", "params", "named"),
    [
        ("lmcache", {"disagg_spec": {"req_id": "k"}}, "disagg_spec.receiver_host"),
        ("lmcache", {"do_remote_decode": True}, "do_remote_decode"),
        ("lmcache", {"ret_first_tok": True}, "disagg_spec"),
        ("offload_p2p", {"do_remote_decode": True}, "do_remote_decode"),
        ("offload_p2p", {"remote_decoder": {}}, "remote_decoder.kv_request_id"),
        ("offload_p2p", {"remote_prefiller": {"kv_request_id": "k"}}, "remote_prefiller.remote_host"),
        (
            "offload_p2p",
            {
                "remote_decoder": {"kv_request_id": "k"},
                "remote_prefiller": {"kv_request_id": "k", "remote_host": "h", "remote_port": 1},
            },
            "remote_prefiller",
        ),
        (
            "offload_p2p",
            {
                "remote_decoder": {"kv_request_id": "k"},
                "remote_kv_source": {"kv_request_id": "k", "remote_host": "h", "remote_port": 1},
            },
            "remote_kv_source.kv_request_id",
        ),
    ],
)
async def test_a_wrong_field_is_refused_by_name(lab: Any, connector: str, params: Any, named: str) -> None:
    p, _ = await start(lab, connector)
    answer = await lab.chat(p, HI, kv_transfer_params=params)
    assert (answer.status, answer.json["error"]["param"]) == (400, f"kv_transfer_params.{named}")
