from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from ppd.servers.sim.core.config import LoadFailurePolicy
from ppd.servers.sim.core.counters import Trap
from ppd.servers.sim.core.fault_orders import FaultKind, FaultLeg, Faults, Order

HI = [{"role": "user", "content": "Tell me about the sea and the ships on it, at some length."}]
OTHER = [{"role": "user", "content": "Tell me about the sky and the birds in it, at some length."}]
LONGER = [{"role": "user", "content": "Tell me about the sea and the ships on it, at some greater length."}]
CHAT = "/v1/chat/completions"
NewRoom = Callable[[], int]


async def start(lab: Any, **settings: Any) -> tuple[Any, Any]:
    both = {"connector": "sglang", "meeting_timeout_s": 5.0} | settings
    return await lab.start("P", **both), await lab.start("D", **both)


def fields(p: Any, room: int) -> dict[str, Any]:
    host, port = p.side_address
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}


async def joint(lab: Any, p: Any, d: Any, room: int, **asked: Any) -> list[Any]:
    """With one body for both, as SGLang's own router sends it."""
    body = {"messages": HI, **fields(p, room), **asked}
    return list(await lab.joint(p, d, body, body))


@pytest.mark.parametrize("stream", [False, True])
async def test_d_answers_from_ps_kv(lab: Any, new_room: NewRoom, stream: bool) -> None:
    p, d = await start(lab)
    from_p, from_d = await joint(lab, p, d, new_room(), stream=stream)
    assert (from_p.status, from_d.status) == (200, 200)
    assert b"kv_transfer_params" not in from_p.body + from_d.body
    assert from_d.text == await lab.expected(HI)
    prompt = d.counters.prompt_tokens
    assert (d.counters.external_kv_tokens, d.counters.local_compute_tokens) == (prompt, 0)
    assert p.counters.generation_tokens == 1, "P's role ends its answer"
    assert lab.is_quiet(p) and lab.is_quiet(d)
    assert not p.counters.traps and not d.counters.traps


async def test_d_keeps_nothing_and_reports_what_p_had_cached(lab: Any, new_room: NewRoom) -> None:
    p, d = await start(lab)
    first, again = [(await joint(lab, p, d, new_room()))[1] for _ in range(2)]
    assert first.cached_tokens == 0
    assert again.cached_tokens > 0
    assert d.counters.local_cache_hit_tokens == 0
    assert d.counters.external_kv_tokens == d.counters.prompt_tokens


async def test_a_d_with_a_radix_cache_is_sent_what_it_lacks_and_still_computes_no_prompt(
    lab: Any, new_room: NewRoom
) -> None:
    recomputes = LoadFailurePolicy.RECOMPUTE
    p, d = await start(lab, decode_radix_cache=True, load_failure_policy=recomputes, meeting_timeout_s=0.5)
    info = (await lab.fetch(d, "/server_info")).json
    assert info["disaggregation_decode_enable_radix_cache"] is True
    first = (await joint(lab, p, d, new_room()))[1].text
    talk = [*HI, {"role": "assistant", "content": first}, *OTHER]
    held = d.pool.cached * d.pool.block_size
    assert (await joint(lab, p, d, new_room(), messages=talk))[1].text == await lab.expected(talk)
    assert d.counters.external_kv_tokens == d.counters.prompt_tokens - held
    p.faults = Faults([Order(FaultKind.EXPIRE)])
    assert (await joint(lab, p, d, new_room(), messages=LONGER))[1].status == 500


@pytest.mark.parametrize("first", [0, 1], ids=["P first", "D first"])
async def test_whoever_comes_first_waits(lab: Any, new_room: NewRoom, first: int) -> None:
    engines = p, _ = await start(lab)
    room = fields(p, new_room())
    early = asyncio.create_task(lab.chat(engines[first], HI, **room))
    await lab.until(lambda: p.meetings.waiting + engines[first].scheduler.pulling == 1)
    assert p.counters.steps == 0
    late = await lab.chat(engines[1 - first], HI, **room)
    assert {late.status, (await early).status} == {200}


