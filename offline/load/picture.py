"""Images of a workload: small files that are large to an encoder, each another one."""

from __future__ import annotations

import base64
import hashlib
import struct
import zlib

SIDE = 1024  # pixels


def data_url(place: tuple[int, int], *, seed: int) -> str:
    """A PNG of grey columns. place: number of the conversation, index of the turn; of other places they differ."""
    greys = hashlib.sha256(struct.pack("<3q", seed, *place)).digest()
    row = b"\0" + (greys * (SIDE // len(greys) + 1))[:SIDE]
    head = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 0, 0, 0, 0)
    parts = (_part(b"IHDR", head), _part(b"IDAT", zlib.compress(row * SIDE, 1)), _part(b"IEND", b""))
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def _part(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
