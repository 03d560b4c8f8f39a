"""Fields of protobuf messages as they are encoded: https://protobuf.dev/programming-guides/encoding.

For the few messages of each turn: to build an object for each part of them takes longer than to write them down.
"""

from __future__ import annotations


def key(number: int) -> int:
    """What stands before a field that is a string, bytes or a message, in one byte as `number` is below 16."""
    return number << 3 | 2


def field(key: int, value: bytes) -> bytes:
    return field_head(key, len(value)) + value


def field_head(key: int, size: int) -> bytes:
    """What stands before a field's value."""
    if size < 0x80:
        return bytes((key, size))
    if size < 0x4000:
        return bytes((key, size & 0x7F | 0x80, size >> 7))
    return bytes((key,)) + _number(size)


def _number(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(encoded) + bytes((number,))
