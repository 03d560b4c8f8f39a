"""Workers and pairs that fail others: passed over, looked at again, and back with a small share."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from ppd.proxy.config import Mode
from ppd.proxy.fleet.places import START
from ppd.servers.sim.core.fault_orders import FaultKind, FaultLeg, FaultPhase, Faults, Order
from tests.support.proxy import Turn
from tests.support.scripted_workers import odd_worker

LONG = "A message of some length, so that there are blocks to move. " * 10
NUMBERS = itertools.count()  # no two openers are alike
SPLIT = {"mode": Mode.ALWAYS_SPLIT}
REPLICA = {"mode": Mode.REPLICA}


def asked(fleet: Any) -> dict[str, int]:
    return {name: len(engine.received) for name, engine in fleet.engines.items()}


def states(fleet: Any, in_s: float = 0.0) -> dict[Any, str]:
    """Breakers that are not closed, by worker name, as they are after so long if nothing happens."""
    names = {view.id: view.name for view in fleet.proxy.state.registry.views()}
    found = fleet.proxy.state.health.breakers.states(fleet.proxy.state.now() + in_s)
    return {
        tuple(names[part] for part in key) if isinstance(key, tuple) else names[key]: state
        for key, state in found.items()
    }


async def openers(fleet: Any, count: int) -> Counter[Any]:
    """Conversations one after the other; their statuses and the workers that answered."""
    turns = [await fleet.conversation().say(f"{next(NUMBERS)} {LONG}") for _ in range(count)]
    return Counter((turn.status, turn.headers.get("X-PPD-Decode")) for turn in turns)


async def at_once(count: int, one: Callable[[int], Awaitable[Turn]]) -> list[Turn]:
    return await asyncio.gather(*(one(n) for n in range(count)))


@pytest.mark.parametrize(
    ("names", "settings", "bad", "fault"),
    [
        ("R1 R2", REPLICA, "R1", Order(FaultKind.ERROR, times=1000)),
        ("R1 R2", REPLICA, "R1", Order(FaultKind.RESET, times=1000)),
        ("R1 R2", REPLICA, "R1", Order(FaultKind.BODY, body="no JSON", times=1000)),
        ("P1 P2 D1", SPLIT, "P1", Order(FaultKind.ERROR, times=1000)),
        ("P1 D1 D2", SPLIT, "D1", Order(FaultKind.CLOSE, phase=FaultPhase.HEAD, times=1000)),
    ],
    ids=["replica-5xx", "replica-reset", "replica-garbage", "prefill-5xx", "decode-close"],
)
async def test_a_worker_that_fails_three_times_in_a_row_is_passed_over(
    start_fleet: Any, names: str, settings: Any, bad: str, fault: Order
) -> None:
    async with start_fleet(names, breaker_open_s=60.0, **settings) as fleet:
        fleet.engines[bad].faults = Faults([fault])
        found = Counter[Any]()
        async with asyncio.timeout(60):
            while not states(fleet):  # a load report may favour the other one for a while
                found += await openers(fleet, 1)
        # A reset on a connection that was open before may be its end, so those are asked a second time each.
        times = asked(fleet)[bad]
        assert times == 3 or (fault.kind is FaultKind.RESET and 3 <= times <= 6)
        assert states(fleet) == {bad: "open"}
        found += await openers(fleet, 12)
        assert asked(fleet)[bad] == times
        assert {status for status, _ in found} == {200}
        assert await fleet.metric("ppd_breakers_open") == 1


@pytest.mark.parametrize(
    "fault",
    [
        Order(FaultKind.ERROR, status=400, times=1000),
        Order(FaultKind.ERROR, status=404, times=1000),
        Order(FaultKind.ERROR, status=422, times=1000),
        Order(FaultKind.ERROR, status=429, times=1000),
        Order(FaultKind.ERROR, status=503, retry_after_s=1, times=1000),
    ],
    ids=lambda order: str(order.status),
)
@pytest.mark.parametrize(("names", "settings"), [("R1", REPLICA), ("P1 D1", SPLIT)], ids=["alone", "pair"])
async def test_what_is_no_failure_of_the_worker_opens_nothing(
    start_fleet: Any, names: str, settings: Any, fault: Order
) -> None:
    async with start_fleet(names, queue_timeout_s=0.1, breaker_failures=2, **settings) as fleet:
        for engine in fleet.engines.values():
            engine.faults = Faults([replace_order(fault)])
        assert {status for status, _ in await openers(fleet, 4)} == {fault.status}
        assert states(fleet) == {}
        assert sum(asked(fleet).values()) >= 4


def replace_order(order: Order) -> Order:
    """An engine uses its orders up."""
    return Order(**{name: getattr(order, name) for name in order.__struct_fields__})


async def test_clients_that_leave_open_nothing(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", breaker_failures=1, **SPLIT) as fleet:

        def received_more(name: str, before: int) -> bool:
            return len(fleet.engines[name].received) > before

        for name in ("P1", "D1"):
            fleet.engines[name].faults = Faults(hang=3)
            for n in range(3):
                before = len(fleet.engines[name].received)
                turn = asyncio.create_task(fleet.conversation().say(f"{name} {n} {LONG}"))
                await fleet.until(partial(received_more, name, before))
                turn.cancel()
            fleet.engines[name].faults = Faults()
        await fleet.until(lambda: all(not view.inflight for view in fleet.proxy.state.registry.views()))
        assert states(fleet) == {}
        assert (await fleet.conversation().say(LONG)).status == 200


async def test_half_open_lets_one_through_and_its_failure_doubles_the_time(start_fleet: Any) -> None:
    async with start_fleet("R1 R2", engine={"time_scale": 0.1}, breaker_open_s=3.0, **REPLICA) as fleet:
        bad = fleet.engines["R1"]
        bad.faults = Faults(refuse=1000, refuse_status=500)
        await at_once(12, lambda n: fleet.conversation().say(f"{n} {LONG}"))
        before = len(bad.received)
        await fleet.until(lambda: states(fleet) == {"R1": "half_open"})
        turns = await at_once(16, lambda n: fleet.conversation().say(f"more {n} {LONG}"))
        assert {turn.status for turn in turns} == {200}
        assert len(bad.received) == before + 1
        assert states(fleet, in_s=3.0) == {"R1": "open"}, "for longer than the first time"
        assert states(fleet, in_s=6.0) == {"R1": "half_open"}


async def test_a_probe_that_succeeds_brings_the_worker_back(start_fleet: Any) -> None:
    async with start_fleet("R1 R2", breaker_open_s=1.0, **REPLICA) as fleet:
        fleet.engines["R1"].faults = Faults(refuse=1000, refuse_status=500)
        while not states(fleet):  # one after the other: a leg that was asked before and ends well would close it again
            assert {status for status, _ in await openers(fleet, 1)} == {200}
        fleet.engines["R1"].faults = Faults()
        await fleet.until(lambda: states(fleet) == {"R1": "half_open"})
        found = Counter[Any]()
        async with asyncio.timeout(60):
            while found[200, "R1"] < 5:  # a load report made during one of its turns favours the other for a while
                found += await openers(fleet, 1)
        assert states(fleet) == {}
        assert {status for status, _ in found} == {200}


async def test_failures_with_a_success_between_them_open_nothing(start_fleet: Any) -> None:
    async with start_fleet("R1", retry_burst=1, retry_share=0.0, **REPLICA) as fleet:
        for _ in range(3):
            fleet.engines["R1"].faults = Faults(refuse=2, refuse_status=500)
            assert [status for status, _ in await openers(fleet, 3)] == [502, 200]
        assert states(fleet) == {}


@pytest.mark.parametrize(("names", "route"), [("R1 R2", REPLICA), ("P1 P2 D1 D2", SPLIT)], ids=["replica", "split"])
async def test_retries_are_a_share_of_traffic_however_much_fails(start_fleet: Any, names: str, route: Any) -> None:
    count, burst, share = 60, 5, 0.2
    async with start_fleet(names, retry_burst=burst, retry_share=share, breaker_open_s=0.05, **route) as fleet:
        for engine in fleet.engines.values():
            engine.faults = Faults(refuse=10_000, refuse_status=500)
        turns = await at_once(count, lambda n: fleet.conversation().say(f"{n} {LONG}"))
        assert {turn.status for turn in turns} == {502}
        assert count <= sum(asked(fleet).values()) <= count * (1 + share) + burst
        assert await fleet.metric('ppd_retries_total{result="no_budget"}') > 0
        await fleet.until(fleet.idle)


async def test_a_wedged_pair_is_found_avoided_and_taken_back_without_a_client_noticing(
    start_fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV from P1 never gets to D1, while both are healthy: the canary finds out, and then that it is over."""
    monkeypatch.setattr("ppd.proxy.health.canary.LIMIT_S", 1.0)
    monkeypatch.setattr("ppd.proxy.health.canary.LOOK_EVERY_S", 0.05)
    async with start_fleet("P1 P2 D1 D2", canary_interval_s=0.2, breaker_open_s=0.3, **SPLIT) as fleet:
        fleet.engines["D1"].faults = Faults(wedge=[fleet.engines["P1"].engine_id])
        await fleet.until(lambda: ("P1", "D1") in states(fleet))
        assert set(states(fleet)) == {("P1", "D1")}
        # Long enough for the breaker to be half open again and again: no turn is ever the one to try.
        pairs, rounds, wedged = Counter[tuple[str, str]](), 0, 'ppd_canaries_total{result="wedged"}'
        while rounds < 20 or await fleet.metric(wedged) < 3:
            rounds += 1
            texts = [f"{n} in round {rounds}, {LONG}" for n in range(6)]
            turns = await asyncio.wait_for(asyncio.gather(*(fleet.conversation().say(text) for text in texts)), 60)
            assert {(turn.status, turn.route) for turn in turns} == {(200, "SPLIT")}
            pairs.update((turn.headers["X-PPD-Prefill"], turn.headers["X-PPD-Decode"]) for turn in turns)
        assert set(pairs) == {("P1", "D2"), ("P2", "D1"), ("P2", "D2")}
        fleet.engines["D1"].faults = Faults()
        await fleet.until(lambda: states(fleet) == {})
        assert await fleet.metric("ppd_handoffs_outstanding") >= 2, "the canaries' own, until their leases end"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_p_whose_kv_nobody_gets_costs_no_turn_and_no_d_its_breaker(start_fleet: Any, stream: bool) -> None:
    """Its HTTP server and its health are fine; its side channel is closed."""
    async with start_fleet("P1 P2 D1 D2", **SPLIT) as fleet:
        fleet.engines["P1"].side_listener.sever()

        async def ask(number: int) -> tuple[int, bool]:
            body = {"model": "sim", "messages": [{"role": "user", "content": f"{number} {LONG}"}], "stream": stream}
            async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as answer:
                return answer.status, b'"error"' in await answer.read()

        assert {await asking for asking in [asyncio.create_task(ask(number)) for number in range(24)]} == {(200, False)}
        assert {("P1", "D1"), ("P1", "D2")} >= set(states(fleet)) != set()


