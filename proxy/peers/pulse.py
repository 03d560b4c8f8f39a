"""How a supervisor sees that a process's event loop turns: a counter in shared memory, looked at in even steps.

What counts are looks, not seconds. If the supervisor itself stood still, or the whole machine, then everybody did, and
everybody gets the full time again.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

LOOK_S = 0.5
_LATE_S = 2 * LOOK_S  # between two looks: the supervisor stood still too, or starves
SILENT_LOOKS = 8  # in a row: noticed 4.0 to 4.5 s after the last beat
START_LOOKS = 80  # until the first beat


class Pulse:
    """One process's counter, which its successors go on with. Make it before the process is forked."""

    def __init__(self) -> None:
        self._beats = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")

    def beat(self) -> None:
        self._beats[0] += 1

    @property
    def beats(self) -> int:
        count: int = self._beats[0]
        return count


@dataclass(slots=True)
class PulseWatch:
    """What the looks at one process's pulse have shown, from its start on."""

    beats: int  # as last seen
    has_begun: bool = False
    silent_looks: int = 0

    def hangs(self, beats: int, since_look_s: float) -> bool:
        """Takes one look; since_look_s: from the one before."""
        if beats != self.beats:
            self.beats, self.has_begun, self.silent_looks = beats, True, 0
        elif since_look_s > _LATE_S:
            self.silent_looks = 0
        else:
            self.silent_looks += 1
        return self.silent_looks >= (SILENT_LOOKS if self.has_begun else START_LOOKS)
