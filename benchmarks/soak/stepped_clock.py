"""Runs `ppd` with a wall clock that another program may step, as an operator or NTP does.

    python -m benchmarks.soak.stepped_clock OFFSET_FILE serve --port 10001

The file holds the seconds that the wall clock is off. Monotonic clocks are left alone, as by a real step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from ppd.offline.cli.main import main

_READ_EVERY_S = 0.1


class SteppedClock:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._true_ns = time.time_ns
        self._offset_ns = 0
        self._read_s = float("-inf")

    def time_ns(self) -> int:
        if time.monotonic() - self._read_s > _READ_EVERY_S:
            self._read_s = time.monotonic()
            text = self._path.read_text()
            self._offset_ns = int(float(text) * 1e9) if text else self._offset_ns  # empty: it is being written
        return self._true_ns() + self._offset_ns

    def time(self) -> float:
        return self.time_ns() / 1e9


if __name__ == "__main__":
    clock = SteppedClock(Path(sys.argv.pop(1)))
    time.time, time.time_ns = clock.time, clock.time_ns
    main()