async def test_a_d_that_is_slow_or_overloaded_is_not_the_pairs_fault(
    start_fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppd.proxy.health.canary.LIMIT_S", 0.3)
    monkeypatch.setattr("ppd.proxy.health.canary.LOOK_EVERY_S", 0.05)
    settings = {"canary_interval_s": 0.1, "breaker_failures": 1000, "connect_timeout_s": 0.1}
    async with start_fleet("P1 D1", **settings, **SPLIT) as fleet:
        for fault, result in (
            (Order(FaultKind.SLOW, delay_s=5.0, times=1000), "local_failed"),
            (Order(FaultKind.ERROR, status=503, retry_after_s=1, times=1000), "overloaded"),
            (Order(FaultKind.ERROR, status=500, times=1000), "local_failed"),
            (Order(FaultKind.ERROR, status=500, times=1000, leg=FaultLeg.DECODE), "wedged"),
        ):
            fleet.engines["D1"].faults = Faults([fault])
            sample = f'ppd_canaries_total{{result="{result}"}}'
            before = await fleet.metric(sample)
            async with asyncio.timeout(60):
                while await fleet.metric(sample) < before + 2:
                    assert states(fleet) == {} or result == "wedged"
                    await asyncio.sleep(0.02)
                    if result == "wedged" and states(fleet):
                        break
        assert set(states(fleet)) == {("P1", "D1")}


async def test_a_canary_at_a_half_open_breaker_is_the_one_that_is_let_through(
    start_fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppd.proxy.health.canary.LOOK_EVERY_S", 0.01)
    settings = {"canary_interval_s": 0.05, "breaker_open_s": 0.2, "breaker_failures": 1}
    async with start_fleet("P1 P2 D1", **settings, **SPLIT) as fleet:
        p = fleet.engines["P1"]
        p.faults = Faults(refuse=1, refuse_status=500)
        await fleet.until(lambda: "P1" in states(fleet))
        p.faults = Faults(hang=1000)
        before = len(p.received)
        await fleet.until(lambda: len(p.received) > before)
        found = await openers(fleet, 6)
        assert {status for status, _ in found} == {200}
        assert len(p.received) == before + 1, "one at a time"


async def test_a_worker_that_was_killed_comes_back_by_itself_and_begins_small(start_fleet: Any) -> None:
    async with start_fleet("D1", engine={"time_scale": 0.2}, warm_up_s=1000.0) as fleet:
        registry = fleet.proxy.state.registry

        def age(name: str, seconds: float) -> None:
            (view,) = [view for view in registry.views() if view.name == name]
            registry.recovered(view.id, fleet.proxy.state.now() - seconds)

        async def share(name: str) -> float:
            # A report made during the turns before would count them still.
            await fleet.until(lambda: not any(view.requests for view in registry.views() if view.up))
            known = len(fleet.proxy.state.sessions)
            # Fewer than a worker has places for, as those without a place go to the other.
            turns = await at_once(START - 1, lambda n: fleet.conversation().say(f"{known + n} {LONG}"))
            assert {turn.status for turn in turns} == {200}
            return sum(turn.headers["X-PPD-Decode"] == name for turn in turns) / len(turns)

        await fleet.add("D2", time_scale=0.2, shutdown_s=0.1)
        for name in ("D1", "D2"):
            age(name, 2000)
        assert 0.35 <= await share("D2") <= 0.65
        await fleet.kill("D2")
        await fleet.until(lambda: fleet.state("D2") == "down")
        assert await share("D2") == 0
        await fleet.start_again("D2")
        await fleet.until(lambda: fleet.state("D2") == "up")
        assert await share("D2") <= 0.2
        age("D2", 2000)
        assert 0.35 <= await share("D2") <= 0.65


@pytest.mark.parametrize("streams", [False, True])
async def test_turns_on_a_worker_that_fell_silent_go_elsewhere(start_fleet: Any, streams: bool) -> None:
    async with start_fleet("R1 R2", probe_interval_s=0.05, **REPLICA) as fleet:
        silent, body = fleet.engines["R1"], {"max_tokens": 8, "stream": streams, "model": "sim"}
        silent.faults = Faults(hang=1000)

        async def ask(n: int) -> str:
            messages = [{"role": "user", "content": f"{n} {LONG}"}]
            async with fleet.session.post(
                f"{fleet.base_url}/v1/chat/completions", json={**body, "messages": messages}
            ) as response:
                assert (response.status, response.headers["X-PPD-Decode"]) == (200, "R2")
                return str(await response.text())

        asking = [asyncio.create_task(ask(n)) for n in range(8)]
        await fleet.until(lambda: len(silent.received) >= 3)
        assert not all(task.done() for task in asking)
        silent.is_dead = True
        texts = await asyncio.wait_for(asyncio.gather(*asking), 60)
        assert all("[DONE]" in text for text in texts) or not streams
        assert await fleet.metric('ppd_leg_failures_total{cause="worker_gone",leg="replica",phase="request_sent"}') >= 3


async def test_a_stream_from_a_worker_that_fell_silent_ends_with_an_error(start_fleet: Any) -> None:
    async with start_fleet("R1", probe_interval_s=0.05, idle_timeout_s=0.3, **REPLICA) as fleet:
        fleet.engines["R1"].faults = Faults([Order(FaultKind.HANG, phase=FaultPhase.EVENTS, after_events=4)])
        body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 24}
        async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as response:
            assert await response.content.readany()
            fleet.engines["R1"].is_dead = True
            rest = await asyncio.wait_for(response.text(), 60)
        assert '"error"' in rest.rstrip().split("\n\n")[-1]
        assert "[DONE]" not in rest
        receipt = (await fleet.admin("GET", "/requests"))[1]["newest"][0]
        assert (receipt["outcome"], receipt["error"]) == ("broken", "replica mid_stream: timeout")


async def test_a_turn_asks_a_d_that_fails_handoffs_once_while_there_is_another(start_fleet: Any) -> None:
    """One that fails at once has no load, so it would be chosen again, with another P."""
    settings = SPLIT | {"breaker_failures": 1000, "breaker_open_s": 0.01, "retry_burst": 1000}
    async with start_fleet("P1 P2 D1 D2", **settings) as fleet:
        fleet.engines["D1"].faults = Faults([Order(FaultKind.ERROR, times=1000)])
        sick = next(view.id for view in fleet.proxy.state.registry.views() if view.name == "D1")
        for _ in range(12):
            chat = fleet.conversation()
            for _ in range(2):
                turn = await chat.say(f"{next(NUMBERS)} {LONG}")
                legs = (await fleet.receipt(turn))["legs"]
                assert (turn.status, sum(leg["address"] == sick for leg in legs) > 1) == (200, False), legs


@pytest.mark.parametrize(
    "url", ["https://no.example/a.png", "https:\\/\\/no.example\\/a.png", "\\u0068ttps\\u003a//no.example"]
)
@pytest.mark.parametrize("where", ["/v1/embeddings", "/pooling"])
async def test_outside_of_conversations_too_an_engine_is_not_blamed_for_a_url(
    start_fleet: Any, where: str, url: str
) -> None:
    """Each engine fails at it. One that fails at what another one answers is to blame."""
    part = f'{{"type": "image_url", "image_url": {{"url": "{url}"}}}}'
    body = f'{{"model": "sim", "messages": [{{"role": "user", "content": [{part}]}}]}}'
    says = 500

    async def fetches(_: web.Request) -> web.Response:
        return web.json_response({"data": []}, status=says)

    async def fails(_: web.Request) -> web.Response:
        return web.json_response({}, status=500)

    settings = REPLICA | {"breaker_failures": 2, "retry_burst": 1000}
    async with start_fleet("", **settings) as fleet, odd_worker(fleet, fails, "R"), odd_worker(fleet, fetches, "R"):
        headers = {"Content-Type": "application/json"}
        for says, told, opened in ((500, 502, {}), (400, 400, {}), (200, 200, {"R1": "open"})):  # noqa: B007
            for _ in range(4):
                async with fleet.session.post(fleet.base_url + where, data=body, headers=headers) as answer:
                    assert answer.status == told
            assert states(fleet) == opened
