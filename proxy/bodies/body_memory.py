"""One bound on the memory of all request bodies under way in a process.

A body whose length is known takes its room at its start, any other as it comes. Without room it waits, and its client
is not read meanwhile. The oldest gets room first, so that of several that wait for each other one goes on. A wait has a
limit; then the body is refused and gives back what it has. Large bodies leave a part of the room to small ones, which
wait for nobody else: so a few clients with large bodies do not keep all others out. While any waits, one that hardly
comes is refused: so room that is asked for and not used is no way to keep others out either.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, Metric

from ..errors import BodyTooLarge, Overloaded, PPDError, RequestError
from ..runtime.loop_watch import STOOD_STILL_S, TimeLimit
from ..telemetry.metrics import gauge
from .shared_bytes import LARGE_BYTES

ROOM = "body_room"  # in the `state` of an ASGI scope: that of the request's body
SHARE = 0.25  # of the memory that the process may use
SMALL_PART = 8  # this part of the room is left to small bodies
LOOK_SHARE = 0.4  # of the time that a body may wait: so others are looked at twice before it is refused
SLOWEST_BYTES = 16 * 1024  # that a body must bring between two looks, or be whole
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class BodyRoom:
    """What one body takes of the memory; `free` at its every end, as often as you like."""

    __slots__ = ("_memory", "held_bytes", "sender", "waits", "wanted_bytes")

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self.held_bytes = 0
        self.wanted_bytes = 0  # more than it holds
        self.waits: _Wait | None = None
        self.sender: _Sender | None = None

    def watch(self, arrived: Callable[[], int], on_refused: Callable[[PPDError], None]) -> None:
        """Until `whole`: the body may be refused, if it hardly comes while others wait. arrived: bytes of it so far."""
        self.sender = _Sender(arrived, on_refused)

    def whole(self) -> None:
        """The body has come completely."""
        self.sender = None

    def want(self, size: int, on_room: Callable[[], None], on_refused: Callable[[PPDError], None]) -> bool:
        """Whether it has room for `size` bytes. If not, one of the two is called later; a second call changes `size`.

        BodyTooLarge for a body that alone is larger than the bound.
        """
        if size <= self.held_bytes:
            return True
        return self._memory.take(self, size, on_room, on_refused)

    async def wait(self, size: int) -> None:
        """Returns once it has room; PPDError if it gets none."""
        got = asyncio.get_running_loop().create_future()

        def settle(error: PPDError | None = None) -> None:
            if not got.done():
                got.set_result(error)

        if not self.want(size, settle, settle) and (error := await got) is not None:
            raise error

    def free(self) -> None:
        self.sender = None
        self._memory.give_back(self)


class _Sender:
    __slots__ = ("arrived", "on_refused", "seen_bytes")

    def __init__(self, arrived: Callable[[], int], on_refused: Callable[[PPDError], None]) -> None:
        self.arrived, self.on_refused = arrived, on_refused
        self.seen_bytes = -SLOWEST_BYTES  # when it was looked at last; less for one that has only begun to be read

    def came(self) -> int:
        """Bytes since it was looked at last."""
        before, self.seen_bytes = self.seen_bytes, self.arrived()
        return self.seen_bytes - before


class _Wait:
    __slots__ = ("on_refused", "on_room", "timer")

    def __init__(self, on_room: Callable[[], None], on_refused: Callable[[PPDError], None], timer: TimeLimit) -> None:
        self.on_room, self.on_refused, self.timer = on_room, on_refused, timer


class BodyMemory:
    """wait_s: how long a body waits for room. Bodies above `LARGE_BYTES` are the large ones."""

    def __init__(self, limit_bytes: int, wait_s: float) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._wait_s = wait_s
        self._refused = 0
        self._waiting: list[BodyRoom] = []  # in the order in which they were opened
        self._open: dict[BodyRoom, None] = {}  # those that hold or want something, oldest first
        self._looking: asyncio.TimerHandle | None = None  # while any waits
        self._look_s = 0.0  # when, by the loop's time

    def room(self) -> BodyRoom:
        return BodyRoom(self)

    def gauges(self) -> Iterator[Metric]:
        yield gauge("ppd_body_memory_bytes", "Memory of request bodies under way", self.held_bytes)
        yield gauge("ppd_bodies_waiting", "Request bodies that wait for memory", len(self._waiting))
        yield CounterMetricFamily("ppd_bodies_refused", "Request bodies that got no memory in time", self._refused)

    def take(
        self, room: BodyRoom, size: int, on_room: Callable[[], None], on_refused: Callable[[PPDError], None]
    ) -> bool:
        bound = self._bound(size)
        if size > bound:
            raise BodyTooLarge(f"the body is larger than all large bodies together may be ({bound} bytes)")
        self._open.setdefault(room)
        more = size - room.held_bytes
        if room.waits is None and self.held_bytes + more <= bound and (size <= LARGE_BYTES or not self._waiting):
            self._give(room, more)
            return True
        room.wanted_bytes = max(more, room.wanted_bytes)
        if room.waits is None:
            timer = TimeLimit(self._wait_s, partial(self._refuse, room))
            room.waits = _Wait(on_room, on_refused, timer)
            self._waiting = [one for one in self._open if one.waits is not None]
            self._go_on()
            if self._waiting and self._looking is None:
                for sender in self._senders():
                    sender.came()
                self._look_again()
        return room.waits is None

    def give_back(self, room: BodyRoom) -> None:
        if room not in self._open:
            return
        del self._open[room]
        self.held_bytes -= room.held_bytes
        room.held_bytes = 0
        if room.waits is not None:
            self._stop_waiting(room)
        if self._waiting:
            self._go_on()

    def _bound(self, size: int) -> int:
        return self.limit_bytes if size <= LARGE_BYTES else self.limit_bytes - self.limit_bytes // SMALL_PART

    def _give(self, room: BodyRoom, more: int) -> None:
        room.held_bytes += more
        self.held_bytes += more

    def _go_on(self) -> None:
        """Small ones get room wherever there is some; of the large ones none overtakes an older one."""
        is_behind = False
        for room in tuple(self._waiting):
            size = room.held_bytes + room.wanted_bytes
            is_large = size > LARGE_BYTES
            if room.waits is None or (is_large and is_behind):
                continue
            if self.held_bytes + room.wanted_bytes > self._bound(size):
                is_behind = True  # where a small one does not fit, no large one does
                continue
            waits = self._stop_waiting(room)
            self._give(room, room.wanted_bytes)
            room.wanted_bytes = 0
            waits.on_room()

    def _senders(self) -> list[_Sender]:
        """Of the bodies that are read now."""
        return [room.sender for room in self._open if room.sender is not None and room.waits is None]

    def _look_again(self) -> None:
        loop = asyncio.get_running_loop()
        self._look_s = loop.time() + self._wait_s * LOOK_SHARE
        self._looking = loop.call_at(self._look_s, self._look)

    def _look(self) -> None:
        self._looking = None
        slow = [sender for sender in self._senders() if sender.came() < SLOWEST_BYTES]
        has_stood_still = asyncio.get_running_loop().time() - self._look_s > STOOD_STILL_S
        for sender in slow if not has_stood_still else ():
            if not self._waiting:
                break
            self._refused += 1
            error = RequestError("the body came too slowly, while others waited for its memory")
            error.status = 408
            sender.on_refused(error)
        if self._waiting:
            self._look_again()

    def _stop_waiting(self, room: BodyRoom) -> _Wait:
        waits = room.waits
        assert waits is not None, "it waits"
        waits.timer.cancel()
        room.waits = None
        self._waiting.remove(room)
        return waits

    def _refuse(self, room: BodyRoom) -> None:
        waits = self._stop_waiting(room)
        self._refused += 1
        waits.on_refused(
            Overloaded(
                f"the bodies of other requests use all memory that is meant for bodies ({self.limit_bytes} bytes)",
                reason="body_memory",
                retry_after_s=1.0,
            )
        )


def usable_bytes(cgroups: tuple[str, ...] = _CGROUPS) -> int:
    """What the processes of this machine, container or user may use: the smallest limit that is set."""
    found = [_physical_bytes()]
    for path in cgroups:
        text = Path(path).read_text().strip() if Path(path).is_file() else ""
        found += [int(text)] if text.isdecimal() else []
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(limit)
        found += [soft] if soft != resource.RLIM_INFINITY else []
    return min(found)


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_limit(processes: int, usable: int, body_limit_bytes: int) -> int:
    """For each process; at least what one body of the largest size needs."""
    return max(int(SHARE * usable / processes), body_limit_bytes * SMALL_PART // (SMALL_PART - 1) + 1)
