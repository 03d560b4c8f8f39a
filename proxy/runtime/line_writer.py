"""Writes lines to a file descriptor that may be slow, full, or a pipe that nobody reads.

Neither the event loop nor the process's end ever waits for long. What does not fit into a bounded queue is lost,
counted, and told once lines flow again.
"""

from __future__ import annotations

import os
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

BATCH_BYTES = 64 * 1024

Write = Callable[[int, bytes], int]
"""As `os.write`."""


@dataclass(frozen=True, slots=True)
class WriterLimits:
    queue_bytes: int = 4 * 1024 * 1024
    tick_s: float = 5.0
    again_s: float = 1.0  # from an error, as of a full disk, to the next write


class Lines(Protocol):
    """Where whole lines go; `lost`: how many did not get there."""

    lost: int

    def put(self, line: bytes) -> None: ...

    def flush(self, limit_s: float) -> None: ...


class LineWriter:
    """Writes in a thread of its own, which does not keep the process alive.

    tells_lost: makes the line about so many that were lost. on_tick: called in the thread every few seconds.
    """

    def __init__(
        self,
        fd: int,
        tells_lost: Callable[[int], bytes],
        on_tick: Callable[[], None] = lambda: None,
        limits: WriterLimits = WriterLimits(),
        write: Write = os.write,
    ) -> None:
        self.lost = 0
        self._fd = fd
        self._tells_lost = tells_lost
        self._on_tick = on_tick
        self._limits = limits
        self._write_some = write
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0  # those that are just being written included
        self._untold = 0
        self._is_torn = False  # the last write ended inside a line
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def put(self, line: bytes) -> None:
        with self._changed:
            if self._waiting_bytes + len(line) > self._limits.queue_bytes:
                self._lose(1)
                return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            self._changed.notify_all()

    def flush(self, limit_s: float) -> None:
        """Waits until all is written, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_bytes, limit_s)

    def _lose(self, count: int) -> None:
        self.lost += count
        self._untold += count

    def _run(self) -> None:
        while True:
            if not (lines := self._next()):
                self._on_tick()
                continue
            written = self._write(lines)
            with self._changed:
                self._lose(len(lines) - written)
                self._waiting_bytes -= sum(map(len, lines))
                if self._untold and written == len(lines):
                    note, self._untold = self._tells_lost(self._untold), 0
                    self._waiting.append(note)
                    self._waiting_bytes += len(note)
                self._changed.notify_all()
            if written < len(lines):
                time.sleep(self._limits.again_s)

    def _next(self) -> list[bytes]:
        """What is to be written next; nothing if nothing came for a while."""
        lines: list[bytes] = []
        size = 0
        with self._changed:
            self._changed.wait_for(lambda: self._waiting, self._limits.tick_s)
            while self._waiting and (not lines or size + len(self._waiting[0]) <= BATCH_BYTES):
                size += len(self._waiting[0])
                lines.append(self._waiting.popleft())
        return lines

    def _write(self, lines: list[bytes]) -> int:
        """How many were written whole. A line that another process writes may stand between two of them."""
        mend = b"\n" if self._is_torn else b""
        data, done = mend + b"".join(lines), 0
        try:
            while done < len(data):
                try:
                    done += self._write_some(self._fd, data[done:])
                except BlockingIOError:  # whoever made it does not block
                    select.select([], [self._fd], [])
        except OSError:
            ends = list(accumulate(map(len, lines), initial=len(mend)))
            self._is_torn = done not in ends if done else self._is_torn
            return sum(end <= done for end in ends[1:])
        self._is_torn = False
        return len(lines)


class DirectLines:
    """Writes at once, without a thread, and only what can be written at once: for a process that must be able to fork.

    A pipe gets a file description of its own, because the other holders of this one must not become non-blocking.
    """

    def __init__(self, fd: int, tells_lost: Callable[[int], bytes]) -> None:
        self.lost = 0
        self._fd = fd
        self._tells_lost = tells_lost
        self._untold = 0
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            with suppress(OSError):
                self._fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def put(self, line: bytes) -> None:
        note = self._tells_lost(self._untold) if self._untold else b""
        if self._write(note + line):
            self._untold = 0
        else:
            self.lost += 1
            self._untold += 1

    def flush(self, limit_s: float) -> None:
        pass

    def _write(self, data: bytes) -> bool:
        try:
            _, is_free, _ = select.select([], [self._fd], [], 0)
            if len(data) > select.PIPE_BUF:  # a pipe takes no more whole
                data = data[: select.PIPE_BUF - 1] + b"\n"
            return bool(is_free) and os.write(self._fd, data) > 0
        except OSError:
            return False
