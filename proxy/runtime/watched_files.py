"""Files that an operator may replace while the proxy runs."""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

log = logging.getLogger(__name__)
WATCH_EVERY_S = 1.0
STILL_IF_SHORTER = 5  # calls of `are_new`, each `WATCH_EVERY_S` after the one before
Stamp = tuple[int, int, int]  # the last is the size


async def watch(
    look: Callable[[], bool | None], reloaded: Callable[[bool], None], every_s: float = WATCH_EVERY_S
) -> None:
    """Looks for changed files until cancelled. reloaded: told whether they could be used, whenever `look` says."""
    while True:
        await asyncio.sleep(every_s)
        if (taken := look()) is not None:
            reloaded(taken)


class WatchedFiles:
    """Create it before reading the files, so that a change in between is seen."""

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._seen = self._stamps()
        self._still = 0  # calls in a row that have found what the one before had found
        self._taken = self._seen
        self._must_read = False

    def are_new(self) -> bool:
        """Whether any file has changed since all were read, but none since the last calls; if so they count as read.

        Half a file can be valid, and a key may be written after its certificate: so a change waits for the next call,
        and a file that is shorter than the one that was read for `STILL_IF_SHORTER`.
        """
        stamps, before = self._stamps(), self._seen
        self._seen = stamps
        self._still = self._still + 1 if stamps == before else 0
        if (stamps == self._taken and not self._must_read) or self._still < self._wanted(stamps):
            return False
        self._taken, self._must_read = stamps, False
        endless = [str(file) for file in self._files if _is_endless(file)]
        if endless:
            log.error("%s: is a pipe or a device now, and is not read", ", ".join(endless))
        return not endless

    def have_rested(self) -> bool:
        """Whether new files have been still for `STILL_IF_SHORTER`; if not, they are new at the next call too.

        To be asked where they lack something: it may still come, though they are longer than those before.
        """
        self._must_read = self._still < STILL_IF_SHORTER
        return not self._must_read

    def look_again(self) -> None:
        """Counts the files as changed."""
        self._must_read = True

    def _wanted(self, stamps: Sequence[Stamp | None]) -> int:
        pairs = zip(stamps, self._taken, strict=True)
        return STILL_IF_SHORTER if any(_is_shorter(now, before) for now, before in pairs) else 1

    def _stamps(self) -> list[Stamp | None]:
        return [stamp(file) for file in self._files]


def stamp(file: Path) -> Stamp | None:
    """Changes with the file; the status change is in it, as new rights can make a file readable again."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size


def _is_shorter(now: Stamp | None, before: Stamp | None) -> bool:
    return now is not None and before is not None and now[-1] < before[-1]


def _is_endless(file: Path) -> bool:
    """The event loop would wait for a pipe's writer, and read a device for ever. At the start both may be meant."""
    try:
        mode = file.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