async def test_each_choice_has_a_room_of_its_own(lab: Any, new_room: NewRoom) -> None:
    p, d = await start(lab)
    answers = await joint(lab, p, d, new_room(), n=2)
    assert [len(answer.json["choices"]) for answer in answers] == [2, 2]
    assert d.counters.external_kv_tokens == d.counters.prompt_tokens


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"bootstrap_room": None}, "bootstrap_room"),
        ({"bootstrap_room": "7"}, "bootstrap_room"),
        ({"bootstrap_room": [7]}, "bootstrap_room"),
        ({"bootstrap_room": -1}, "bootstrap_room"),
        ({"bootstrap_room": 2**63}, "bootstrap_room"),
        ({"bootstrap_host": None}, "bootstrap_host"),
        ({"bootstrap_host": ""}, "bootstrap_host"),
        ({"bootstrap_port": "8998"}, "bootstrap_port"),
        ({"bootstrap_port": 0}, "bootstrap_port"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(lab: Any, new_room: NewRoom, change: Any, named: str) -> None:
    p, d = await start(lab)
    body = {"messages": HI} | fields(p, new_room()) | change
    for engine in (p, d):
        answer = await lab.post(engine, CHAT, {name: value for name, value in body.items() if value is not None})
        assert (answer.status, answer.json["param"]) == (400, named)
        assert named in answer.json["message"].replace("room id", "room_id").replace(" ", "_")


async def test_a_p_refuses_another_servers_port(lab: Any, new_room: NewRoom) -> None:
    p, other = await lab.start("P", connector="sglang"), await lab.start("P", connector="sglang")
    answer = await lab.chat(p, HI, **fields(other, new_room()))
    assert (answer.status, answer.json["param"]) == (400, "bootstrap_port")


async def test_a_warm_up_needs_no_peer(lab: Any, new_room: NewRoom) -> None:
    engines = await start(lab, meeting_timeout_s=0.05)
    room = {"bootstrap_host": "2.2.2.2", "bootstrap_room": new_room()}
    assert [(await lab.chat(engine, HI, **room)).status for engine in engines] == [200, 200]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_other_apis_do_not_carry_the_fields(lab: Any, new_room: NewRoom, path: str) -> None:
    p, d = await start(lab)
    body = {"messages": HI, "input": "hi", "max_tokens": 4, **fields(p, new_room())}
    assert (await lab.post(d, path, body)).status == 400


async def test_a_room_is_used_once(lab: Any, new_room: NewRoom) -> None:
    p, d = await start(lab)
    room = new_room()
    await joint(lab, p, d, room)
    from_p, from_d = await joint(lab, p, d, room)
    assert (from_p.status, from_p.json["param"]) == (400, "bootstrap_room")
    assert (from_d.status, f"bootstrap_room: {room} was used before" in from_d.json["message"]) == (500, True)
    assert p.counters.traps == {Trap.USED_KEY: 2}


async def test_mixed_rooms_show_in_the_text(lab: Any, new_room: NewRoom) -> None:
    p, d = await start(lab)
    room = fields(p, new_room())
    _, from_d = await lab.joint(p, d, {"messages": HI, **room}, {"messages": OTHER, **room})
    assert from_d.status == 200
    assert from_d.text != await lab.expected(OTHER)


async def test_a_room_with_a_prompt_of_another_length_is_refused(lab: Any, new_room: NewRoom) -> None:
    p, d = await start(lab)
    room = fields(p, new_room())
    leg = asyncio.create_task(lab.chat(p, HI, **room))
    assert (await lab.chat(d, LONGER, **room)).status == 500
    assert (d.counters.traps, lab.is_quiet(d)) == ({Trap.OTHER_PROMPT: 1}, True)
    assert not leg.done(), "P has not been told"
    leg.cancel()


@pytest.mark.parametrize("leg", [0, 1], ids=["P", "D"])
async def test_a_peer_that_never_comes(lab: Any, new_room: NewRoom, leg: int) -> None:
    engines = p, d = await start(lab, meeting_timeout_s=0.05)
    engines[leg].faults = Faults([Order(FaultKind.ABSENT)])
    answers = await joint(lab, p, d, new_room())
    assert [answer.status for answer in answers] == [500, 500]
    await lab.until(lambda: lab.is_quiet(p) and lab.is_quiet(d))


async def test_a_prefill_that_expires_before_d_has_it(lab: Any, new_room: NewRoom) -> None:
    p, d = await start(lab)
    p.faults = Faults([Order(FaultKind.EXPIRE)])
    room = fields(p, new_room())
    leg = asyncio.create_task(lab.chat(p, HI, **room))
    assert (await lab.chat(d, HI, **room)).status == 500
    assert (p.counters.expired_handoffs, p.counters.traps) == (1, {Trap.EXPIRED_HANDOFF: 1})
    assert lab.is_quiet(p) and lab.is_quiet(d)
    leg.cancel()


async def test_a_p_that_dies_in_between(lab: Any, new_room: NewRoom) -> None:
    p, d = await start(lab)
    p.faults = Faults([Order(FaultKind.KILL_AT_TRANSFER)])
    room = fields(p, new_room())
    leg = asyncio.create_task(lab.chat(p, HI, **room))
    assert (await lab.chat(d, HI, **room)).status == 500
    assert isinstance((await asyncio.gather(leg, return_exceptions=True))[0], aiohttp.ClientError)
    assert lab.is_quiet(d)


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 1], ids=["P", "D"])
async def test_a_leg_that_is_left_ends_the_other(lab: Any, new_room: NewRoom, left: int) -> None:
    p, d = await start(lab, time_scale=1.0, meeting_timeout_s=300.0)
    room, long = fields(p, new_room()), [{"role": "user", "content": "x" * 20_000}]
    legs = [asyncio.create_task(lab.chat(engine, long, **room)) for engine in (p, d)]
    await lab.until(lambda: p.scheduler.running == 1)
    legs[left].cancel()
    assert (await legs[1 - left]).status == 500
    await lab.until(lambda: d.pool.used == 0)


