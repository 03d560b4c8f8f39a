"""The memory of request bodies: who gets room, who waits, and that nothing stays taken."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ppd.proxy.bodies.body_memory import LOOK_SHARE, SLOWEST_BYTES, BodyMemory, BodyRoom, default_limit, usable_bytes
from ppd.proxy.errors import BodyTooLarge, Overloaded, PPDError
from tests.support.clock import LeapingTime, scenario

MIB = 1024 * 1024
WAIT_S = 10.0


class Body:
    """One body; `said` tells what became of its wait."""

    def __init__(self, memory: BodyMemory) -> None:
        self.room: BodyRoom = memory.room()
        self.said: list[str] = []
        self.arrived = 0  # bytes

    def watch(self) -> None:
        self.room.watch(lambda: self.arrived, self._too_slow)

    def _too_slow(self, error: PPDError) -> None:
        assert error.status == 408
        self.said.append("too slow")
        self.room.free()

    def want(self, mib: float) -> bool:
        return self.room.want(int(mib * MIB), lambda: self.said.append("room"), self._refused)

    def _refused(self, error: PPDError) -> None:
        assert isinstance(error, Overloaded)
        assert (error.status, error.reason) == (503, "body_memory")
        self.said.append("refused")
        self.room.free()


def bodies(count: int, mib: int = 16) -> tuple[BodyMemory, list[Body]]:
    memory = BodyMemory(mib * MIB, WAIT_S)  # large bodies may have 14 of 16
    return memory, [Body(memory) for _ in range(count)]


def refused(memory: BodyMemory) -> float:
    samples = {sample.name: sample.value for metric in memory.gauges() for sample in metric.samples}
    return samples["ppd_bodies_refused_total"]


def test_room_is_taken_and_given_back() -> None:
    memory, (one, other) = bodies(2)
    assert one.want(4)
    assert one.want(10)  # it has grown
    assert one.want(7)  # never smaller
    assert other.want(4)
    assert memory.held_bytes == 14 * MIB
    for body in (one, one, other):
        body.room.free()
    assert memory.held_bytes == 0


def test_a_body_that_alone_is_too_large_is_refused_at_once() -> None:
    memory, (body,) = bodies(1)
    with pytest.raises(BodyTooLarge):
        body.want(14.1)
    body.room.free()
    assert memory.held_bytes == 0


@scenario
async def test_the_oldest_goes_on_first() -> None:
    _, (first, second, third, fourth) = bodies(4)
    assert first.want(14)
    assert [body.want(size) for body, size in ((second, 10), (third, 2), (fourth, 12))] == [False] * 3
    first.room.free()
    assert [body.said for body in (second, third, fourth)] == [["room"], ["room"], []]
    second.room.free()
    assert fourth.said == ["room"]


@scenario
async def test_a_large_body_that_would_fit_waits_behind_an_older_one_that_does_not() -> None:
    _, (first, second, third, fourth) = bodies(4)
    assert first.want(4) and second.want(8)
    assert [third.want(8), fourth.want(2)] == [False, False]
    first.room.free()
    assert [third.said, fourth.said] == [[], []]
    second.room.free()
    assert [third.said, fourth.said] == [["room"], ["room"]]


@scenario
async def test_an_older_body_that_grows_goes_before_a_younger_one_that_waits() -> None:
    memory, (older, younger, third) = bodies(3)
    assert older.want(4)
    assert third.want(8)
    assert not younger.want(6)
    assert older.want(6)
    third.room.free()
    assert younger.said == ["room"]
    assert memory.held_bytes == 12 * MIB


@scenario
async def test_a_body_that_has_its_room_does_not_wait_behind_others() -> None:
    _, (older, whole) = bodies(2)
    assert older.want(2) and whole.want(12)
    assert not older.want(5)
    assert whole.want(12)


@scenario
async def test_small_bodies_wait_for_no_large_one() -> None:
    _, (holder, waiting, small) = bodies(3)
    assert holder.want(14)
    assert not waiting.want(5)
    assert small.want(1)


@scenario
async def test_a_small_body_that_waits_overtakes_large_ones() -> None:
    _, (holder, large, small, other, waiting) = bodies(5)
    assert holder.want(14) and small.want(1) and other.want(1)
    assert not large.want(5) and not waiting.want(1)
    small.room.free()
    assert (large.said, waiting.said) == ([], ["room"])


@scenario
async def test_a_body_that_waits_again_waits_for_what_it_lacks() -> None:
    memory, (holder, growing, other) = bodies(3)
    assert holder.want(14)
    assert not growing.want(10)
    holder.room.free()
    assert other.want(3)
    assert not growing.want(12)
    other.room.free()
    assert (growing.said, memory.held_bytes) == (["room", "room"], 12 * MIB)


@scenario
async def test_a_body_that_ends_as_it_gets_room_makes_room_for_the_next_one() -> None:
    memory, (holder, ending, last) = bodies(3)
    assert holder.want(14)
    assert not ending.room.want(10 * MIB, ending.room.free, ending._refused)
    assert not last.want(4)
    holder.room.free()
    assert (last.said, memory.held_bytes) == (["room"], 4 * MIB)


@scenario
async def test_bodies_that_wait_for_each_other_end_one_after_the_other() -> None:
    memory, (one, other) = bodies(2)
    assert one.want(7)
    await asyncio.sleep(1.0)
    assert other.want(7)
    assert not one.want(9)
    await asyncio.sleep(1.0)
    assert not other.want(9)
    await asyncio.sleep(WAIT_S - 0.5)
    assert (one.said, other.said) == (["refused"], ["room"])
    assert memory.held_bytes == 9 * MIB
    assert refused(memory) == 1


@scenario
async def test_a_body_that_leaves_while_it_waits_is_forgotten() -> None:
    memory, (holder, leaving, next_one) = bodies(3)
    assert holder.want(14)
    assert not leaving.want(14)
    assert not next_one.want(2)
    leaving.room.free()
    holder.room.free()
    assert (leaving.said, next_one.said) == ([], ["room"])
    await asyncio.sleep(2 * WAIT_S)
    assert next_one.said == ["room"]
    next_one.room.free()
    assert memory.held_bytes == 0


@scenario
async def test_a_body_that_never_had_room_is_forgotten_once_it_is_refused() -> None:
    memory, (holder, waiting) = bodies(2)
    assert holder.want(14)
    assert not waiting.want(14)
    await asyncio.sleep(WAIT_S + 1.0)
    assert waiting.said == ["refused"]
    holder.room.free()
    assert not memory._open


@scenario
async def test_room_for_one_who_has_just_stopped_waiting_for_it_is_given_back() -> None:
    memory, (holder, leaving) = bodies(2)
    assert holder.want(14)
    wait = asyncio.create_task(leaving.room.wait(14 * MIB))
    await asyncio.sleep(1.0)
    wait.cancel()
    holder.room.free()
    with pytest.raises(asyncio.CancelledError):
        await wait
    leaving.room.free()
    assert memory.held_bytes == 0


@scenario
async def test_waiting_for_room_ends_with_room_or_with_the_error() -> None:
    _, (holder, waiting, refused) = bodies(3)
    await holder.room.wait(14 * MIB)
    wait = asyncio.create_task(waiting.room.wait(4 * MIB))
    await asyncio.sleep(1.0)
    holder.room.free()
    await wait
    with pytest.raises(Overloaded):
        await refused.room.wait(12 * MIB)


@scenario
async def test_room_that_is_asked_for_and_not_used_goes_to_those_who_wait() -> None:
    """Before, two heads of a hundred bytes kept 14 MiB from everybody else for as long as a body may take."""
    _, (silent, trickling, coming, waiting) = bodies(4)
    for body in (silent, trickling, coming):
        assert body.want(4)
        body.watch()
    await asyncio.sleep(100.0)
    assert not silent.said, "nobody else needs the room"
    assert not waiting.want(9)
    for _ in range(2):
        await asyncio.sleep(WAIT_S * LOOK_SHARE / 2)
        trickling.arrived += 100
        coming.arrived += SLOWEST_BYTES
    await asyncio.sleep(0.1)
    assert [body.said for body in (silent, trickling, coming, waiting)] == [["too slow"], ["too slow"], [], ["room"]]


@scenario
async def test_a_body_that_stops_after_a_good_beginning_makes_room_in_time() -> None:
    _, (stopping, waiting) = bodies(2)
    assert stopping.want(14)
    stopping.watch()
    assert not waiting.want(9)
    await asyncio.sleep(0.1)
    stopping.arrived += MIB
    await asyncio.sleep(WAIT_S)
    assert (stopping.said, waiting.said) == (["too slow"], ["room"])


@scenario
async def test_no_more_slow_bodies_are_refused_than_those_that_wait_need() -> None:
    memory, (first, second, waiting) = bodies(3)
    for slow in (first, second):
        assert slow.want(6)
        slow.watch()
    assert not waiting.want(6)
    await asyncio.sleep(2 * LOOK_SHARE * WAIT_S)
    assert [body.said for body in (first, second, waiting)] == [["too slow"], [], ["room"]]
    for body in (second, waiting):
        body.room.free()
    assert memory.held_bytes == 0


@scenario
async def test_how_slowly_a_body_comes_is_judged_from_when_another_waits() -> None:
    memory, (slow, leaving, waiting) = bodies(3)
    assert slow.want(14)
    slow.watch()
    assert not leaving.want(2)
    await asyncio.sleep(1.0)
    leaving.room.free()
    await asyncio.sleep(100.0)
    assert not waiting.want(2)
    await asyncio.sleep(WAIT_S * LOOK_SHARE - 0.1)
    assert slow.said == []
    await asyncio.sleep(0.2)
    assert slow.said == ["too slow"]
    assert refused(memory) == 1


@scenario
async def test_a_body_that_is_whole_or_waits_itself_is_not_too_slow() -> None:
    _, (whole, waiting, late, last) = bodies(4)
    assert whole.want(14)
    whole.watch()
    whole.room.whole()
    assert not waiting.want(5)
    waiting.watch()
    await asyncio.sleep(WAIT_S * 0.6)
    assert not late.want(9) and not last.want(14)
    whole.room.free()
    assert (waiting.said, late.said) == (["room"], ["room"])
    late.watch()
    await asyncio.sleep(WAIT_S * 0.4)
    assert (waiting.said, late.said) == (["room"], ["room"]), "both have just begun to be read"


@scenario
async def test_what_has_come_while_the_loop_stood_still_may_not_be_read_yet() -> None:
    _, (coming, waiting) = bodies(2)
    assert coming.want(14)
    coming.watch()
    assert not waiting.want(9)
    LeapingTime.of(asyncio.get_running_loop()).leap(WAIT_S * LOOK_SHARE + 3.0)
    for _ in range(3):
        await asyncio.sleep(0)
    assert coming.said == []


def test_by_default_a_quarter_of_what_the_processes_may_use(tmp_path: Path) -> None:
    assert default_limit(4, 16 << 30, 64 * MIB) == 1 << 30
    assert default_limit(1, 64 * MIB, 70 * MIB) == 80 * MIB + 1  # room for one body of the largest size
    limit = tmp_path / "memory.max"
    limit.write_text("123456\n")
    assert usable_bytes((str(limit), str(tmp_path / "none"))) == 123456
    limit.write_text("max\n")
    assert usable_bytes((str(limit),)) > 123456
