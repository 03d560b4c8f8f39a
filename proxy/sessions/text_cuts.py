"""Keys inside of long texts, so that a prompt is also known by the start of a message.

A text above 4 KiB is cut there, and from then on wherever it has grown by an eighth, in whole KiB: 25 cuts in 130 KB,
43 in 1 MB. The key at a cut names the prompt up to there, whatever follows. In its unit's hash the digest of the text
up to the cut stands behind the byte 0xFD, not behind `T`, so no shorter text has that key.

What a client may have put into one request only is cut finer: the newest message, and the last one before the newest
reply, wherever they have grown by 256 bytes or an eighth. The system's text is cut so from 1 KiB on, and more often at
its end, where many clients put a clock.

Cuts are made only when they are asked for: for a prompt that no session expects, not for one that continues its
session's newest. Those of a head are made once for all prompts that have it.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import takewhile
from operator import itemgetter
from typing import TYPE_CHECKING

import msgspec

from .hasher import END, LONG_BYTES, USUAL_KEYS, Hasher, before_parts, encoded, finished
from .prefix_chain import UNIT_OVERHEAD_BYTES, Chain

if TYPE_CHECKING:
    from collections.abc import Sequence
    from hashlib import _Hash
    from typing import TypeAlias

    from .hasher import LongUnit
    from .prefix_chain import LongTexts

    _LongText: TypeAlias = "tuple[_Hash, bytes, int]"
    """The hash of a unit before a text, that text, and where in the prompt it begins."""

Cut = tuple[int, int]
"""A key, and the bytes of the prompt that it names."""

RECENT_TEXTS = 4
"""How many of a prompt's long texts are cut beside the first: later requests differ in the newest messages."""

REPLY_CHARS = 1024
"""So much of a first reply names it. None is known by less than `LEAST_REPLY_CHARS`: many sessions have "OK"."""
LEAST_REPLY_CHARS = 64

LEAST_HEAD_BYTES = 1024
"""About 256 tokens: shorter beginnings are not worth a worker."""

HEAD_POINTS = 64
"""Most of one head; more tools than this are thinned out."""

FINE_BYTES = 256
"""Longer texts of the newest messages can be cut; and by so much they must grow for the next cut."""

_GRAIN = 1024
_END_GRAIN = 128
_END_GAPS = 0, 1, 3, 7  # grains from the end of a system's text
_LONGEST_HEAD = 1 << 20
_POINT = struct.Struct("<QI")


