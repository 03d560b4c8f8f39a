"""A request's body while it comes."""

from __future__ import annotations

from .body_reader import Body
from .shared_bytes import LARGE_BYTES, SharedBytes


class ReceivedBody:
    """Most bodies come in one piece and are kept as it; a large one goes into shared memory as it comes."""

    __slots__ = ("_data", "_shared", "size")

    def __init__(self) -> None:
        self.size = 0
        self._data: bytes | bytearray = b""
        self._shared: SharedBytes | None = None

    def add(self, data: bytes) -> None:
        self.size += len(data)
        if self._shared is not None:
            self._shared.append(data)
        elif self.size > LARGE_BYTES:
            self._shared = SharedBytes.of((memoryview(self._data), data))
            self._data = b""
        elif not self._data:
            self._data = data
        else:
            if isinstance(self._data, bytes):
                self._data = bytearray(self._data)
            self._data += data

    def take(self) -> Body:
        """All of it; nothing is kept."""
        data, self._data = self._data, b""
        if self._shared is None:
            return bytes(data)
        shared, self._shared = self._shared, None
        return shared
