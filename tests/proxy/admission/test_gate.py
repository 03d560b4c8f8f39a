"""Bounds, deadlines and counts of the way in."""

from __future__ import annotations

import asyncio

import pytest

from ppd.proxy.errors import Overloaded
from tests.support.admission import Door, settle, ticket
from tests.support.clock import run, scenario


@scenario
async def test_with_room_and_nobody_waiting_a_turn_enters_without_yielding() -> None:
    door = Door()
    with pytest.raises(StopIteration) as ended:
        door.admission.enter(ticket()).send(None)
    permit = ended.value.value
    assert (door.admission.inside, door.admission.waiting, door.waited_s) == (1, 0, [])
    permit.release()
    await door.close()


@scenario
async def test_a_freed_permit_goes_to_the_next_and_leaving_twice_frees_one() -> None:
    door = Door(inside=2)
    clients = [door.client(f"t{number}") for number in range(5)]
    await settle()
    assert (door.log, door.admission.inside, door.admission.waiting) == (["t0", "t1"], 2, 3)
    clients[0].leave()  # by two calls
    await settle()
    assert (door.log[2:], door.admission.inside, door.admission.waiting) == (["t2"], 2, 2)
    await door.close()


@scenario
async def test_the_queue_is_bounded() -> None:
    door = Door(queue=2)
    for number in range(4):
        door.client(f"t{number}")
    await settle()
    assert door.log == ["t0", "t3: queue_full"]
    assert door.refused == ["queue_full"]
    await door.close()


@scenario
async def test_without_a_queue_none_waits() -> None:
    door = Door(queue=0)
    first, _ = door.client("t0"), door.client("t1")
    await settle()
    assert door.log == ["t0", "t1: queue_full"]
    first.leave()
    await settle()
    door.client("t2")
    await settle()
    assert door.log[2:] == ["t2"]
    await door.close()


@scenario
async def test_a_more_urgent_turn_displaces_the_last_waiter_of_a_worse_class() -> None:
    door = Door(queue=2)
    for name, priority in [("a0", 0), ("a1", 1), ("a2", 1), ("b3", 1), ("a4", 0), ("a5", 5)]:
        door.client(name, priority=priority, tenant="t")
        await settle()
    assert door.log == ["a0", "b3: queue_full", "a2: queue_full", "a5: queue_full"]
    assert door.admission.waiting == 2
    await door.close()


@scenario
async def test_a_tenants_flood_does_not_close_the_queue_to_others() -> None:
    door = Door(queue=5)
    flood = [door.client(f"a{number}") for number in range(20)]
    await settle()
    door.client("b0")
    await settle()
    assert "b0: queue_full" not in door.log
    flood[0].leave()
    await settle()
    flood[1].leave()
    await settle()
    assert "b0" in door.log
    await door.close()


@scenario
async def test_one_waits_until_its_deadline_and_no_longer() -> None:
    door, loop = Door(timeout_s=30.0), asyncio.get_running_loop()
    door.client("in")
    await settle()
    started_s = loop.time()
    queue, own = door.client("queue"), door.client("own", deadline_s=started_s + 4.0)
    await own.task
    assert loop.time() == pytest.approx(started_s + 4.0)
    await queue.task
    assert loop.time() == pytest.approx(started_s + 30.0)
    assert door.refused == ["queue_timeout", "queue_timeout"]
    door.client("late", deadline_s=loop.time() - 1.0)
    await settle()
    assert (door.log[-1], door.admission.waiting) == ("late: queue_timeout", 0)
    await door.close()


@scenario
async def test_a_deadline_that_is_over_matters_to_those_that_have_to_wait_only() -> None:
    door = Door()
    door.client("in", deadline_s=0.0)
    await settle()
    assert door.log == ["in"]
    await door.close()


@scenario
async def test_a_busy_model_holds_up_its_own_turns_only() -> None:
    door = Door(inside=10, busy=1)
    clients = [door.client(f"b{number}", needs="busy") for number in range(3)]
    await settle()
    door.client("i0", needs="idle")
    await settle()
    assert (door.log, door.admission.waiting) == (["b0", "i0"], 2)
    clients[0].leave()
    await settle()
    assert door.log[2:] == ["b1"]
    await door.close()


@scenario
async def test_one_free_slot_is_not_given_to_two_turns_that_have_not_run_yet() -> None:
    door = Door(inside=10, m=1)
    first, _, third = door.client("t0"), door.client("t1"), door.client("t2")
    await settle()
    first.leave()
    await first.task
    for _ in range(3):
        door.admission.admit_waiting()
    third.task.cancel()
    door.admission.admit_waiting()
    assert door.admission.waiting == 1
    await asyncio.wait([third.task])
    assert door.log == ["t0", "t1"]
    await door.close()


