"""HTTP/2 frames (RFC 9113, section 4): cut out of what comes, and written."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_LIMIT_BYTES = 64 * 1024  # that the peer may send
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


class Frame(NamedTuple):
    kind: int  # a `FrameType`, or one that is to be ignored
    flags: int
    stream: int
    payload: bytes


class Broken(Exception):
    """The connection breaks the protocol: it ends with this code."""

    def __init__(self, code: Code) -> None:
        self.code = code


class StreamBroken(Exception):
    """One stream does."""

    def __init__(self, code: Code) -> None:
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


class FrameReader:
    """What a client sends: first the preface, then frames."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._has_preface = False

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Whole frames; Broken for what is no HTTP/2, or a frame that is too long."""
        held = self._held
        held += data
        if not self._has_preface:
            if not PREFACE.startswith(held[: len(PREFACE)]):
                raise Broken(Code.PROTOCOL_ERROR)
            if len(held) < len(PREFACE):
                return
            self._has_preface = True
            del held[: len(PREFACE)]
        at = 0
        while len(held) - at >= _HEAD_BYTES:
            size = int.from_bytes(held[at : at + 3])
            if size > FRAME_LIMIT_BYTES:
                raise Broken(Code.FRAME_SIZE_ERROR)
            end = at + _HEAD_BYTES + size
            if len(held) < end:
                break
            number = int.from_bytes(held[at + 5 : at + 9]) & STREAM_NUMBER
            found = Frame(held[at + 3], held[at + 4], number, bytes(held[at + _HEAD_BYTES : end]))
            at = end
            yield found
        del held[:at]


def unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise Broken(Code.PROTOCOL_ERROR)
    return payload[1 : len(payload) - payload[0]]
