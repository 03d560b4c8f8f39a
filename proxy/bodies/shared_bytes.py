"""Bytes that a helper process can read without a copy: memory behind a file descriptor that both processes map."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterable

STEP_BYTES = 256 * 1024
LARGE_BYTES = 1024 * 1024  # a body above this is kept in shared memory from then on


class SharedBytes:
    """Appended to, then read. The memory lasts as long as a view of it; `close` frees the descriptor before that."""

    def __init__(self, fd: int | None = None) -> None:
        """fd: of memory that another process has written; it is taken over."""
        self.fd = _anonymous_file() if fd is None else fd
        self._size = 0 if fd is None else os.fstat(fd).st_size
        self._view: memoryview | None = None

    @classmethod
    def of(cls, parts: Iterable[bytes | memoryview]) -> SharedBytes:
        shared = cls()
        for part in parts:
            shared.append(part)
        return shared

    def __len__(self) -> int:
        return self._size

    def append(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self.fd, view[:STEP_BYTES])
            self._size += written
            view = view[written:]

    def view(self) -> memoryview:
        """All of it, once everything is appended."""
        if self._view is None:
            mapped = mmap.mmap(self.fd, self._size, access=mmap.ACCESS_READ) if self._size else b""
            self._view = memoryview(mapped)
        return self._view

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        self.close()


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("body", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
