"""Fields of protobuf messages as they are encoded: https://protobuf.dev/programming-guides/encoding.

For the few messages of each turn: to build an object for each part of them takes longer than to write them down.
"""

from __future__ import annotations

_NO_NUMBER = 1 << 62


def key(number: int) -> int:
    """What stands before a field that is a string, bytes or a message, in one byte as `number` is below 16."""
    return number << 3 | 2


def field(key: int, value: bytes) -> bytes:
    size = len(value)
    return (bytes((key, size)) if size < 0x80 else field_head(key, size)) + value


def field_head(key: int, size: int) -> bytes:
    """What stands before a field's value."""
    if size < 0x80:
        return bytes((key, size))
    head = bytearray((key,))
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head)


def read_number(message: memoryview, at: int) -> tuple[int, int]:
    """Of at most 35 bits, and where it ends; one that is longer, or does not end, is larger than any message."""
    number = shift = 0
    for byte in message[at : at + 5]:
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    return _NO_NUMBER, at
