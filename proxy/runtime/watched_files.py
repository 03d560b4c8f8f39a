"""Files that an operator may replace while the proxy runs."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

log = logging.getLogger(__name__)

Stamp = tuple[int, int, int]


class WatchedFiles:
    """Create it before reading the files, so that a change in between is seen."""

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._seen = self._stamps()
        self._taken: list[Stamp | None] | None = self._seen

    def are_new(self) -> bool:
        """Whether any file has changed since all were read, but none since the last call; if so they count as read.

        Half a file can be valid, and a key may be written after its certificate: so a change waits for the next call.
        """
        stamps, before = self._stamps(), self._seen
        self._seen = stamps
        if stamps == self._taken or stamps != before:
            return False
        self._taken = stamps
        endless = [str(file) for file in self._files if _is_endless(file)]
        if endless:
            log.error("%s: is a pipe or a device now, and is not read", ", ".join(endless))
        return not endless

    def look_again(self) -> None:
        """Counts the files as changed."""
        self._taken = None

    def _stamps(self) -> list[Stamp | None]:
        return [stamp(file) for file in self._files]


def stamp(file: Path) -> Stamp | None:
    """Changes with the file; the status change is in it, as new rights can make a file readable again."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size


def _is_endless(file: Path) -> bool:
    """The event loop would wait for a pipe's writer, and read a device for ever. At the start both may be meant."""
    try:
        mode = file.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


WATCH_EVERY_S = 1.0
