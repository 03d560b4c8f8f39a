"""What holds for one proxy holds for several processes of it: bounds, breakers, allowances, the fleet."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ppd.proxy.config import Mode
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.routing.state import State
from ppd.servers.sim.core.fault_orders import FaultKind, Faults, Order
from tests.support.credentials import bearer, client, write_keys
from tests.support.processes import NUMBERS, ProxyGroup, opener, proxy_group
from tests.support.proxy import ProxyClient

REPLICA: dict[str, Any] = {"mode": Mode.REPLICA}
SPLIT: dict[str, Any] = {"mode": Mode.ALWAYS_SPLIT}
LASTS = {"stream": True, "ignore_eos": True, "max_tokens": 20_000}


@asynccontextmanager
async def occupied(at: ProxyClient) -> AsyncIterator[None]:
    """A turn that lasts; at the end its client leaves."""
    body = {"model": "sim", "messages": [{"role": "user", "content": f"{next(NUMBERS)} hold"}], **LASTS}
    async with at.session.post(f"{at.base_url}/v1/chat/completions", json=body) as response:
        assert response.status == 200
        await response.content.readany()
        yield
        response.close()


def states(at: ProxyClient, in_s: float = 0.0) -> dict[Any, str]:
    """Breakers that are not closed, by worker name, as they are after so long if nothing happens."""
    at.proxy.membership.catch_up()
    names = {view.id: view.name for view in at.proxy.state.registry.views()}
    found = at.proxy.state.health.breakers.states(at.proxy.state.now() + in_s)
    return {tuple(names[p] for p in key) if isinstance(key, tuple) else names[key]: v for key, v in found.items()}


def has_heard_of(at: ProxyClient, failures: int) -> bool:
    """Whether it knows of so many in a row: two that fail at once may count as one."""
    at.proxy.membership.catch_up()
    return sum(circuit.failures for circuit in at.proxy.state.health.breakers.circuits.values()) == failures


# -- legs


@pytest.mark.parametrize("end", ["left", "stopped", "killed"])
@pytest.mark.parametrize(("names", "mode"), [("R1 R2", Mode.REPLICA), ("P1 D1", Mode.ALWAYS_SPLIT)])
async def test_what_runs_on_one_is_seen_by_all_until_it_ends(names: str, mode: Mode, end: str) -> None:
    async with proxy_group(names, 3, mode=mode, shutdown_timeout_s=0.1) as group:
        for engine in group.engines.values():
            engine.faults = Faults(hang=1000)
        turn = asyncio.create_task(opener(group.proxies[1]))
        await group.until(lambda: len(set(group.inflight())) == 1 and group.inflight()[0] > 0)
        others = [group.proxies[0], group.proxies[2]]
        assert [one.proxy.state.admission.inside_elsewhere for one in others] == [1, 1]
        if end == "left":
            turn.cancel()
        elif end == "stopped":
            await group.stop(1)
        else:
            await group.kill(1)
            assert min(group.inflight()) > 0
            await group.start(1)
        await group.until(group.idle)
        await asyncio.gather(turn, return_exceptions=True)


# -- breakers


async def broken(group: ProxyGroup, at: int, bad: str = "R1") -> None:
    """A worker's breaker is open, by what one process saw, and all know it.

    The others hear of it within `ROUND_S`: if the process is killed before that, nobody else knows.
    """
    group.engines[bad].faults = Faults([Order(FaultKind.ERROR, times=1000)])
    async with asyncio.timeout(60):
        while not states(group.proxies[at]):
            await opener(group.proxies[at])
    await group.until(lambda: all(states(one) for one in group.proxies.values()))


async def test_a_breaker_that_one_opened_holds_for_all() -> None:
    async with proxy_group("R1 R2", 3, breaker_open_s=60.0, **REPLICA) as group:
        await broken(group, at=1)
        asked = len(group.engines["R1"].received)
        for one in group.proxies.values():
            assert [(await opener(one)).status for _ in range(4)] == [200] * 4
            assert states(one) == {"R1": "open"}
            assert await one.metric("ppd_breakers_open") == 1
        assert len(group.engines["R1"].received) == asked


async def test_failures_in_a_row_are_counted_over_all() -> None:
    async with proxy_group("R1", 3, breaker_open_s=60.0, attempts=1, **REPLICA) as group:
        group.engines["R1"].faults = Faults([Order(FaultKind.ERROR, times=1000)])
        for count, one in enumerate(group.proxies.values()):
            await group.until(partial(has_heard_of, one, count))
            assert not states(one)
            await opener(one)
        await group.until(lambda: all(states(one) == {"R1": "open"} for one in group.proxies.values()))


@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize("which", [0, 1])
async def test_a_successor_does_not_make_the_others_forget_what_failed(which: int, end: str) -> None:
    async with proxy_group("R1 R2", 2, breaker_open_s=60.0, **REPLICA) as group:
        await broken(group, at=1)
        await (group.stop(which) if end == "stop" else group.kill(which))
        newcomer = await group.start(which)
        assert states(newcomer) == {"R1": "open"}
        await asyncio.sleep(1.5)  # it has looked at its fleet once
        assert [states(one) for one in group.proxies.values()] == [{"R1": "open"}] * 2


async def test_one_leg_of_all_may_probe_and_its_success_heals_all() -> None:
    async with proxy_group("R1 R2", 2, breaker_open_s=0.5, **REPLICA) as group:
        await broken(group, at=0)
        bad = group.engines["R1"]
        bad.faults = Faults([Order(FaultKind.SLOW, delay_s=1.0, times=1000)])
        await group.until(lambda: all(states(one) == {"R1": "half_open"} for one in group.proxies.values()))
        asked = len(bad.received)
        probes = []
        while len(bad.received) == asked:
            probes.append(asyncio.create_task(opener(group.proxies[0])))
            await asyncio.sleep(0.05)
        for _ in range(6):
            assert (await opener(group.proxies[1])).headers["X-PPD-Decode"] == "R2"
        assert len(bad.received) == asked + 1
        await asyncio.gather(*probes)
        await group.until(lambda: [states(one) for one in group.proxies.values()] == [{}, {}])


async def test_a_burst_over_all_while_half_open_probes_once() -> None:
    async with proxy_group("R1 R2", 3, breaker_open_s=0.5, **REPLICA) as group:
        await broken(group, at=0)
        bad = group.engines["R1"]
        bad.faults = Faults([Order(FaultKind.HANG, times=1000)])
        await group.until(lambda: all(states(one) == {"R1": "half_open"} for one in group.proxies.values()))
        asked = len(bad.received)
        turns = [asyncio.create_task(opener(group.proxies[number % 3])) for number in range(24)]
        await group.until(lambda: len(bad.received) > asked)
        await group.until(lambda: sum(turn.done() for turn in turns) >= 24 - len(bad.received) + asked)
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)
        assert len(bad.received) == asked + 1


async def test_what_the_canary_finds_holds_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV from P1 never gets to D1, while both are healthy; only the process that leads sends canaries."""
    monkeypatch.setattr("ppd.proxy.health.canary.LIMIT_S", 1.0)
    monkeypatch.setattr("ppd.proxy.health.canary.LOOK_EVERY_S", 0.05)
    async with proxy_group("P1 P2 D1 D2", 2, canary_interval_s=0.2, breaker_open_s=0.3, **SPLIT) as group:
        leader, follower = group.proxies[0], group.proxies[1]
        engines = group.engines
        engines["D1"].faults = Faults(wedge=[engines["P1"].engine_id])
        await group.until(lambda: states(follower).get(("P1", "D1")) == "open")
        for _ in range(8):
            turn = await opener(follower)
            assert turn.status == 200
            assert (turn.headers["X-PPD-Prefill"], turn.headers["X-PPD-Decode"]) != ("P1", "D1")
        assert await follower.metric('ppd_canaries_total{result="wedged"}') >= 1
        engines["D1"].faults = Faults()
        await group.until(lambda: states(leader) == states(follower) == {})


