"""How time passes for the process: its clock, how late its event loop runs what is due, and limits that allow for that.

A process that goes on after it stood still finds its timers due before it has read what came meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

log = logging.getLogger(__name__)

_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
TICK_S = 0.25
WINDOW_S = 5.0  # `lag_s` looks back so far
STOOD_STILL_S = 1.0  # what runs later than this does so because the process was stopped, or got no processor


def uptime_s() -> float:
    """Seconds that also pass while the machine sleeps; `time.monotonic` stands still then."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


class LoopWatch:
    """Ticks in the loop from `start` on. A tick is late by as long as the loop was busy, or the process stopped."""

    def __init__(
        self,
        on_tick: Callable[[], None],
        on_lag: Callable[[float], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_lag: takes each tick's lag, in seconds."""
        self._on_tick = on_tick
        self._on_lag = on_lag
        self._now = now
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._lags_s = deque[float](maxlen=round(WINDOW_S / TICK_S))

    def start(self) -> None:
        self._on_tick()
        self._schedule()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def lag_s(self) -> float:
        """The greatest of late, with that of the tick that is due."""
        overdue_s = self._now() - self._due_s if self._timer is not None else 0.0
        return max(0.0, overdue_s, *self._lags_s)

    def _schedule(self) -> None:
        self._due_s = self._now() + TICK_S
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        lag_s = max(0.0, self._now() - self._due_s)
        if lag_s > STOOD_STILL_S:
            log.warning("this process stood still for %.1f s: it was stopped, or got no processor", lag_s)
        self._lags_s.append(lag_s)
        self._on_lag(lag_s)
        self._on_tick()
        self._schedule()


def stood_still(timer: asyncio.TimerHandle, loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the process stood still when this timer was due, which has just fired."""
    when = getattr(timer, "when", None)  # uvloop's has none where it was due at once
    return when is not None and loop.time() - when() > STOOD_STILL_S


class TimeLimit:
    """Calls `over` once so many seconds are over. They begin anew if the process stood still at their end: others may
    have done their part by then, and no one has looked."""

    __slots__ = ("_again_s", "_loop", "_over", "_timer")

    def __init__(self, seconds: float, over: Callable[[], object], *, again_s: float | None = None) -> None:
        """again_s: in place of `seconds` when they begin anew."""
        self._loop = asyncio.get_running_loop()
        self._over = over
        seconds = max(0.0, seconds)  # one that is over already is not late
        self._again_s = seconds if again_s is None else again_s
        self._timer = self._loop.call_later(seconds, self._end)

    def cancel(self) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        if stood_still(self._timer, self._loop):
            self._timer = self._loop.call_later(self._again_s, self._end)
        else:
            self._over()


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """As `asyncio.timeout`, of a `TimeLimit`."""
    loop = asyncio.get_running_loop()

    def over() -> None:
        with contextlib.suppress(RuntimeError):  # it is over already, as whoever got it has rescheduled it
            timeout.reschedule(loop.time())

    async with asyncio.timeout(None) as timeout:
        limit = TimeLimit(seconds, over)
        try:
            yield timeout
        finally:
            limit.cancel()
