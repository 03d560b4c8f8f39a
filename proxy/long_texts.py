"""Long texts of a body, read piece by piece: none is ever decoded as a whole.

A buffer of 128 KiB or more is fresh memory each time (see `memory`), and a text was in three of them: decoded, encoded
again, and between its frame's bytes. Touching their pages took longer than hashing them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from msgspec.json import Decoder

PIECE_BYTES = 16_384

_LONG_BYTES = 262_144
_STRETCH_BYTES = 65_536
_ROLE = re.compile(rb'"role"')

_TEXT: Decoder[str] = Decoder(str)
_SEARCHED = 256
# The last place in sight where nothing is cut in two: behind a space, which no escape and no character holds; or in
# front of a character where no escape has begun in the 12 bytes before, the length of a pair of surrogates.
_CUT = re.compile(rb"(?s:.*)(?: |[^\\]{12}(?=[^\x80-\xbf]))")


def may_hold_long(messages: msgspec.Raw) -> bool:
    """Whether some text may be long enough to be worth the look at each message that it takes to find it."""
    size = memoryview(messages).nbytes
    starts = range(0, size - _STRETCH_BYTES, _STRETCH_BYTES)
    return size > _LONG_BYTES and not all(_ROLE.search(messages, start, start + _STRETCH_BYTES) for start in starts)


class LongText:
    """A JSON string as it stands in a body; the decoder has seen it before, but not whether it is UTF-8."""

    __slots__ = ("_raw",)

    def __init__(self, raw: msgspec.Raw) -> None:
        self._raw = raw

    def pieces(self) -> Iterator[bytes]:
        """Its UTF-8. DecodeError or UnicodeDecodeError where it is no text."""
        view = memoryview(self._raw)[1:-1]
        at = 0
        while at < len(view):
            piece = bytes(view[at : at + PIECE_BYTES])
            if at + len(piece) < len(view):
                cut = _CUT.match(piece, len(piece) - _SEARCHED)
                piece = piece[: cut.end()] if cut is not None else bytes(view[at:])
            at += len(piece)
            yield _utf8(piece)


def _utf8(piece: bytes) -> bytes:
    """What a part of a JSON string says."""
    if b"\\" in piece:
        return _TEXT.decode(b'"%b"' % piece).encode()
    if not piece.isascii():
        piece.decode()  # raises where it is not UTF-8
    return piece


def long_text(raw: msgspec.Raw) -> LongText | None:
    """A value that is a long text."""
    view = memoryview(raw)
    return LongText(raw) if view.nbytes > PIECE_BYTES and view[0] == ord('"') else None
