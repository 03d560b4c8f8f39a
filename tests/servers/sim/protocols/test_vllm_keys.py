"""The protocols of vLLM whose legs meet by a key: Mooncake's, and NIXL's push."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ppd.servers.sim.core.config import LoadFailurePolicy
from ppd.servers.sim.core.counters import Trap
from ppd.servers.sim.core.fault_orders import FaultKind, FaultLeg, Faults, Order
from tests.servers.sim.protocols.keyed_legs import CHAT, HI, OTHER, PARAMS, Proxy, addressed, moriio, start

CONNECTORS = ["mooncake", "moriio", "nixl_push"]


@pytest.fixture(params=CONNECTORS)
def connector(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("stream", [False, True])
async def test_d_answers_from_ps_kv(lab: Any, connector: str, stream: bool) -> None:
    proxy = await start(lab, connector)
    p, d = proxy.p, proxy.d
    from_p, from_d = await proxy.split(stream=stream)
    assert (from_p.status, from_d.status) == (200, 200)
    assert from_d.text == await lab.expected(HI)
    assert (d.counters.external_kv_tokens, d.counters.local_compute_tokens) == (d.counters.prompt_tokens, 0)
    assert lab.is_quiet(p) and lab.is_quiet(d)
    assert not p.counters.traps and not d.counters.traps
    if not stream:
        assert from_d.cached_tokens == d.counters.prompt_tokens, "D counts all that it is sent"


async def test_d_takes_what_its_own_cache_lacks(lab: Any, connector: str) -> None:
    proxy = await start(lab, connector)
    first, again = await proxy.split(), await proxy.split()
    assert again[1].text == first[1].text
    assert proxy.d.counters.local_cache_hit_tokens > 0
    assert (await lab.chat(proxy.d, HI)).text == first[1].text, "a LOCAL turn"


@pytest.mark.parametrize("d_first", [False, True])
async def test_whoever_comes_first_waits(lab: Any, connector: str, d_first: bool) -> None:
    proxy = await start(lab, connector)
    p, d = proxy.p, proxy.d
    early = asyncio.create_task(proxy.leg(d if d_first else p, "k"))
    await lab.until(lambda: d.scheduler.pulling == 1 if d_first else p.pinned == 1)
    late = await proxy.leg(p if d_first else d, "k")
    assert {late.status, (await early).status} == {200}
    await lab.until(lambda: lab.is_quiet(p) and lab.is_quiet(d))


async def test_a_key_is_used_once(lab: Any, connector: str) -> None:
    proxy = await start(lab, connector)
    await proxy.split(key="k")
    from_p, from_d = await proxy.split(key="k", to_d=OTHER)
    named = "X-Request-Id" if connector == "nixl_push" else "kv_transfer_params.transfer_id"
    assert (from_p.status, from_p.json["error"]["param"], from_d.status) == (400, named, 500)
    assert f"{named}: " in from_d.json["error"]["message"] and "was used before" in from_d.json["error"]["message"]
    assert proxy.p.counters.traps == {Trap.USED_KEY: 2}


async def test_mixed_keys_show_in_the_text(lab: Any, connector: str) -> None:
    proxy = await start(lab, connector)
    _, from_d = await proxy.split(to_d=OTHER)
    assert from_d.status == 200
    assert from_d.text != await lab.expected(OTHER)


@pytest.mark.parametrize(("policy", "status"), [(LoadFailurePolicy.FAIL, 500), (LoadFailurePolicy.RECOMPUTE, 200)])
async def test_a_p_that_never_comes(lab: Any, connector: str, policy: LoadFailurePolicy, status: int) -> None:
    proxy = await start(lab, connector, meeting_timeout_s=0.05, load_failure_policy=policy)
    proxy.p.faults = Faults([Order(FaultKind.ABSENT)])
    from_p, from_d = await proxy.split()
    assert (from_p.status, from_d.status) == (200, status)
    assert (proxy.d.counters.failed_transfers, proxy.d.counters.external_kv_tokens) == (1, 0)
    assert (proxy.p.pinned, proxy.d.pool.used) == (1, 0), "P keeps it for its lease"


async def test_a_d_waits_on_where_p_failed(lab: Any, connector: str) -> None:
    proxy = await start(lab, connector, meeting_timeout_s=300.0)
    proxy.p.faults = Faults([Order(FaultKind.ABORT)])
    leg = asyncio.create_task(proxy.leg(proxy.d, "k"))
    assert (await proxy.leg(proxy.p, "k")).json["choices"][0]["finish_reason"] == "abort"
    await lab.until(lambda: proxy.d.scheduler.pulling == 1)
    leg.cancel()
    await lab.until(lambda: proxy.d.counters.finished["abort"] == 1)
    assert proxy.d.pool.used > 0, "P may still write into what D has set aside"
    proxy.d.pulls.expire()
    await lab.until(lambda: lab.is_quiet(proxy.d) and lab.is_quiet(proxy.p))


async def test_an_aborted_d_keeps_its_blocks_until_p_has_written(lab: Any, connector: str) -> None:
    proxy = await start(lab, connector, meeting_timeout_s=300.0)
    leg = asyncio.create_task(proxy.leg(proxy.d, "k"))
    await lab.until(lambda: proxy.d.scheduler.pulling == 1)
    leg.cancel()
    await lab.until(lambda: proxy.d.counters.finished["abort"] == 1)
    assert proxy.d.pool.used > 0
    assert (await proxy.leg(proxy.p, "k")).status == 200
    await lab.until(lambda: lab.is_quiet(proxy.d) and lab.is_quiet(proxy.p))


async def test_a_decode_leg_that_is_refused_frees_ps_blocks(lab: Any, connector: str) -> None:
    proxy = await start(lab, connector)
    assert (await proxy.leg(proxy.d, "k", max_tokens=0)).status == 400
    assert (await proxy.leg(proxy.p, "k")).status == 200
    await lab.until(lambda: lab.is_quiet(proxy.p))
    assert proxy.p.counters.expired_handoffs == 0


async def test_a_prefill_expires(lab: Any, connector: str) -> None:
    proxy = await start(lab, connector)
    proxy.p.faults = Faults([Order(FaultKind.EXPIRE)])
    from_p, from_d = await proxy.split()
    assert (from_p.status, from_d.status) == (200, 500)
    assert (proxy.p.counters.expired_handoffs, proxy.p.counters.traps) == (1, {Trap.EXPIRED_HANDOFF: 1})
    await proxy.split()
    assert len(proxy.p.meetings) == 0, "nothing is left of either"


async def test_a_p_that_dies_in_between(lab: Any, connector: str) -> None:
    proxy = await start(lab, connector)
    proxy.p.faults = Faults([Order(FaultKind.KILL_AT_TRANSFER)])
    assert (await proxy.leg(proxy.p, "k")).status == 200
    assert (await proxy.leg(proxy.d, "k")).status == 500
    assert lab.is_quiet(proxy.d)


async def test_an_abort_that_leaks(lab: Any, connector: str) -> None:
    proxy = await start(lab, connector)
    proxy.d.faults = Faults([Order(FaultKind.LEAK, leg=FaultLeg.DECODE)])
    leg = asyncio.create_task(proxy.leg(proxy.d, "k"))
    await lab.until(lambda: proxy.d.scheduler.pulling == 1)
    held = proxy.d.pool.used
    leg.cancel()
    await lab.until(lambda: not proxy.d.scheduler.sequences)
    assert proxy.d.pool.used == held > 0


async def test_another_engine_at_the_address_is_refused(lab: Any, connector: str) -> None:
    proxy = await start(lab, connector)
    answer = await proxy.leg(proxy.d, "k", change={"remote_engine_id": "p-before-its-restart"})
    assert (answer.status, proxy.p.counters.traps) == (500, {Trap.WRONG_ENGINE: 1})


async def test_engines_with_other_connectors_do_not_meet(lab: Any) -> None:
    p, d = await lab.start("P", connector="nixl_push"), await lab.start("D", connector="mooncake")
    assert (await Proxy(lab, "nixl_push", p, d).leg(p, "k")).status == 200
    answer = await Proxy(lab, "mooncake", p, d).leg(d, "k")
    assert (answer.status, p.pinned) == (500, 1)


COMMON = [
    ("remote_engine_id", 7),
    ("remote_block_ids", [[1]]),
    ("do_remote_decode", 1),
]
WRONG = {
    "moriio": [
        *COMMON,
        ("transfer_id", None),
        ("transfer_id", ""),
        ("remote_dp_size", None),
        ("remote_tp_size", 2),
        ("remote_dp_rank", None),
        ("remote_dp_rank", 1),
        ("remote_notify_port", "61005"),
    ],
    "mooncake": [
        *COMMON,
        ("remote_engine_id", None),
        ("remote_engine_id", ""),
        ("transfer_id", None),
        ("transfer_id", 7),
        ("remote_bootstrap_addr", None),
        ("remote_bootstrap_addr", "10.0.0.5:8998"),
        ("remote_bootstrap_addr", "http://10.0.0.5"),
        ("remote_bootstrap_addr", "http://10.0.0.5:x"),
    ],
    "nixl_push": [
        *COMMON,
        ("remote_engine_id", None),
        ("remote_engine_id", ""),
        ("remote_host", None),
        ("remote_port", "5600"),
        ("remote_port", 0),
        ("tp_size", None),
        ("tp_size", 2),
        ("remote_request_id", "another"),
    ],
}


@pytest.mark.parametrize(
    ("connector", "name", "value"), [(connector, *case) for connector, cases in WRONG.items() for case in cases]
)
async def test_a_wrong_field_of_ds_leg_is_refused_by_name(lab: Any, connector: str, name: str, value: Any) -> None:
    proxy = await start(lab, connector)
    answer = await proxy.leg(proxy.d, "k", change={name: value})
    assert (answer.status, answer.json["error"]["param"]) == (400, f"kv_transfer_params.{name}")
    assert name in answer.json["error"]["message"]
    assert lab.is_quiet(proxy.d)


@pytest.mark.parametrize(
    ("connector", "name", "value"),
    [
        ("mooncake", "transfer_id", None),
        ("mooncake", "remote_engine_id", "p"),
        ("moriio", "transfer_id", None),
        ("moriio", "remote_dp_rank", 0),
        ("nixl_push", "remote_host", "p"),
    ],
)
async def test_a_wrong_field_of_ps_leg_is_refused_by_name(lab: Any, connector: str, name: str, value: Any) -> None:
    proxy = await start(lab, connector)
    answer = await proxy.leg(proxy.p, "k", change={name: value})
    assert (answer.status, answer.json["error"]["param"]) == (400, f"kv_transfer_params.{name}")


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
async def test_push_needs_a_request_id(lab: Any, path: str) -> None:
    proxy = await start(lab, "nixl_push")
    body = {"messages": HI, "input": "hi", "kv_transfer_params": {"do_remote_decode": True}}
    answer = await lab.post(proxy.p, path, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, "X-Request-Id" if path == CHAT else "request_id")


async def test_push_tells_its_mode(lab: Any) -> None:
    proxy = await start(lab, "nixl_push")
    params = (await proxy.leg(proxy.p, "k")).json["kv_transfer_params"]
    assert (params["transfer_mode"], params["remote_engine_id"]) == ("push", proxy.p.engine_id)


async def test_push_is_lost_on_a_p_that_begins_anew_under_the_id_that_d_knows(lab: Any) -> None:
    """As seen with vLLM 0.32: its D connects to P's process once. Another D, or a P with another id, is no stranger."""
    proxy = await start(lab, "nixl_push", engine_id="one", meeting_timeout_s=0.1)
    assert [answer.status for answer in await proxy.split()] == [200, 200]
    another_d = await lab.start("D", connector="nixl_push")
    for id_of_p, d, of_d in (("one", proxy.d, 500), ("one", another_d, 200), ("two", proxy.d, 200)):
        p = await lab.start("P", connector="nixl_push", engine_id=id_of_p)
        assert [answer.status for answer in await Proxy(lab, "nixl_push", p, d).split()] == [200, of_d]
        assert p.pinned == (of_d == 500), "a P that D does not speak to keeps what it has computed for its lease"