def grown_offsets(first: int, grain: int, limit: int) -> list[int]:
    """Offsets from `first` on that grow by an eighth, or by the next multiple of `grain` above it."""
    offsets = [first]
    while offsets[-1] < limit:
        offsets.append(offsets[-1] + -(-offsets[-1] // (8 * grain)) * grain)
    return offsets


_OFFSETS = grown_offsets(LONG_BYTES, _GRAIN, 1 << 32)
_FINE_OFFSETS = grown_offsets(FINE_BYTES, FINE_BYTES, _LONGEST_HEAD)
_BELOW_LONG = _FINE_OFFSETS[: bisect_left(_FINE_OFFSETS, LONG_BYTES)]
_OF_HEADS = _FINE_OFFSETS[bisect_left(_FINE_OFFSETS, LEAST_HEAD_BYTES) :]


class UnitText(msgspec.Struct, frozen=True, gc=False):
    """The first text of a unit, if nothing comes before it there."""

    previous: int  # the key before the unit, without the head's mask
    role: str
    name: str
    text: bytes  # of which the first `LONG_BYTES` count
    start: int  # bytes of the prompt before the unit


class TextCuts:
    """The texts of one prompt that can be cut, as they are hashed."""

    __slots__ = ("_are_made", "_head", "_reply", "_texts", "find_newest", "known", "mask", "start")

    def __init__(self, cuts: Sequence[Cut] | None = None) -> None:
        """cuts: what another process has found."""
        self.start: int | None = None  # bytes of the prompt before the unit that is being hashed; None: do not note it
        self.mask = 0  # the chain's, see `Chain.head_mask`
        self.find_newest: Callable[[TextCuts], list[UnitText]] | None = None
        """Called once cuts are made: what is cut finer, shortest prefix first. It may note an only reply."""
        self.known = cuts or ()  # the cuts as far as they have been made
        self._texts: list[_LongText | LongUnit] = []
        self._reply: tuple[str, int, int] | None = None
        self._head: _Head | None = None
        self._are_made = cuts is not None

    @property
    def has_long(self) -> bool:
        """Whether a text of more than `LONG_BYTES` has been noted."""
        return bool(self._texts)

    def note(self, state: _Hash, text: bytes, offset: int) -> None:
        """state: of a unit's hash before the text. offset: of the text in the unit."""
        if self.start is not None and len(text) > LONG_BYTES:
            self._texts.append((state.copy(), text, self.start + offset))

    def note_units(self, units: Sequence[LongUnit]) -> None:
        """They follow what has been noted before them."""
        self._texts += units

    def note_head(
        self, keys: Sequence[int], ends: Sequence[int], system: int, texts: Callable[[], Iterable[str]]
    ) -> None:
        """keys, ends: up to the head's end. system: the place of the system's text among them; texts: its role and what
        it says."""
        self._head = _Head(tuple(keys), tuple(ends), system, texts)

    def note_only_reply(self, text: str, head: int, size: int) -> None:
        """The one reply in the prompt. head: the last key of the head, which has `size` bytes."""
        self._reply = text, head, size

    def cuts(self, hasher: Hasher) -> Sequence[Cut]:
        """By their bytes, shortest first."""
        if not self._are_made:
            newest = [] if self.find_newest is None else self.find_newest(self)
            self.find_newest = None  # it holds the messages
            recent, mask = self._texts[-RECENT_TEXTS:], self.mask
            first = [] if len(recent) == len(self._texts) else self._texts[:1]
            known = [] if self._head is None else self._head.points(hasher)
            if self._reply is not None and (alone := reply_alone(hasher, *self._reply[:2])):
                known.append((alone, self._reply[2]))
            found = [cut for text in (*first, *recent) for cut in _cuts(hasher, text)]
            if newest:
                found += [cut for text in newest for cut in _fine_cuts(hasher, text)]
                found.sort(key=itemgetter(1))
            known += [(key ^ mask, end) for key, end in found]
            self.known, self._are_made = known, True
        return self.known

    def without_text(self) -> TextCuts | None:
        """None: no cut has been made, as for most prompts."""
        return TextCuts(self.known) if self.known else None


class LateCuts:
    """Those of a prompt whose beginning was not read again: that is done when they are asked for."""

    __slots__ = ("_found", "_read")

    def __init__(self, read: Callable[[], LongTexts | None]) -> None:
        """read: all of the prompt."""
        self._read = read
        self._found: LongTexts | None = None

    @property
    def known(self) -> Sequence[Cut]:
        return () if self._found is None else self._found.known

    def cuts(self, hasher: Hasher) -> Sequence[Cut]:
        if self._found is None:
            self._found = self._read() or TextCuts(())
        return self._found.cuts(hasher)

    def without_text(self) -> LongTexts | None:
        return None if self._found is None else self._found.without_text()


class _Head:
    """Tools and the system's text of one prompt."""

    __slots__ = ("_ends", "_keys", "_system", "_texts")

    def __init__(
        self, keys: tuple[int, ...], ends: tuple[int, ...], system: int, texts: Callable[[], Iterable[str]]
    ) -> None:
        self._keys = keys
        self._ends = ends
        self._system = system
        self._texts = texts

    def points(self, hasher: Hasher) -> list[Cut]:
        """Where another head may part from this one."""
        name = self._keys[1], self._keys[-1]  # its order counts
        packed = hasher.known_heads.get(name)
        if packed is None:
            if len(hasher.known_heads) >= USUAL_KEYS:
                hasher.known_heads.clear()
            packed = hasher.known_heads[name] = pack_points(self._found(hasher))
        return unpack_points(packed)

    def _found(self, hasher: Hasher) -> list[Cut]:
        keys, ends, system = self._keys, self._ends, self._system
        found = [(key, end) for key, end in zip(keys, ends, strict=True) if end >= LEAST_HEAD_BYTES]
        if system:
            role, *texts = map(encoded, self._texts())
            text = END.join(texts)
            before, start = keys[0] ^ keys[system - 1], max(ends[system] - len(text), ends[system - 1])
            found += [(key ^ before, start + offset) for key, offset in head_cuts(hasher, keys[0], role, text)]
        return sorted(found, key=itemgetter(1))


def head_cuts(hasher: Hasher, seed: int, role: bytes, text: bytes) -> list[Cut]:
    """Of a system's text: where it has grown by an eighth, in steps of 256 bytes, and near its end."""
    last = (len(text) - 1) // _END_GRAIN
    offsets = {(last - gap) * _END_GRAIN for gap in _END_GAPS}
    offsets.update(_OF_HEADS[: bisect_left(_OF_HEADS, len(text))])
    cuts: list[Cut] = []
    state, at = hasher.start(b"H", seed), 0
    state.update(role + END)
    view = memoryview(text)
    for offset in sorted(offsets):
        if LEAST_HEAD_BYTES <= offset <= _LONGEST_HEAD:
            state.update(view[at:offset])
            at = offset
            cuts.append((finished(state), offset))
    return cuts


def head_points(chain: Chain) -> bytes:
    """What is known of a prompt's head, packed: its end, and the points before it if cuts were made."""
    head = chain.marks.head
    if not head or chain.ends[head] < LEAST_HEAD_BYTES:
        return b""
    known = chain.hasher.known_heads.get((chain.keys[1], chain.keys[head]))
    if known is not None:
        return known  # one object for all sessions that begin so
    end = chain.ends[head]
    inside = [] if chain.long_texts is None else [cut for cut in chain.long_texts.known if cut[1] < end]
    return pack_points([*inside, (chain.keys[head], end)])


def pack_points(points: Sequence[Cut]) -> bytes:
    if len(points) > HEAD_POINTS:
        step = len(points) / HEAD_POINTS
        points = [points[-1 - int(at * step)] for at in reversed(range(HEAD_POINTS))]
    return b"".join([_POINT.pack(key, min(end, (1 << 32) - 1)) for key, end in points])


def unpack_points(packed: bytes) -> list[Cut]:
    return list(_POINT.iter_unpack(packed))


def reply_alone(hasher: Hasher, text: str, head: int) -> int:
    """The key of a conversation's first reply, whatever it replies to; 0: it is too short. head: the last key of it."""
    return 0 if len(text) < LEAST_REPLY_CHARS else hasher.key(b"A", text[:REPLY_CHARS], previous=head)


def cuts_of(chain: Chain) -> Sequence[Cut]:
    return () if chain.long_texts is None else chain.long_texts.cuts(chain.hasher)


def _cuts(hasher: Hasher, of: _LongText | LongUnit) -> list[Cut]:
    if len(of) == 3:
        state, text, start = of
        offsets = _OFFSETS[: bisect_left(_OFFSETS, len(text))]
        keys = hasher.cuts_after(state, text, offsets)
    else:
        previous, before, said, start = of
        text, start = said.utf8, start + UNIT_OVERHEAD_BYTES
        offsets = _OFFSETS[: bisect_left(_OFFSETS, len(text))]
        keys = hasher.cuts(b"U", previous, before, text, offsets)
    return [(key, start + offset) for key, offset in zip(keys, offsets, strict=True)]


def _fine_cuts(hasher: Hasher, of: UnitText) -> list[Cut]:
    """Up to where a text is long."""
    data, start = of.text[:LONG_BYTES], of.start + UNIT_OVERHEAD_BYTES
    offsets = _BELOW_LONG[: bisect_left(_BELOW_LONG, len(data))]
    keys = hasher.cuts(b"N", of.previous, before_parts(of.role, of.name, ""), data, offsets)
    return [(key, start + offset) for key, offset in zip(keys, offsets, strict=True)]


_BLOCK_OFFSETS = grown_offsets(64, 64, 1 << 32)
FIRST_LONG_BLOCK = bisect_left(_BLOCK_OFFSETS, LONG_BYTES)
"""Among the blocks that are kept of a raw prompt, the first that ends where a text would be cut."""


def kept_blocks(ends: Sequence[int]) -> list[int]:
    """Which blocks of a raw prompt are kept, by their ends: those where it has grown by an eighth."""
    places = (bisect_left(ends, offset) for offset in _BLOCK_OFFSETS)
    return list(dict.fromkeys(takewhile(len(ends).__gt__, places)))
