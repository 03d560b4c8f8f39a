"""How time passes for the process: its clock, and how late its event loop runs what is due."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
TICK_S = 0.25
WINDOW_S = 5.0  # `lag_s` looks back so far


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
        self._lags_s.append(lag_s)
        self._on_lag(lag_s)
        self._on_tick()
        self._schedule()