async def test_any_text_may_be_a_key(lab: Any) -> None:
    proxy = await start(lab, "mooncake")
    key = "\r\nX: y\0\u2603" * 2000
    assert [answer.status for answer in await proxy.split(key=key, name="r")] == [200, 200]
    again = await proxy.leg(proxy.d, key, name="r")
    assert again.status == 500
    assert len(again.body) < 1000


@pytest.mark.parametrize("is_d", [False, True])
async def test_mooncakes_roles_are_not_mixed(lab: Any, is_d: bool) -> None:
    proxy = await start(lab, "mooncake")
    swapped = Proxy(lab, "mooncake", proxy.d, proxy.p)
    answer = await swapped.leg(swapped.d if is_d else swapped.p, "k")
    assert answer.status == 400
    assert answer.json["error"]["param"].startswith("kv_transfer_params.do_remote_")


async def test_mooncakes_bootstrap_server_names_its_engine(lab: Any) -> None:
    p = (await start(lab, "mooncake")).p
    host, port = p.side_address
    async with lab.session.get(f"http://{host}:{port}/query") as answer:
        (rank,) = (await answer.json()).items()
    assert rank == ("0", {"engine_id": p.engine_id, "worker_addr": {"0": {"0": f"tcp://{host}:{port}"}}})