@scenario
async def test_nor_is_it_given_to_one_that_just_comes_by() -> None:
    door = Door(inside=10, m=1)
    first, second = door.client("t0"), door.client("t1")
    await settle()
    first.leave()
    while door.admission.waiting:
        await asyncio.sleep(0)
    assert not second.is_inside, "it was admitted and has not run since"
    assert door.admission.try_enter(second.ticket) is None
    await settle()
    assert door.log == ["t0", "t1"]
    await door.close()


@scenario
async def test_all_new_room_is_used_by_one_call() -> None:
    door = Door(inside=100, m=0)
    for number in range(8):
        door.client(f"t{number}")
    await settle()
    assert door.log == []
    door.slots["m"] = 5  # a worker joined
    door.admission.admit_waiting()
    await settle()
    assert (len(door.log), door.admission.waiting) == (5, 3)
    await door.close()


@scenario
async def test_a_newcomer_does_not_overtake_those_that_wait_for_the_same() -> None:
    door = Door(inside=10, m=0)
    door.client("a0")
    await settle()
    door.slots["m"] = 1
    door.client("b0")
    await settle()
    assert door.log == ["a0"]
    await door.close()


@scenario
async def test_a_client_that_leaves_the_queue_disappears_at_once() -> None:
    door = Door(queue=1)
    door.client("t0")
    waiting = door.client("t1")
    await settle()
    waiting.task.cancel()
    await asyncio.wait([waiting.task])
    assert (door.admission.inside, door.admission.waiting, door.refused) == (1, 0, [])
    await door.close()


@pytest.mark.parametrize("leaves_first", [True, False])
def test_a_client_that_leaves_while_it_is_admitted_gives_its_permit_to_the_next(leaves_first: bool) -> None:
    """Permit given and task cancelled in one round of the loop, in either order."""

    async def work() -> None:
        door = Door()
        permit = await door.admission.enter(ticket())
        gone, patient = door.client("gone"), door.client("patient")
        await settle()
        if leaves_first:
            gone.task.cancel()
        permit.release()
        if not leaves_first:
            gone.task.cancel()
        await settle()
        assert gone.task.cancelled()
        assert door.log == ["patient"]
        assert (door.admission.inside, door.admission.waiting, patient.is_inside) == (1, 0, True)
        await door.close()

    run(work())


@scenario
async def test_a_tenant_is_not_charged_for_a_client_that_left_while_it_was_admitted() -> None:
    door = Door()
    permit = await door.admission.enter(ticket())
    gone = door.client("a0", cost=1000)
    for name in ("a1", "b0", "b1"):
        door.client(name, cost=10)
    await settle()
    permit.release()
    gone.task.cancel()
    await settle()
    assert door.log == ["a1"]
    await door.close()


@scenario
async def test_one_that_waits_again_gives_up_its_permit_and_returns_before_later_ones() -> None:
    door, loop = Door(), asyncio.get_running_loop()
    first = door.client("a0")
    second, _ = door.client("a1"), door.client("a2")
    await settle()
    first.wait_again(5.0)
    await settle()
    assert (door.log, door.admission.inside, door.admission.waiting) == (["a0", "a1"], 1, 2)
    started_s = loop.time()
    await asyncio.sleep(6.0)
    assert not first.is_inside
    second.leave()
    await settle()
    assert door.log == ["a0", "a1", "a0"]
    assert door.waited_s == [0.0, pytest.approx(loop.time() - started_s)]
    await door.close()


@scenario
async def test_one_that_waits_again_is_not_charged_for_its_first_try() -> None:
    door = Door()
    permit = await door.admission.enter(ticket())
    client = door.client("a0", cost=1000)
    for name in ("b0", "b1"):
        door.client(name, cost=10)
    await settle()
    permit.release()
    await settle()
    client.wait_again(0.0)
    await settle()
    assert door.log == ["a0", "b0"]
    door.clients[1].leave()
    await settle()
    assert door.log == ["a0", "b0", "a0"]
    await door.close()


