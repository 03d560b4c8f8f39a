"""HTTP/2 frames (RFC 9113, section 4): cut out of what comes, and written."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_LIMIT_BYTES = 64 * 1024  # that the peer may send
_HEAD = struct.Struct(">BHBBI")  # the payload's size in three bytes, kind, flags, stream
_HEAD_BYTES = 9
STREAM_NUMBER = 0x7FFFFFFF  # of a stream: the bit above is reserved


class FrameType(IntEnum):
    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Code(IntEnum):
    """Of errors, RFC 9113 section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 1, 1, 4, 8, 32
"""Flags."""


Frame = tuple[int, int, int, memoryview]
"""Its kind (a `FrameType`, or one that is to be ignored), flags, stream and payload."""


class Broken(Exception):
    """The connection breaks the protocol: it ends with this code."""

    def __init__(self, code: Code) -> None:
        self.code = code


class StreamBroken(Exception):
    """One stream does."""

    def __init__(self, code: Code) -> None:
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    return frame_head(kind, flags, stream, len(payload)) + payload


def frame_head(kind: int, flags: int, stream: int, size: int) -> bytes:
    """What stands before a payload of `size` bytes."""
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream)


class FrameReader:
    """What a client sends: first the preface, then frames."""

    def __init__(self) -> None:
        self._held = bytearray()  # of a frame that has not come whole, or of the preface
        self._wanted = len(PREFACE)  # so many bytes of it make it worth a look
        self._has_preface = False

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Whole frames, as views of what came; Broken for what is no HTTP/2, or a frame that is too long."""
        held = self._held
        if held or not self._has_preface:
            held += data
            if not self._has_preface:
                self._take_preface()
            if len(held) < self._wanted:
                return
            data = bytes(held)
            held.clear()
        view, at, end = memoryview(data), 0, len(data)
        self._wanted = _HEAD_BYTES
        while end - at >= _HEAD_BYTES:
            high, low, kind, flags, number = _HEAD.unpack_from(data, at)
            size = high << 16 | low
            if size > FRAME_LIMIT_BYTES:
                raise Broken(Code.FRAME_SIZE_ERROR)
            begin = at + _HEAD_BYTES
            if begin + size > end:
                self._wanted = _HEAD_BYTES + size
                break
            at = begin + size
            yield kind, flags, number & STREAM_NUMBER, view[begin:at]
        if at < end:
            held += view[at:]

    def _take_preface(self) -> None:
        held = self._held
        if not PREFACE.startswith(held[: len(PREFACE)]):
            raise Broken(Code.PROTOCOL_ERROR)
        if len(held) >= len(PREFACE):
            self._has_preface, self._wanted = True, _HEAD_BYTES
            del held[: len(PREFACE)]


def unpadded(flags: int, payload: memoryview) -> memoryview:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise Broken(Code.PROTOCOL_ERROR)
    return payload[1 : len(payload) - payload[0]]