@pytest.mark.parametrize("connector", ["mooncake", "moriio"])
async def test_nothing_is_sent_after_a_stop(lab: Any, connector: str) -> None:
    proxy = await start(lab, connector, meeting_timeout_s=0.05)
    token = (await lab.chat(proxy.p, HI, max_tokens=1, return_token_ids=True)).json["choices"][0]["token_ids"][0]
    from_p = await proxy.leg(proxy.p, "k", stop_token_ids=[token])
    assert from_p.json["choices"][0]["finish_reason"] == "stop"
    assert (await proxy.leg(proxy.d, "k")).status == 500
    assert lab.is_quiet(proxy.p)


@pytest.mark.parametrize("connector", ["mooncake", "moriio"])
async def test_there_is_one_data_parallel_rank(lab: Any, connector: str) -> None:
    proxy = await start(lab, connector)
    body = {"messages": HI, "kv_transfer_params": PARAMS[connector](proxy.p, proxy.d, "k")[0]}
    answer = await lab.post(proxy.p, CHAT, body, headers={"X-data-parallel-rank": "1"})
    assert (answer.status, answer.json["error"]["param"]) == (400, "X-data-parallel-rank")


async def test_moriio_takes_an_address_from_the_parameters_too(lab: Any) -> None:
    proxy = await start(lab, "moriio")
    p, d = proxy.p, proxy.d
    answers = []
    for engine, params, peer in zip((p, d), moriio(p, d, "k"), (d, p), strict=True):
        host, port = peer.side_address
        params |= {"remote_host": host, "remote_handshake_port": port, "remote_notify_port": port}
        body = {"messages": HI, "kv_transfer_params": params, "max_tokens": 1}
        answers.append(await lab.post(engine, CHAT, body, headers={"X-Request-Id": "r"}))
        del params["remote_notify_port"]
        refused = await lab.post(engine, CHAT, body, headers={"X-Request-Id": "r"})
        assert (refused.status, refused.json["error"]["param"]) == (400, "kv_transfer_params.remote_notify_port")
    assert [answer.status for answer in answers] == [200, 200]
    assert d.counters.external_kv_tokens == d.counters.prompt_tokens


async def test_moriio_refuses_an_id_with_another_pairs_addresses(lab: Any) -> None:
    proxy, other = await start(lab, "moriio"), await start(lab, "moriio")
    for engine, params in zip((proxy.p, proxy.d), moriio(proxy.p, proxy.d, "k"), strict=True):
        body = {"messages": HI, "kv_transfer_params": params}
        answer = await lab.post(engine, CHAT, body, headers={"X-Request-Id": addressed(other.p, other.d)})
        assert (answer.status, answer.json["error"]["param"]) == (400, "X-Request-Id")
