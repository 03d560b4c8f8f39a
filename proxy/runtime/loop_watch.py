"""Time as the process lives it."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def uptime_s() -> float:
    """Seconds that also pass while the machine sleeps; `time.monotonic` stands still then."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)
