"""A request's id, and the time at which it came."""

from __future__ import annotations

import os
import random
import time
from datetime import UTC, datetime
from functools import lru_cache

_RANDOM = random.Random()  # ids must differ but are no secret, so the slower `uuid4` is not needed
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_RANDOM.seed)


def new_id() -> str:
    """128 random bits, as 32 hexadecimal digits."""
    return f"{_RANDOM.getrandbits(128):032x}"


def now_text() -> str:
    """The time in UTC to the millisecond, in ISO 8601: 2026-01-31T23:59:59.123+00:00."""
    seconds, milliseconds = divmod(time.time_ns() // 1_000_000, 1000)
    return f"{_second(seconds)}.{milliseconds:03d}+00:00"


@lru_cache(2)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
