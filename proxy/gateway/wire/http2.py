"""The server's side of an HTTP/2 connection that carries gRPC calls, without sockets (RFC 9113).

A stream's requests go to the listener that `opened` returned; `Stream` takes what is answered. What breaks the protocol
ends the stream, or the connection with a GOAWAY: `receive` then returns False, and the caller closes.

All that a peer can make this keep is bounded: heads by `HEAD_LIMIT_BYTES`, streams by `STREAMS`, answers by what the
peer reads. What listeners keep of requests is theirs to bound. So is the work of one frame: only a SETTINGS frame that
changes the streams' windows looks at each of them, and `RESIZED_EACH` says how often one may.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable

from .frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    FRAME_LIMIT_BYTES,
    HAS_PRIORITY,
    PADDED,
    STREAM_NUMBER,
    Broken,
    Code,
    FrameReader,
    FrameType,
    StreamBroken,
    frame,
    unpadded,
)
from .heads import HEAD_LIMIT_BYTES, HeadReader, Heads
from .http2_stream import MOST_WINDOW, Stream, StreamListener

STREAMS = 16_384  # at a time, on one connection
WINDOW_BYTES = 4 * 1024 * 1024  # that a peer may send on one stream before it is given more
CONNECTION_WINDOW_BYTES = 64 * 1024 * 1024
RESIZED_EACH = 64  # times that the peer may change the windows of all streams, for each stream that it opens
RESIZED_ANYHOW = 100_000  # of a connection that opens few: a stream counts each time
_USUAL_WINDOW, _USUAL_FRAME = 65_535, 16_384
_MOST_FRAME = (1 << 24) - 1
_MAX_STREAMS, _INITIAL_WINDOW, _MAX_FRAME, _MAX_HEAD = 3, 4, 5, 6  # settings
_SETTING = struct.Struct(">HI")
_DATA = int(FrameType.DATA)


class Http2Connection:
    """One client's. opened(stream, headers): a call has come; what it returns takes the call's data, None: no one."""

    def __init__(
        self, opened: Callable[[Stream, Heads], StreamListener | None], write: Callable[[bytes], None]
    ) -> None:
        self.window = _USUAL_WINDOW  # how much the peer takes on all streams together
        self.frame_bytes = _USUAL_FRAME  # the longest frame that it takes
        self.waiting = OrderedDict[int, Stream]()  # streams that would send more, if it took more of all together
        self.streams: dict[int, Stream] = {}
        self._opened = opened
        self._write = write
        self._heads = HeadReader()
        self._reader = FrameReader()
        self._newest = 0  # stream that the peer has opened
        self._stream_window = _USUAL_WINDOW  # with which streams begin, as the peer says
        self._resizes = RESIZED_ANYHOW  # of streams, that it may still ask for
        self._head: tuple[int, int, bytearray] | None = None  # a head that CONTINUATIONs end: stream, flags, block
        self._received_bytes = 0  # that the peer was not given back yet
        self._is_going = False
        self._out: list[bytes | memoryview] = []
        self._is_receiving = False

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way, but for those whose peer has said all and only listens."""
        return all(stream.is_received and not stream.unsent_bytes for stream in self.streams.values())

    def open(self) -> None:
        """Sends this side's settings."""
        settings = {
            _MAX_STREAMS: STREAMS,
            _INITIAL_WINDOW: WINDOW_BYTES,
            _MAX_FRAME: FRAME_LIMIT_BYTES,
            _MAX_HEAD: HEAD_LIMIT_BYTES,
        }
        self.put(frame(FrameType.SETTINGS, 0, 0, b"".join([_SETTING.pack(*each) for each in settings.items()])))
        more = CONNECTION_WINDOW_BYTES - _USUAL_WINDOW
        self.put(frame(FrameType.WINDOW_UPDATE, 0, 0, struct.pack(">I", more)))

    def receive(self, data: bytes) -> bool:
        """False where the connection is over: the peer has broken the protocol, and was told so."""
        self._is_receiving = True
        try:
            for kind, flags, number, payload in self._reader.feed(data):
                try:
                    if kind == _DATA and self._head is None:
                        self._data(flags, number, payload)
                    else:
                        self._frame(kind, flags, number, bytes(payload))
                except StreamBroken as exc:
                    self._end_stream(number, exc.code)
        except Broken as exc:
            self.go_away(exc.code)
            return False
        finally:
            self._is_receiving = False
            self._flush()
        return True

    def go_away(self, code: Code = Code.NO_ERROR) -> None:
        """The peer shall open no more streams; those that are open may end."""
        self._is_going = True
        self.put(frame(FrameType.GOAWAY, 0, 0, struct.pack(">II", self._newest, code)))

    def lost(self) -> None:
        for stream in list(self.streams.values()):
            stream.lost()
        self.streams.clear()

    # -- for streams

    def put(self, *data: bytes | memoryview) -> None:
        self._out += data
        if not self._is_receiving:
            self._flush()

    def closed(self, stream: Stream) -> None:
        """This side of it is."""
        self.waiting.pop(stream.id, None)
        if stream.is_received or stream.listener is None:
            self.streams.pop(stream.id, None)
            stream.listener = None

    def forget(self, stream: Stream) -> None:
        self.streams.pop(stream.id, None)
        stream.lost()

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            self._write(b"".join(out))

    # -- what comes

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._head is not None and (kind != FrameType.CONTINUATION or number != self._head[0]):
            raise Broken(Code.PROTOCOL_ERROR)
        take = _TAKES.get(kind)
        if take is not None:  # frames of other kinds are ignored
            take(self, flags, number, payload)

    def _end_stream(self, number: int, code: Code) -> None:
        stream = self.streams.get(number)
        if stream is None or stream.is_closed:
            self.put(frame(FrameType.RST_STREAM, 0, number, struct.pack(">I", code)))
        if stream is not None:
            stream.reset(code)
            self.forget(stream)

    def _data(self, flags: int, number: int, payload: memoryview) -> None:
        stream = self.streams.get(number)
        if stream is None and (number == 0 or number > self._newest):
            raise Broken(Code.PROTOCOL_ERROR)
        self._received_bytes += len(payload)
        if self._received_bytes > CONNECTION_WINDOW_BYTES // 2:
            self._give_back()
        if stream is None:
            return  # it was reset, or refused, while this was on its way
        listener = None if stream.is_received else stream.listener
        if listener is not None:
            stream.received_bytes += len(payload)
            if stream.received_bytes > WINDOW_BYTES // 2:
                self._give_stream_back(stream)
        piece = unpadded(flags, payload) if flags & PADDED else payload
        if listener is None:
            raise StreamBroken(Code.STREAM_CLOSED)
        if stream.received_bytes > WINDOW_BYTES:
            raise StreamBroken(Code.FLOW_CONTROL_ERROR)
        if piece:
            listener.data(piece)
        if flags & END_STREAM:
            self._half_closed(stream)

    def _give_back(self) -> None:
        """What the peer may send, once half of it is used."""
        if self._received_bytes > CONNECTION_WINDOW_BYTES:
            raise Broken(Code.FLOW_CONTROL_ERROR)
        self.put(frame(FrameType.WINDOW_UPDATE, 0, 0, struct.pack(">I", self._received_bytes)))
        self._received_bytes = 0

    def _give_stream_back(self, stream: Stream) -> None:
        if stream.received_bytes <= WINDOW_BYTES:
            self.put(frame(FrameType.WINDOW_UPDATE, 0, stream.id, struct.pack(">I", stream.received_bytes)))
            stream.received_bytes = 0

    def _half_closed(self, stream: Stream) -> None:
        listener, stream.is_received = stream.listener, True
        if stream.is_closed:
            self.closed(stream)
        if listener is not None:
            listener.half_closed()

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        block = bytes(unpadded(flags, memoryview(payload))) if flags & PADDED else payload
        if flags & HAS_PRIORITY:
            if len(block) < 5:
                raise Broken(Code.FRAME_SIZE_ERROR)
            block = block[5:]
        if flags & END_HEADERS:
            self._take_head(number, flags, block)
        else:
            self._head = number, flags, bytearray(block)

    def _continuation(self, flags: int, number: int, payload: bytes) -> None:
        if self._head is None:
            raise Broken(Code.PROTOCOL_ERROR)
        _, first_flags, block = self._head
        if not payload and not flags & END_HEADERS:
            raise Broken(Code.ENHANCE_YOUR_CALM)  # it would never end
        block += payload
        if len(block) > HEAD_LIMIT_BYTES:
            raise Broken(Code.ENHANCE_YOUR_CALM)
        if flags & END_HEADERS:
            self._head = None
            self._take_head(number, first_flags | END_HEADERS, bytes(block))

    def _take_head(self, number: int, flags: int, block: bytes) -> None:
        headers = self._heads.read(block)  # even where it is refused: it changes the table
        stream = self.streams.get(number)
        if stream is not None:  # trailers
            if not flags & END_STREAM:
                raise StreamBroken(Code.PROTOCOL_ERROR)
            if stream.is_received:
                raise StreamBroken(Code.STREAM_CLOSED)
            self._half_closed(stream)
            return
        if number % 2 == 0 or number <= self._newest:
            raise Broken(Code.PROTOCOL_ERROR if number % 2 == 0 else Code.STREAM_CLOSED)
        self._newest = number
        if self._is_going or len(self.streams) >= STREAMS:
            raise StreamBroken(Code.REFUSED_STREAM)
        self._open_stream(number, headers, bool(flags & END_STREAM))

    def _open_stream(self, number: int, headers: Heads, is_whole: bool) -> None:
        stream = self.streams[number] = Stream(self, number, self._stream_window)
        self._resizes += RESIZED_EACH
        listener = self._opened(stream, headers)
        if listener is None:
            self.closed(stream)
            return
        stream.listener = listener
        if is_whole:
            self._half_closed(stream)

    def _rst_stream(self, flags: int, number: int, payload: bytes) -> None:
        if number == 0 or number > self._newest or len(payload) != 4:
            raise Broken(Code.FRAME_SIZE_ERROR if len(payload) != 4 else Code.PROTOCOL_ERROR)
        stream = self.streams.pop(number, None)
        if stream is not None:
            stream.lost()

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) % _SETTING.size or (flags & ACK and payload):
            raise Broken(Code.PROTOCOL_ERROR if number else Code.FRAME_SIZE_ERROR)
        if flags & ACK:
            return
        before = self._stream_window
        for name, value in _SETTING.iter_unpack(payload):
            if name == _INITIAL_WINDOW:
                if value > MOST_WINDOW:
                    raise Broken(Code.FLOW_CONTROL_ERROR)
                self._stream_window = value  # of several in one frame the last one counts
            elif name == _MAX_FRAME:
                if not _USUAL_FRAME <= value <= _MOST_FRAME:
                    raise Broken(Code.PROTOCOL_ERROR)
                self.frame_bytes = value
        self.put(frame(FrameType.SETTINGS, ACK, 0))
        if self._stream_window != before:
            self._widen_all(self._stream_window - before)

    def _widen_all(self, by: int) -> None:
        self._resizes -= len(self.streams)
        if self._resizes < 0:
            raise Broken(Code.ENHANCE_YOUR_CALM)
        for stream in tuple(self.streams.values()):
            try:
                stream.widen(by)
            except StreamBroken as exc:
                raise Broken(exc.code) from None
            if by > 0:
                stream.go_on()

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) != 8:
            raise Broken(Code.PROTOCOL_ERROR if number else Code.FRAME_SIZE_ERROR)
        if not flags & ACK:
            self.put(frame(FrameType.PING, ACK, 0, payload))

    def _window_update(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Broken(Code.FRAME_SIZE_ERROR)
        more = int.from_bytes(payload) & STREAM_NUMBER
        if number > self._newest or (number == 0 and not more):
            raise Broken(Code.PROTOCOL_ERROR)
        if number:
            stream = self.streams.get(number)
            if stream is not None and not stream.is_closed:
                if not more:
                    raise StreamBroken(Code.PROTOCOL_ERROR)
                stream.widen(more)
                stream.go_on()
            return
        self.window += more
        if self.window > MOST_WINDOW:
            raise Broken(Code.FLOW_CONTROL_ERROR)
        self._go_on()

    def _go_on(self) -> None:
        """Each in turn sends something, or waits for its own window from here on."""
        while self.waiting and self.window > 0:
            self.waiting.popitem(last=False)[1].go_on()

    def _goes_away(self, flags: int, number: int, payload: bytes) -> None:
        self._is_going = True  # it opens no more streams; those that are open end as usual

    def _never(self, flags: int, number: int, payload: bytes) -> None:
        raise Broken(Code.PROTOCOL_ERROR)


_TAKES: dict[int, Callable[[Http2Connection, int, int, bytes], None]] = {
    FrameType.HEADERS: Http2Connection._headers,
    FrameType.RST_STREAM: Http2Connection._rst_stream,
    FrameType.SETTINGS: Http2Connection._settings,
    FrameType.PUSH_PROMISE: Http2Connection._never,
    FrameType.PING: Http2Connection._ping,
    FrameType.GOAWAY: Http2Connection._goes_away,
    FrameType.WINDOW_UPDATE: Http2Connection._window_update,
    FrameType.CONTINUATION: Http2Connection._continuation,
}
