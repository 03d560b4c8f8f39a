"""P2pNccl: one name with both addresses, KV that P sends before it answers, and a D that waits for it in its step."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import aiohttp
import pytest

from ppd.servers.sim.core.counters import Trap
from ppd.servers.sim.core.fault_orders import FaultKind, Faults, Order

HI = [{"role": "user", "content": "Tell me about the sea and the ships on it, at some length."}]
OTHER = [{"role": "user", "content": "Tell me about the sky."}]
CHAT = "/v1/chat/completions"
HEX = "0a" * 16


def address(engine: Any) -> str:
    host, port = engine.side_address
    return f"{host}:{port}"


class Proxy:
    """Sends legs, each pair under a name of its own unless it is given."""

    def __init__(self, lab: Any, p: Any, d: Any) -> None:
        self._lab, self._keys = lab, itertools.count()
        self.p, self.d = p, d

    def name(self) -> str:
        return f"___prefill_addr_{address(self.p)}___decode_addr_{address(self.d)}_{next(self._keys):032x}"

    async def leg(self, engine: Any, name: str, messages: Any = HI, **asked: Any) -> Any:
        limit = {"max_tokens": 1} if engine is self.p else {}
        body = {"messages": messages} | limit | asked
        return await self._lab.post(engine, CHAT, body, headers={"X-Request-Id": name})


@pytest.fixture
async def proxy(lab: Any) -> Proxy:
    """Its D is as vLLM's own."""
    return Proxy(lab, *[await lab.start(role, connector="p2p_nccl") for role in "PD"])


@pytest.fixture
async def patched(lab: Any) -> Proxy:
    """Its D takes a name without addresses as a plain one."""
    return Proxy(lab, *[await lab.start(role, connector="p2p_nccl", takes_plain=True) for role in "PD"])


async def test_d_takes_what_p_sent_before_it_answered(lab: Any, proxy: Proxy) -> None:
    name = proxy.name()
    assert (await proxy.leg(proxy.p, name)).status == 200
    assert (proxy.p.pinned, len(proxy.d.arrivals)) == (0, 1), "P keeps nothing"
    assert (await proxy.leg(proxy.d, name)).text == await lab.expected(HI)
    counters = proxy.d.counters
    assert (counters.external_kv_tokens, counters.local_compute_tokens) == (counters.prompt_tokens, 0)
    assert len(proxy.d.arrivals) == 0
    await lab.until(lambda: lab.is_quiet(proxy.p) and lab.is_quiet(proxy.d))


async def test_no_name_is_read_of_a_turn_of_responses(lab: Any, patched: Proxy) -> None:
    said = {"input": "hi", "max_output_tokens": 1}
    answers = [
        await lab.post(engine, "/v1/responses", said, headers={"X-Request-Id": patched.name()})
        for engine in (patched.p, patched.d)
    ]
    assert [answer.status for answer in answers] == [400, 200]
    assert patched.d.counters.external_kv_tokens == 0


async def test_a_d_that_holds_the_head_takes_the_rest(lab: Any, patched: Proxy) -> None:
    first = (await patched.leg(patched.d, "plain")).text
    longer = [*HI, {"role": "assistant", "content": first}, *OTHER]
    name = patched.name()
    await patched.leg(patched.p, name, longer)
    assert (await patched.leg(patched.d, name, longer)).text == await lab.expected(longer)
    assert patched.d.counters.local_cache_hit_tokens > 0


async def test_what_no_leg_takes_stays_on_d(lab: Any, patched: Proxy) -> None:
    await patched.leg(patched.p, patched.name())
    assert (await patched.leg(patched.d, "plain")).text == await lab.expected(HI)
    assert len(patched.d.arrivals) == 1


async def test_a_d_that_comes_first_waits_with_all_its_requests(lab: Any, patched: Proxy) -> None:
    name, steps = patched.name(), patched.d.counters.steps
    waiting = asyncio.create_task(patched.leg(patched.d, name))
    await lab.until(lambda: patched.d.scheduler.pulling == 1)
    other = asyncio.create_task(patched.leg(patched.d, "plain", OTHER))
    await lab.until(lambda: len(patched.d.scheduler.sequences) == 2)
    assert patched.d.counters.steps == steps
    await patched.leg(patched.p, name)
    assert [(await one).text for one in (waiting, other)] == [await lab.expected(HI), await lab.expected(OTHER)]