@scenario
async def test_one_that_waits_again_comes_no_earlier_than_it_was_told() -> None:
    door, loop = Door(), asyncio.get_running_loop()
    client = door.client("a0")
    await settle()
    started_s = loop.time()
    client.wait_again(5.0)
    await asyncio.sleep(4.9)
    door.admission.admit_waiting()
    await settle()
    assert door.log == ["a0"]
    newcomer = door.client("b0")  # the permit is free meanwhile
    await settle()
    newcomer.leave()
    await asyncio.sleep(0.2)
    assert door.log == ["a0", "b0", "a0"]
    assert loop.time() == pytest.approx(started_s + 5.1)
    await door.close()


@scenario
async def test_waiting_again_keeps_the_deadline() -> None:
    door, loop = Door(timeout_s=30.0), asyncio.get_running_loop()
    started_s = loop.time()
    clients = [door.client("a0"), door.client("b0"), door.client("c0")]
    await settle()
    await asyncio.sleep(20.0)
    clients[0].wait_again(10.5)  # comes due after its deadline: said at once
    await settle()
    assert door.refused == ["workers_overloaded"]
    assert clients[0].refusal is not None
    assert clients[0].refusal.retry_after_s == pytest.approx(10.5)
    assert clients[1].is_inside
    clients[1].wait_again(1.0)
    await clients[1].task
    assert loop.time() == pytest.approx(started_s + 30.0)
    await asyncio.sleep(1.0)
    clients[2].wait_again(0.0)  # its deadline is over
    await clients[2].task
    assert door.refused == ["workers_overloaded", "queue_timeout", "queue_timeout"]
    await door.close()


@scenario
async def test_one_that_a_dead_worker_left_waits_from_then_on_whatever_the_queue() -> None:
    door, started_s = Door(queue=0, timeout_s=30.0), asyncio.get_running_loop().time()
    client = door.client("a0")
    await asyncio.sleep(40.0)
    client.wait_again(1.0, is_moved=True)
    await asyncio.sleep(2.0)
    assert (client.is_inside, door.refused) == (True, [])
    client.wait_again(1.0, is_moved=True)
    door.slots["m"] = 0
    await client.task
    assert asyncio.get_running_loop().time() == pytest.approx(started_s + 70.0), "not from its second return"
    await door.close()


@scenario
async def test_a_full_queue_takes_one_back_in_its_old_place() -> None:
    door = Door(inside=1, queue=1)
    first, _ = door.client("a0"), door.client("a1")
    await settle()
    door.slots["m"] = 0
    first.wait_again(0.0)
    await settle()
    assert (door.log, door.admission.inside) == (["a0", "a1: queue_full"], 0)
    await door.close()


@scenario
async def test_draining_refuses_all_that_wait_and_all_that_come() -> None:
    door = Door()
    inside, _ = door.client("t0"), door.client("t1")
    await settle()
    door.admission.close_down()
    door.client("t2")
    await settle()
    assert door.log == ["t0", "t1: draining", "t2: draining"]
    assert inside.is_inside
    inside.wait_again(0.0)
    await settle()
    assert (door.log[-1], door.admission.inside) == ("t0: draining", 0)
    with pytest.raises(Overloaded, match="shutting down"):
        door.admission.try_enter(ticket())
    await door.close()


async def turns_per_second(door: Door, rate_rps: float) -> None:
    for _ in range(int(30 * rate_rps)):
        permit = await door.admission.enter(ticket())
        await asyncio.sleep(1 / rate_rps)
        permit.release()


@pytest.mark.parametrize(
    ("rate_rps", "waiting", "retry_after_s"),
    [(2.0, 9, 5.0), (2.0, 0, 1.0), (0.1, 9, 60.0), (0.0, 3, 30.0), (10.0, 49, 5.0)],
)
def test_clients_are_told_when_their_turn_would_come(rate_rps: float, waiting: int, retry_after_s: float) -> None:
    async def work() -> None:
        door = Door(queue=100)
        await turns_per_second(door, rate_rps)
        permit = await door.admission.enter(ticket())
        for number in range(waiting):
            door.client(f"t{number}")
            door.client("z", priority=9)  # not ahead of the one that is refused
        refused = door.client("t", deadline_s=asyncio.get_running_loop().time() + 0.01)
        await refused.task
        assert refused.refusal is not None
        assert refused.refusal.retry_after_s == pytest.approx(retry_after_s, rel=0.1)
        permit.release()
        await door.close()

    run(work())


@scenario
async def test_a_permit_that_is_not_inside_cannot_wait_again() -> None:
    door = Door()
    permit = await door.admission.enter(ticket())
    permit.release()
    with pytest.raises(AssertionError):
        await permit.wait_again(0.0)
    await door.close()