async def test_a_p_that_stops_waits_for_no_d(lab: Any, new_room: NewRoom) -> None:
    p, _ = await start(lab, meeting_timeout_s=300.0)
    leg = asyncio.create_task(lab.chat(p, HI, **fields(p, new_room())))
    await lab.until(lambda: p.meetings.waiting == 1)
    p.stop()
    assert (await leg).status == 500


async def test_an_abort_that_leaks(lab: Any, new_room: NewRoom) -> None:
    p, d = await start(lab)
    d.faults = Faults([Order(FaultKind.LEAK)])
    leg = asyncio.create_task(lab.chat(d, HI, **fields(p, new_room())))
    await lab.until(lambda: d.scheduler.pulling == 1)
    leg.cancel()
    await lab.until(lambda: d.counters.finished["abort"] == 1 and not d.scheduler.sequences)
    assert d.pool.used > 0
    before = d.pool.used
    assert (await joint(lab, p, d, new_room()))[1].status == 200
    assert d.pool.used == before


async def test_a_leg_is_told_by_its_role(lab: Any, new_room: NewRoom) -> None:
    p, d = await start(lab, meeting_timeout_s=0.05)
    for engine in (p, d):
        engine.faults = Faults([Order(FaultKind.ERROR, status=503, leg=FaultLeg.DECODE)])
    assert [answer.status for answer in await joint(lab, p, d, new_room())] == [500, 503]


@pytest.mark.parametrize(
    ("query", "status"),
    [("?", 400), ("-1", 200), ("0", 200), ("1", 404)],
)
async def test_the_bootstrap_server_tells_ps_shape(lab: Any, query: str, status: int) -> None:
    p = await lab.start("P", connector="sglang")
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
    params = {} if query == "?" else dict.fromkeys(names, query)
    host, port = p.side_address
    async with lab.session.get(f"http://{host}:{port}/route", params=params) as answer:
        assert answer.status == status


async def test_the_http_api_is_sglangs(lab: Any, new_room: NewRoom) -> None:
    p, d = await start(lab)
    await joint(lab, p, d, new_room())
    info = (await lab.fetch(p, "/get_server_info")).json
    assert (info["disaggregation_mode"], info["disaggregation_bootstrap_port"]) == ("prefill", p.side_address[1])
    assert (await lab.fetch(d, "/v1/models")).json["data"][0]["owned_by"] == "sglang"
    for path, status in (("/health", 200), ("/health_generate", 200), ("/version", 404), ("/kv_event_sources", 404)):
        answer = await lab.fetch(d, path)
        assert answer.status == status
        assert status == 200 or answer.json["object"] == "error"
    text = (await lab.fetch(d, "/metrics")).body.decode()
    assert f'sglang:cache_config_info{{num_pages="2048",page_size="{d.config.block_size}"}} 1.0' in text
    assert {line.split("{")[0] for line in text.splitlines() if not line.startswith("#")} >= {
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "sglang:prompt_tokens_total",
    }
    assert "vllm:" not in text
