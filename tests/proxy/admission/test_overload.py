"""A standing queue is not a burst: when the wait is bounded, and what that does for turns."""

from __future__ import annotations

import asyncio
import math
from random import Random

import pytest

from ppd.proxy.admission.overload import STANDING_S, Overload
from tests.support.admission import Door, settle
from tests.support.clock import run

TAKES_S = 0.5  # a turn
PLACES = 10


def after(arriving_rps: float, departing_rps: float, seconds: float, *, limit_s: float = 0.5) -> tuple[Overload, float]:
    """An overload watch in front of a queue that has stood for so long, and the time."""
    watch, now_s = Overload(limit_s, 0.0), 0.0
    watch.queue_is(1, now_s)
    arrived = departed = 0.0
    while now_s < seconds:
        now_s += 0.01
        arrived, departed = arrived + arriving_rps / 100, departed + departing_rps / 100
        while arrived >= 1:
            watch.arrived(now_s)
            arrived -= 1
        while departed >= 1:
            watch.departed(now_s)
            departed -= 1
    return watch, now_s


@pytest.mark.parametrize(
    ("arriving_rps", "departing_rps", "seconds", "inside", "wait_s"),
    [
        (500, 100, 5.0, 20, 0.5),
        (500, 100, 5.0, 300, 1.5),  # half of the 3 s that a turn takes
        (500, 100, 1.0, 20, math.inf),  # a burst so far
        (120, 100, 5.0, 20, math.inf),  # within chance
        (100, 100, 5.0, 900, math.inf),  # clients that wait for their answers
        (500, 0, 5.0, 20, math.inf),  # every worker is down: that is no overload
        (5, 2, 9.0, 60, math.inf),  # too few to tell
    ],
)
def test_only_a_standing_queue_that_more_enter_than_leave_is_bounded(
    arriving_rps: float, departing_rps: float, seconds: float, inside: int, wait_s: float
) -> None:
    watch, now_s = after(arriving_rps, departing_rps, seconds)
    assert watch.wait_limit_s(inside, now_s) == pytest.approx(wait_s, rel=0.1)


def test_it_ends_when_the_queue_is_empty() -> None:
    watch, now_s = after(500, 100, 5.0)
    watch.queue_is(0, now_s)
    assert watch.wait_limit_s(20, now_s) == math.inf
    watch.queue_is(1, now_s)
    assert watch.wait_limit_s(20, now_s + STANDING_S / 2) == math.inf


def test_without_a_limit_nothing_is_bounded() -> None:
    watch, now_s = after(500, 100, 5.0, limit_s=0.0)
    assert watch.wait_limit_s(20, now_s) == math.inf


class Fleet:
    """Workers with `PLACES` places, each turn taking `TAKES_S`, behind an admission: in virtual time."""

    def __init__(self, *, wait_s: float = 0.5) -> None:
        self.door = Door(inside=PLACES, queue=2048, wait_s=wait_s)
        self.now = asyncio.get_running_loop().time
        self.took_s: list[float] = []
        self.refused: list[str] = []
        self.random = Random(0)

    async def turn(self) -> None:
        arrived_s = self.now()
        client = self.door.client("t")
        while not client.task.done() and not client.is_inside:
            await asyncio.sleep(0.02)
        if client.is_inside:
            await asyncio.sleep(TAKES_S)
            client.leave()
            await client.task
            self.took_s.append(self.now() - arrived_s)
        elif client.refusal is not None:
            self.refused.append(client.refusal.reason)

    async def arrivals(self, rate_rps: float, seconds: float) -> None:
        until_s, turns = self.now() + seconds, list[asyncio.Task[None]]()
        while self.now() < until_s:
            turns.append(asyncio.create_task(self.turn()))
            await asyncio.sleep(self.random.expovariate(rate_rps))
        await asyncio.gather(*turns)


def test_at_five_times_the_capacity_nearly_all_of_it_is_used_and_no_answer_is_late() -> None:
    async def work() -> None:
        fleet, seconds = Fleet(), 12.0
        await fleet.arrivals(5 * PLACES / TAKES_S, seconds)
        assert len(fleet.took_s) >= 0.9 * seconds * PLACES / TAKES_S
        assert sorted(fleet.took_s)[int(0.99 * len(fleet.took_s))] < 2.0
        assert set(fleet.refused) == {"overload"}
        await fleet.door.close()

    run(work())


def test_clients_that_wait_for_their_answers_are_all_served_however_many() -> None:
    async def work() -> None:
        fleet = Fleet()

        async def conversation() -> None:
            for _ in range(4):
                await fleet.turn()

        await asyncio.gather(*(conversation() for _ in range(6 * PLACES)))
        assert (len(fleet.took_s), fleet.refused) == (4 * 6 * PLACES, [])
        await fleet.door.close()

    run(work())


def test_a_burst_of_many_tenants_under_overload_is_turned_away_in_a_few_looks_each() -> None:
    """Each tenant is looked up by its name."""

    async def looks(count: int) -> int:
        class Name(str):
            looked = 0

            def __hash__(self) -> int:
                Name.looked += 1
                return super().__hash__()

        door = Door(inside=100, queue=2048, wait_s=0.5, m=20)
        first = [door.client("f") for _ in range(21)]  # one waits
        for turn in first[:10]:
            await asyncio.sleep(0.14)
            turn.leave()
            door.slots["m"] -= 1
            await settle()
        for number in range(count):
            door.client("t", tenant=Name(number))
        await settle()
        assert door.admission.waiting == count + 1
        await asyncio.sleep(STANDING_S - 9 * 0.14)
        Name.looked = 0
        door.client("newest")
        await settle()
        looked = Name.looked
        assert door.admission.waiting < 10
        await door.close()
        return looked

    async def work() -> None:
        few, many = await looks(100), await looks(1000)
        assert many < 15 * few

    run(work())


def test_turns_that_lost_their_worker_are_not_refused_for_their_age() -> None:
    async def work() -> None:
        fleet = Fleet()
        veterans = [fleet.door.client(f"v{number}") for number in range(4)]
        flood = asyncio.create_task(fleet.arrivals(5 * PLACES / TAKES_S, 6.0))
        await asyncio.sleep(5.0)
        for veteran in veterans:
            veteran.wait_again(0.0)
        await asyncio.sleep(0.5)
        await settle()
        assert [veteran.refusal and veteran.refusal.reason for veteran in veterans] == [None] * 4
        for veteran in veterans:
            veteran.leave()
        await flood
        await fleet.door.close()

    run(work())


def test_a_queue_that_was_empty_meanwhile_has_not_stood_since() -> None:
    """However long the turns inside were there before and after."""

    async def work() -> None:
        door = Door(wait_s=0.1, queue=100)
        first, second = door.client("a0"), door.client("a1")
        await settle()
        first.leave()
        await settle()
        assert (door.admission.inside, door.admission.waiting) == (1, 0)
        assert door.admission._overload._standing_since_s == math.inf
        second.leave()
        await settle()
        await door.close()

    run(work())