@pytest.mark.parametrize("kind", [FaultKind.ABSENT, FaultKind.EXPIRE])
async def test_a_p_that_sends_nothing_stops_d_until_its_faults_are_set_anew(
    lab: Any, patched: Proxy, kind: FaultKind
) -> None:
    patched.p.faults = Faults([Order(kind)])
    name = patched.name()
    assert (await patched.leg(patched.p, name)).status == 200
    waiting = asyncio.create_task(patched.leg(patched.d, name))
    await lab.until(lambda: patched.d.scheduler.pulling == 1)
    patched.d.faults = Faults()
    assert (await waiting).status == 500
    assert (await patched.leg(patched.d, "plain")).text == await lab.expected(HI)


async def test_a_p_that_dies_as_it_sends_has_not_answered(lab: Any, proxy: Proxy) -> None:
    proxy.p.faults = Faults([Order(FaultKind.KILL_AT_TRANSFER)])
    with pytest.raises(aiohttp.ClientError):
        await proxy.leg(proxy.p, proxy.name())
    assert (proxy.p.is_dead, len(proxy.d.arrivals)) == (True, 0)


async def test_an_abort_that_leaks(lab: Any, proxy: Proxy) -> None:
    proxy.d.faults = Faults([Order(FaultKind.LEAK)])
    waiting = asyncio.create_task(proxy.leg(proxy.d, proxy.name()))
    await lab.until(lambda: proxy.d.scheduler.pulling == 1)
    waiting.cancel()
    await lab.until(lambda: proxy.d.counters.finished["abort"] == 1)
    proxy.d.faults = Faults()
    await lab.until(lambda: not proxy.d.scheduler.sequences)
    assert proxy.d.pool.used > 0


async def test_a_name_is_used_once_on_each_side(proxy: Proxy) -> None:
    name = proxy.name()
    await proxy.leg(proxy.p, name)
    await proxy.leg(proxy.d, name)
    again = await proxy.leg(proxy.p, name)
    assert (again.status, again.json["error"]["param"]) == (400, "X-Request-Id")
    assert (await proxy.leg(proxy.d, name)).status == 500
    assert [one.counters.traps[Trap.USED_KEY] for one in (proxy.p, proxy.d)] == [1, 1]


async def test_another_prompt_under_the_name_is_no_ones(proxy: Proxy) -> None:
    name = proxy.name()
    await proxy.leg(proxy.p, name)
    assert (await proxy.leg(proxy.d, name, OTHER)).status == 500
    assert proxy.d.counters.traps[Trap.OTHER_PROMPT] == 1


NAMED = "___prefill_addr_{p}___decode_addr_{d}_{key}"


@pytest.mark.parametrize(
    ("role", "name"),
    [
        ("P", "plain"),
        ("P", "___decode_addr_{d}_{key}"),
        ("P", "___prefill_addr_{p}___decode_addr_{d}_short"),
        ("P", "___prefill_addr_{d}___decode_addr_{d}_{key}"),
        ("P", "___prefill_addr_{p}___decode_addr_nowhere_{key}"),
        ("D", "plain"),
        ("D", "___prefill_addr_{p}_{key}"),
        ("D", "___prefill_addr_{p}___decode_addr_{p}_{key}"),
    ],
)
async def test_a_name_that_does_not_say_both_is_refused(proxy: Proxy, role: str, name: str) -> None:
    engine = proxy.p if role == "P" else proxy.d
    answer = await proxy.leg(engine, name.format(p=address(proxy.p), d=address(proxy.d), key=HEX))
    assert (answer.status, answer.json["error"]["param"]) == (400, "X-Request-Id")


async def test_parameters_of_other_connectors_are_refused(proxy: Proxy) -> None:
    answer = await proxy.leg(proxy.p, proxy.name(), kv_transfer_params={"do_remote_decode": True})
    assert (answer.status, answer.json["error"]["param"]) == (400, "kv_transfer_params")


@pytest.mark.parametrize(("role", "status", "coordinates"), [("P", 400, 1), ("D", 200, 2)])
async def test_a_patched_d_takes_a_plain_name_and_its_p_takes_none(
    lab: Any, patched: Proxy, role: str, status: int, coordinates: int
) -> None:
    engine = patched.p if role == "P" else patched.d
    answer = await patched.leg(engine, "plain")
    assert (answer.status, len(engine.protocol.coordinates(engine.own))) == (status, coordinates)


async def test_vllms_own_d_takes_no_turn_of_responses(lab: Any, proxy: Proxy) -> None:
    answer = await lab.post(proxy.d, "/v1/responses", {"input": "hi", "max_output_tokens": 1})
    assert (answer.status, answer.json["error"]["param"]) == (400, "X-Request-Id")
