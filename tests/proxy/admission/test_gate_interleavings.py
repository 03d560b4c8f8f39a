"""Whatever order things happen in: bounds, counts, no idle permits, and nobody starved within a class."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ppd.proxy.admission.gate import YIELD_S
from tests.support.admission import Client, Door, settle, ticket
from tests.support.clock import LeapingTime, run, scenario

CLIENTS = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from("ab"),
        "needs": st.sampled_from("mn"),
        "priority": st.integers(0, 1),
        "cost": st.integers(1, 50),
        "patience_s": st.sampled_from([0.0, 1.0, 3.0, 100.0]),
    }
)
WHICH = st.integers(0, 30)
STEPS = st.one_of(
    st.tuples(st.just("enter"), CLIENTS),
    st.tuples(st.just("leave"), WHICH),
    st.tuples(st.just("wait_again"), st.tuples(WHICH, st.sampled_from([0.0, 0.5, 2.0, 50.0]))),
    st.tuples(st.just("cancel"), WHICH),
    st.tuples(st.just("slots"), st.tuples(st.sampled_from("mn"), st.integers(0, 3))),
    st.tuples(st.just("admit_waiting"), st.none()),
    st.tuples(st.just("round"), st.none()),  # one round of the loop
    st.tuples(st.just("sleep"), st.sampled_from([0.5, 1.0, 5.0])),
    st.tuples(st.just("settle"), st.none()),
)


async def play(steps: list[tuple[str, Any]], inside: int, queue: int) -> None:
    door, loop, numbers = Door(inside=inside, queue=queue, timeout_s=4.0, m=1, n=2), asyncio.get_running_loop(), count()
    for step, given_ in steps:
        live = [client for client in door.clients if not client.task.done()]
        match step:
            case "enter":
                fields = dict(given_)
                fields["deadline_s"] = loop.time() + fields.pop("patience_s")
                door.client(f"{next(numbers)}", **fields)
            case "leave" if live:
                live[given_ % len(live)].leave()
            case "wait_again" if live:
                live[given_[0] % len(live)].wait_again(given_[1])
            case "cancel" if live:
                live[given_ % len(live)].task.cancel()
            case "slots":
                door.slots[given_[0]] = given_[1]
                door.admission.admit_waiting()
            case "admit_waiting":
                door.admission.admit_waiting()
            case "round":
                await asyncio.sleep(0)
            case "sleep":
                await asyncio.sleep(given_)
            case "settle":
                await settle()
                check_at_rest(door)
        check_bounds(door, inside, queue)
    await settle()
    check_at_rest(door)
    await door.close()
    refusals = Counter(client.refusal.reason for client in door.clients if client.refusal is not None)
    cancelled = sum(client.task.cancelled() for client in door.clients)
    assert not refusals - Counter(door.refused)
    assert Counter(door.refused).total() <= refusals.total() + cancelled


def check_bounds(door: Door, inside: int, queue: int) -> None:
    assert 0 <= door.used.total() <= door.admission.inside <= inside
    assert door.admission.waiting <= queue


def check_at_rest(door: Door) -> None:
    """Nobody waits that could be inside, and the other processes know."""
    assert door.admission.inside == door.used.total()
    assert door.told == (door.admission.inside, door.admission.waiting)
    if door.admission.inside < door.admission._max_inflight:
        assert not any(door.fits(needs) and door.admission._line.is_wanted(needs) for needs in "mn")


@settings(max_examples=2 * settings().max_examples)
@given(steps=st.lists(STEPS, min_size=10, max_size=60), inside=st.integers(1, 4), queue=st.integers(0, 4))
def test_whatever_happens_the_counts_are_right_and_nobody_waits_for_nothing(
    steps: list[tuple[str, Any]], inside: int, queue: int
) -> None:
    run(play(steps, inside, queue))


@settings(max_examples=settings().max_examples // 2)
@given(
    arrivals=st.lists(st.sampled_from("ab"), min_size=5, max_size=40),
    slots=st.integers(1, 3),
    service_s=st.floats(0.1, 3.0),
)
def test_all_that_wait_within_a_class_are_served_in_time(arrivals: list[str], slots: int, service_s: float) -> None:
    """No starvation: with n turns and k slots, all are done after n/k services, and no slot idles before."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        door = Door(inside=slots, queue=1000, timeout_s=1e6)
        started_s = loop.time()
        clients = [door.client(tenant) for tenant in arrivals]

        async def serve(client: Client) -> None:
            while not client.is_inside:
                await asyncio.sleep(service_s / 50)
            await asyncio.sleep(service_s)
            client.leave()

        await asyncio.gather(*map(serve, clients))
        assert loop.time() - started_s <= service_s * (-(-len(arrivals) // slots)) * 1.05
        assert door.refused == []
        await door.close()

    run(work())


@scenario
async def test_a_flooding_tenant_makes_another_wait_for_one_service() -> None:
    loop = asyncio.get_running_loop()
    door = Door(inside=1, queue=2000, timeout_s=1e6)
    for _ in range(1000):
        door.client("a")
    await settle()
    started_s = loop.time()
    other = door.client("b")
    while not other.is_inside:
        await asyncio.sleep(1.0)  # a service
        next(client for client in door.clients if client.is_inside).leave()
        await settle()
    assert loop.time() - started_s <= 2.0
    await door.close()


@scenario
async def test_who_could_enter_when_the_process_goes_on_has_not_waited_for_too_long() -> None:
    door, loop = Door(timeout_s=30.0), asyncio.get_running_loop()
    inside = door.client("in")
    await settle()
    queue, last = door.client("queue"), door.client("last")
    await settle()
    LeapingTime.of(loop).leap(40.0)
    await settle()
    inside.leave()  # it had ended meanwhile, which is seen only now
    await settle()
    assert (door.log, door.refused) == (["in", "queue"], [])
    await last.task
    assert (door.log[-1], door.refused) == ("last: queue_timeout", ["queue_timeout"])
    queue.leave()
    await door.close()


@scenario
async def test_turns_inside_of_other_processes_take_places_too() -> None:
    door = Door(inside=2)
    door.admission.inside_elsewhere = 1
    first, _ = door.client("a0"), door.client("b0")
    await settle()
    assert (door.log, door.admission.try_enter(ticket())) == (["a0"], None)
    first.leave()
    await settle()
    assert door.log == ["a0", "b0"]
    door.client("c0")
    door.admission.admit_waiting()
    await settle()
    assert door.log == ["a0", "b0"]
    door.admission.inside_elsewhere = 0
    door.admission.admit_waiting()
    await settle()
    assert door.log == ["a0", "b0", "c0"]
    await door.close()


@scenario
async def test_a_place_that_comes_free_is_left_for_a_moment_to_turns_that_wait_in_other_processes() -> None:
    door = Door()
    first, _ = door.client("a0"), door.client("b0")
    await settle()
    door.admission.waiting_elsewhere = 1
    first.leave()
    await settle()
    door.admission.admit_waiting()
    await settle()
    assert (door.log, door.admission.try_enter(ticket(needs="n"))) == (["a0"], None)
    await asyncio.sleep(2 * YIELD_S)
    assert door.log == ["a0", "b0"]
    await door.close()


@scenario
async def test_a_client_that_leaves_as_it_is_refused_was_never_inside() -> None:
    door = Door()
    permit = await door.admission.enter(ticket())
    gone = door.client("gone")
    await settle()
    door.admission.close_down()
    gone.task.cancel()
    await settle()
    assert (door.admission.inside, door.admission.waiting) == (1, 0)
    permit.release()
    await door.close()
