"""A request's body while it comes."""

from __future__ import annotations

from .. import plane
from .body_reader import Body
from .shared_bytes import LARGE_BYTES, SharedBytes

SHORT_BYTES = 16 * 1024  # a body of no more mostly comes in one piece, and is copied in no time


class ReceivedBody:
    """Most bodies come in one piece and are kept as it; a large one goes into shared memory as it comes.

    buffer: of a body between these whose size is known. It may be filled by whoever has the socket.
    """

    __slots__ = ("_data", "_shared", "buffer", "size")

    def __init__(self) -> None:
        self.size = 0  # without what the buffer has been filled with
        self.buffer: plane.BodyBuffer | None = None
        self._data: bytes | bytearray = b""
        self._shared: SharedBytes | None = None

    def expect(self, size: int) -> None:
        """What has been added is the beginning of a body of so many bytes."""
        if plane.IS_BUILT and SHORT_BYTES < size <= LARGE_BYTES:
            self.buffer = plane.BodyBuffer(size)
            self.buffer.add(bytes(self._data))
            self._data = b""

    def arrived(self) -> int:
        """Bytes that have come."""
        return self.size if self.buffer is None else self.buffer.filled

    def add(self, data: bytes) -> None:
        self.size += len(data)
        if self.buffer is not None:
            self.buffer.add(data)
        elif self._shared is not None:
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
        if self.buffer is not None:
            buffer, self.buffer = self.buffer, None
            return buffer.taken()
        data, self._data = self._data, b""
        if self._shared is None:
            return bytes(data)
        shared, self._shared = self._shared, None
        return shared
