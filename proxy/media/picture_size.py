"""How many pixels an image has, by the head of its file: PNG, GIF, WebP and JPEG."""

from __future__ import annotations

import struct

_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # JPEG's markers with the size of the frame
_BARE = frozenset((0x01, *range(0xD0, 0xDA)))  # JPEG's markers without a length
_LOOKED_AT = 1024  # of JPEG's markers and fill bytes: a body of nothing else would take seconds


def pixels(data: bytes) -> int:
    """Width times height; 0 where the head does not tell."""
    try:
        width, height = _size(data)
    except (struct.error, IndexError):
        return 0
    return width * height


def _size(data: bytes) -> tuple[int, int]:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height = struct.unpack_from(">II", data, 16)
    elif data.startswith((b"GIF87a", b"GIF89a")):
        width, height = struct.unpack_from("<HH", data, 6)
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        width, height = _webp(data)
    elif data.startswith(b"\xff\xd8"):
        width, height = _jpeg(data)
    else:
        width = height = 0
    return width, height


def _webp(data: bytes) -> tuple[int, int]:
    match data[12:16]:
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
        case b"VP8L":
            (bits,) = struct.unpack_from("<I", data, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8X":
            return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    return 0, 0


def _jpeg(data: bytes) -> tuple[int, int]:
    at = 2
    for _ in range(_LOOKED_AT):
        if data[at] != 0xFF:
            break
        marker = data[at + 1]
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        at += 1 if marker == 0xFF else 2
        if marker not in _BARE and marker != 0xFF:
            at += max(2, struct.unpack_from(">H", data, at)[0])
    return 0, 0
