"""One stream of an HTTP/2 connection: what comes on it goes to its listener, what is answered waits for room."""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from typing import Protocol

from .frames import END_HEADERS, Code, FrameType, StreamBroken, frame, frame_head

MOST_WINDOW = (1 << 31) - 1
_DATA = int(FrameType.DATA)


class StreamListener(Protocol):
    """Takes what comes on one stream."""

    def data(self, piece: memoryview) -> None: ...  # which is to be read before this returns

    def half_closed(self) -> None: ...  # nothing more will come

    def reset(self) -> None: ...  # by the peer, or with the connection; nothing more can be answered


class StreamOwner(Protocol):
    """The connection of a stream."""

    window: int  # how much the peer takes on all streams together
    frame_bytes: int  # the longest frame that it takes
    waiting: OrderedDict[int, Stream]  # streams that would send more, if the peer took more of all together

    def put(self, *data: bytes | memoryview) -> None: ...

    def closed(self, stream: Stream) -> None: ...  # this side of it is

    def forget(self, stream: Stream) -> None: ...


class Stream:
    """What is answered on one stream. After its end, and once it was reset, nothing more goes out."""

    __slots__ = (
        *("_connection", "_end", "_unsent", "_window", "id", "is_closed", "is_received", "listener"),
        "received_bytes",
    )

    def __init__(self, connection: StreamOwner, number: int, window: int) -> None:
        self.id = number
        self.listener: StreamListener | None = None  # until both sides are over
        self.is_received = False  # the peer has ended its side
        self.received_bytes = 0  # that the peer was not given back yet
        self.is_closed = False  # this side
        self._connection = connection
        self._window = window  # how much the peer takes
        self._unsent = deque[memoryview]()  # of which a part goes out at a time, without a copy of the rest
        self._end: bytes | None = None  # the block of trailers, once all is known

    @property
    def unsent_bytes(self) -> int:
        return sum(map(len, self._unsent))

    def send_head(self, block: bytes, *, is_last: bool = False) -> None:
        """block: encoded without the dynamic table."""
        if not self.is_closed:
            self._connection.put(frame(FrameType.HEADERS, END_HEADERS | is_last, self.id, block))
            if is_last:
                self._close()

    def send(self, data: bytes | memoryview) -> None:
        """As soon as the peer takes it."""
        if self.is_closed:
            return
        connection, size = self._connection, len(data)
        if self._unsent or size > self._window or size > connection.window or size > connection.frame_bytes:
            self._unsent.append(memoryview(data))
            self.go_on()
        else:
            self._window -= size
            connection.window -= size
            connection.put(frame_head(_DATA, 0, self.id, size), data)

    def end(self, trailers: bytes) -> None:
        """After all that was sent. trailers: as `send_head` takes them."""
        self._end = trailers
        if not self.is_closed:
            self.go_on()

    def reset(self, code: Code) -> None:
        if not self.is_closed:
            self._connection.put(frame(FrameType.RST_STREAM, 0, self.id, struct.pack(">I", code)))
            self._close()
            self._connection.forget(self)

    def widen(self, by: int) -> None:
        """The peer takes so many bytes more, or fewer."""
        self._window += by
        if self._window > MOST_WINDOW:
            raise StreamBroken(Code.FLOW_CONTROL_ERROR)

    def go_on(self) -> None:
        connection = self._connection
        while self._unsent and (room := min(self._window, connection.window, connection.frame_bytes)) > 0:
            data = self._unsent[0]
            piece = data[:room]
            if len(piece) == len(data):
                self._unsent.popleft()
            else:
                self._unsent[0] = data[room:]
            self._window -= len(piece)
            connection.window -= len(piece)
            connection.put(frame_head(_DATA, 0, self.id, len(piece)), piece)
        if self._unsent:
            if self._window > 0:  # else the peer must widen this stream, and is then answered at once
                connection.waiting[self.id] = self
        elif self._end is not None:
            self.send_head(self._end, is_last=True)

    def lost(self) -> None:
        """With its connection, or by the peer's reset."""
        listener, self.listener = self.listener, None
        self._close()
        if listener is not None:
            listener.reset()

    def _close(self) -> None:
        self.is_closed = True
        self._unsent.clear()
        self._connection.closed(self)
