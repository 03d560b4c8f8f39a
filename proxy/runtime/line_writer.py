"""Writes lines to what may be slow, a full disk, or a pipe that nobody reads.

Neither the event loop nor the process's end ever waits for long. What does not fit into a bounded queue is lost,
counted, and told once lines flow again.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Protocol

BATCH_BYTES = 64 * 1024

Sink = Callable[[list[bytes]], int]
"""Writes whole lines and returns how many of them, from the first on, were written."""


@dataclass(frozen=True, slots=True)
class WriterLimits:
    queue_bytes: int = 4 * 1024 * 1024
    tick_s: float = 5.0
    pause_s: float = 0.0  # between two writes while less than a batch waits, so that each has more lines
    again_s: float = 1.0  # from a write that failed, as on a full disk, to the next one


class Lines(Protocol):
    """Where whole lines go; `lost`: how many did not get there."""

    lost: int

    def put(self, line: bytes) -> None: ...

    def flush(self, limit_s: float) -> None: ...


class LineWriter:
    """Writes in a thread of its own, which does not keep the process alive."""

    def __init__(
        self,
        sink: Sink,
        tells_lost: Callable[[int], bytes],
        on_tick: Callable[[], None] = lambda: None,
        limits: WriterLimits = WriterLimits(),
    ) -> None:
        """tells_lost: the line about so many that were lost, once others are written again; empty: none.

        on_tick: called in the thread every few seconds in which no line comes.
        """
        self.lost = 0
        self._sink = sink
        self._tells_lost = tells_lost
        self._on_tick = on_tick
        self._limits = limits
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0  # those that are just being written included
        self._untold = 0
        self._flushing = 0
        self._is_closed = False
        threading.Thread(target=self._run, name="lines", daemon=True).start()

    def put(self, line: bytes) -> None:
        with self._changed:
            if self._is_closed or self._waiting_bytes + len(line) > self._limits.queue_bytes:
                self._lose(1)
                return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            self._changed.notify_all()

    def flush(self, limit_s: float) -> None:
        """Waits until all is written, at most so long."""
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting_bytes, limit_s)
            self._flushing -= 1

    def close(self, limit_s: float) -> None:
        self.flush(limit_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _lose(self, count: int) -> None:
        self.lost += count
        self._untold += count

    def _run(self) -> None:
        while not self._is_closed:
            lines = self._next()
            if not lines:
                self._on_tick()
                continue
            written = self._sink(lines)
            with self._changed:
                self._lose(len(lines) - written)
                untold = self._untold if written == len(lines) else 0
                self._untold -= untold
            note = self._tells_lost(untold) if untold else b""
            with self._changed:
                if note:
                    self._waiting.append(note)
                self._waiting_bytes += len(note) - sum(map(len, lines))
                self._changed.notify_all()
            if written < len(lines):
                self._rest(self._limits.again_s, math.inf)
            else:
                self._rest(self._limits.pause_s, BATCH_BYTES)

    def _next(self) -> list[bytes]:
        """What is to be written next; nothing if nothing came for a while."""
        lines: list[bytes] = []
        size = 0
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed, self._limits.tick_s)
            while self._waiting and (not lines or size + len(self._waiting[0]) <= BATCH_BYTES):
                size += len(self._waiting[0])
                lines.append(self._waiting.popleft())
        return lines

    def _rest(self, seconds: float, enough_bytes: float) -> None:
        """At most so long, and until so much waits: a pause after each batch would bound what is written a second."""
        if seconds:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._flushing or self._is_closed or self._waiting_bytes >= enough_bytes, seconds
                )


class DescriptorSink:
    """An open descriptor, such as stderr. Another process may write there too, so what was cut off stays."""

    def __init__(self, fd: int, write: Callable[[int, bytes], int] = os.write) -> None:
        self._fd = fd
        self._write = write
        self._is_torn = False  # the last write ended inside a line

    def __call__(self, lines: list[bytes]) -> int:
        mend = b"\n" if self._is_torn else b""
        data, done = mend + b"".join(lines), 0
        try:
            while done < len(data):
                try:
                    done += self._write(self._fd, data[done:])
                except BlockingIOError:  # whoever opened it wanted no blocking
                    select.select([], [self._fd], [])
        except OSError:
            ends = _ends(lines, len(mend))
            self._is_torn = done not in (len(mend), *ends) if done else self._is_torn
            return sum(end <= done for end in ends)
        self._is_torn = False
        return len(lines)


def append_to(path: Path) -> FileIO:
    """Opens a file for more lines. OSError for a pipe that nobody reads, which others wait for."""

    def at_once(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NONBLOCK, 0o666)
        os.set_blocking(descriptor, True)
        return descriptor

    return FileIO(path, "a", opener=at_once)


class FileSink:
    """Appends to a file, which is opened for each write, as it may be rotated. No half line stays in it.

    Other processes append too, under a lock; so what was cut off can be taken back.
    """

    def __init__(
        self, path: Path, on_error: Callable[[OSError], None], write: Callable[[int, bytes], int] = os.write
    ) -> None:
        self._path = path
        self._on_error = on_error
        self._write = write

    def __call__(self, lines: list[bytes]) -> int:
        try:
            with append_to(self._path) as file:
                return self._append(file.fileno(), lines)
        except OSError as exc:
            self._on_error(exc)
            return 0

    def _append(self, fd: int, lines: list[bytes]) -> int:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        status = os.fstat(fd)
        data, done = b"".join(lines), 0
        try:
            while done < len(data):
                done += self._write(fd, data[done:])
        except OSError as exc:
            self._on_error(exc)
            whole = [end for end in _ends(lines) if end <= done]
            if stat.S_ISREG(status.st_mode):
                os.ftruncate(fd, status.st_size + (whole[-1] if whole else 0))
            return len(whole)
        return len(lines)


def _ends(lines: list[bytes], begin: int = 0) -> list[int]:
    """Where each line ends, one after the other."""
    return list(accumulate(map(len, lines), initial=begin))[1:]


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