# -- allowances


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute"])
async def test_an_allowance_is_one_for_all(tmp_path: Path, limit: str) -> None:
    file = write_keys(tmp_path / "keys", client("one", **{limit: 3 if "requests" in limit else 1200}), client("two"))
    async with proxy_group("R1", 2, keys_file=file, **REPLICA) as group:
        turns = [await opener(group.proxies[number % 2], bearer("one")) for number in range(12)]
        served = [turn.status for turn in turns].index(429)
        assert 2 <= served <= 6
        assert {turn.status for turn in turns[served:]} == {429}
        assert {turn.headers["X-PPD-Refused"] for turn in turns[served:]} == {limit}
        refused = f'ppd_rate_limited_total{{reason="{limit}"}}'
        assert [await one.metric(refused) for one in group.proxies.values()] == [12 - served] * 2
        assert (await opener(group.proxies[1], bearer("two"))).status == 200


async def test_a_successor_knows_what_was_used_of_an_allowance(tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys", client("one", requests_per_minute=2))
    async with proxy_group("R1", 2, keys_file=file, **REPLICA) as group:
        assert [(await opener(group.proxies[0], bearer("one"))).status for _ in range(3)] == [200, 200, 429]
        await group.stop(1)
        assert (await opener(await group.start(1), bearer("one"))).status == 429


async def test_a_burst_over_all_is_within_the_allowance(tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys", client("one", requests_per_minute=6))
    async with proxy_group("R1", 3, keys_file=file, **REPLICA) as group:
        turns = await asyncio.gather(*(opener(group.proxies[n % 3], bearer("one")) for n in range(24)))
        assert Counter(turn.status for turn in turns) == {200: 6, 429: 18}


# -- bounds


@pytest.mark.parametrize("bound", ["max_inflight", "max_worker_inflight"])
async def test_a_turn_waits_for_one_of_another_process(bound: str) -> None:
    async with proxy_group("R1", 2, engine={"time_scale": 1.0}, **REPLICA, **{bound: 1}) as group:
        async with occupied(group.proxies[0]):
            waiting = asyncio.create_task(opener(group.proxies[1], max_tokens=2))
            await group.until(lambda: group.proxies[1].proxy.state.admission.waiting == 1)
            await asyncio.sleep(0.3)
            assert not waiting.done()
        assert (await waiting).status == 200
        await group.until(group.idle)


@pytest.mark.parametrize("bound", ["max_inflight", "max_worker_inflight"])
async def test_a_burst_over_all_is_within_the_bound(bound: str) -> None:
    async with proxy_group("R1", 3, engine={"time_scale": 0.1}, **REPLICA, **{bound: 2}) as group:
        most, worker = 0, WorkerId(group.engines["R1"].address)

        def taken(state: State) -> int:
            use = state.registry.use(worker)
            return state.admission.inside if bound == "max_inflight" or use is None else use.inflight

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, sum(taken(one.proxy.state) for one in group.proxies.values()))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        turns = await asyncio.gather(*(opener(group.proxies[number % 3]) for number in range(24)))
        watching.cancel()
        assert {turn.status for turn in turns} == {200}
        await group.until(group.idle)
        assert most == 2


@pytest.mark.parametrize("bound", ["max_inflight", "max_worker_inflight"])
async def test_a_queue_at_one_does_not_starve_the_others(bound: str) -> None:
    """Each turn that ends there has a next one waiting beside it; one that came before that waits elsewhere."""
    settings: dict[str, Any] = {**REPLICA, bound: 1, "queue_timeout_s": 20.0}
    async with proxy_group("R1", 2, engine={"time_scale": 0.3}, **settings) as group:
        busy, other = group.proxies[0], group.proxies[1]

        async def ask_on() -> None:
            while True:
                await opener(busy, max_tokens=8)

        asking = [asyncio.create_task(ask_on()) for _ in range(4)]
        await group.until(lambda: busy.proxy.state.admission.waiting >= 3)
        turn = await opener(other, max_tokens=8)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert turn.status == 200


async def test_a_turn_that_goes_back_into_the_queue_frees_its_place_for_all() -> None:
    """Its worker asks to be left alone; a turn of another process has the place meanwhile."""
    settings: dict[str, Any] = {**REPLICA, "max_inflight": 1, "attempts": 3, "queue_timeout_s": 30.0}
    async with proxy_group("R1", 2, **settings) as group:
        group.engines["R1"].faults = Faults([Order(FaultKind.ERROR, status=429, retry_after_s=20, times=1)])
        parked = asyncio.create_task(opener(group.proxies[0]))
        await group.until(lambda: group.proxies[0].proxy.state.admission.waiting == 1)
        await group.until(lambda: group.proxies[1].proxy.state.admission.inside_elsewhere == 0, 0.5)
        assert group.proxies[0].proxy.state.admission.waiting == 1, "and goes on waiting"
        parked.cancel()
        await asyncio.gather(parked, return_exceptions=True)


async def test_a_prompt_that_ended_workers_of_one_process_is_refused_by_all() -> None:
    async with proxy_group("R1 R2 R3", 2, breaker_open_s=60.0, **REPLICA) as group:
        for engine in group.engines.values():
            engine.faults = Faults([Order(FaultKind.KILL)])
        deadly = [{"role": "user", "content": "the prompt that kills"}]
        turns = [await one.chat(deadly) for one in (*group.proxies.values(), *group.proxies.values())]
        assert [turn.body["error"]["code"] for turn in turns] == ["workers_lost"] + ["poisoned_prompt"] * 3
        assert sum(engine.is_dead for engine in group.engines.values()) == 2
        await group.stop(1)
        newcomer = await group.start(1)
        assert (await newcomer.chat(deadly)).body["error"]["code"] == "poisoned_prompt"


async def test_the_arrival_rate_is_that_of_all() -> None:
    async with proxy_group("P1 D1", 2, mode=Mode.TABLE) as group:
        for _ in range(12):
            await opener(group.proxies[0])
        rates = [(await one.receipt(await opener(one)))["qps"] for one in (group.proxies[1], group.proxies[0])]
        assert rates[0] > 0.7 * rates[1]
