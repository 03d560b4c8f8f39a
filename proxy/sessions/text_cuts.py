"""Keys inside of long texts, so that a prompt is also known by the start of a message.

A text above 4 KiB is cut there, and from then on wherever it has grown by an eighth, in whole KiB: 25 cuts in 130 KB,
43 in 1 MB. The key at a cut names the prompt up to there, whatever follows. In a unit's hash a cut is the byte 0xFD and
a hash of the text beyond its first 4 KiB, in place of what ends the text; UTF-8 never holds 0xFD either.

A cut costs 3 us. So they are made only when they are asked for: for a prompt that no session expects, not for one that
continues its session's newest.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import takewhile
from typing import TYPE_CHECKING

from .hasher import HEAD_BYTES, Hasher, finished
from .prefix_chain import Chain

if TYPE_CHECKING:
    from collections.abc import Sequence
    from hashlib import _Hash

Cut = tuple[int, int]
"""A key, and the bytes of the prompt that it names."""

LONG_BYTES = HEAD_BYTES
"""Longer texts can be cut."""

CUT = b"\xfd"
RECENT_TEXTS = 4
"""How many of a prompt's long texts are cut beside the first: later requests differ in the newest messages."""

_GRAIN = 1024
_DIGEST_BYTES = 16


def grown_offsets(first: int, grain: int, limit: int) -> list[int]:
    """Offsets from `first` on that grow by an eighth, or by the next multiple of `grain` above it."""
    offsets = [first]
    while offsets[-1] < limit:
        offsets.append(offsets[-1] + -(-offsets[-1] // (8 * grain)) * grain)
    return offsets


_OFFSETS = [offset - HEAD_BYTES for offset in grown_offsets(HEAD_BYTES, _GRAIN, 1 << 32)]


class TextCuts:
    """The texts of one prompt that can be cut, as they are hashed."""

    __slots__ = ("_are_made", "_texts", "known", "start")

    def __init__(self, cuts: Sequence[Cut] | None = None) -> None:
        """cuts: what another process has found."""
        self.start: int | None = None  # bytes of the prompt before the unit that is being hashed; None: do not note it
        self.known = cuts or ()  # the cuts as far as they have been made
        self._texts: list[tuple[_Hash, bytes | memoryview, int]] = []
        self._are_made = cuts is not None

    def __bool__(self) -> bool:
        return bool(self._texts or self.known)

    def note(self, state: _Hash, beyond: memoryview, offset: int) -> None:
        """state: of a unit's hash after the first 4 KiB of a text. offset: of `beyond` in the unit."""
        if self.start is not None:
            self._texts.append((state.copy(), beyond, self.start + offset))

    def cuts(self, hasher: Hasher) -> Sequence[Cut]:
        if not self._are_made:
            recent = self._texts[-RECENT_TEXTS:]
            first = [] if len(recent) == len(self._texts) else self._texts[:1]
            self.known = [cut for text in (*first, *recent) for cut in _cuts(hasher, *text)]
            self._are_made = True
        return self.known

    def without_text(self) -> TextCuts:
        return TextCuts(self.known)


def cuts_of(chain: Chain) -> Sequence[Cut]:
    return () if chain.long_texts is None else chain.long_texts.cuts(chain.hasher)


def _cuts(hasher: Hasher, head: _Hash, beyond: bytes | memoryview, start: int) -> list[Cut]:
    hashed, at, cuts = hasher.beyond(b""), 0, list[Cut]()
    for offset in _OFFSETS[: bisect_left(_OFFSETS, len(beyond))]:
        hashed.update(beyond[at:offset])
        at = offset
        state = head.copy()
        state.update(CUT + hashed.digest(_DIGEST_BYTES))
        cuts.append((finished(state), start + offset))
    return cuts


_BLOCK_OFFSETS = grown_offsets(64, 64, 1 << 32)
FIRST_LONG_BLOCK = bisect_left(_BLOCK_OFFSETS, HEAD_BYTES)
"""Among the blocks that are kept of a raw prompt, the first that ends where a text would be cut."""


def kept_blocks(ends: Sequence[int]) -> list[int]:
    """Which blocks of a raw prompt are kept, by their ends: those where it has grown by an eighth."""
    places = (bisect_left(ends, offset) for offset in _BLOCK_OFFSETS)
    return list(dict.fromkeys(takewhile(len(ends).__gt__, places)))
