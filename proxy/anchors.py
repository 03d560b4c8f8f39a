"""The prefixes by which a session is found again, and which of them it keeps."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .chain import Mark

OLDER_ANCHORS = 2
"""Kept beside the newest turn's: the one it grew from, and the oldest known. Each costs about 100 bytes."""

_PACKED = struct.Struct("<QIIII?")  # as objects they would take five times the room


class Anchor(NamedTuple):
    """A prefix that a later request may start with: `key`, `tail` and `check` are its mark."""

    key: int
    tail: int
    check: int
    turn: int
    tokens: int  # by the worker's own usage
    is_prompt: bool  # a whole prompt, without its reply

    @classmethod
    def at(cls, mark: Mark, turn: int, tokens: int, *, is_prompt: bool = False) -> Anchor:
        return cls(mark.key, mark.tail, mark.check, turn, tokens, is_prompt)

    @property
    def mark(self) -> Mark:
        return Mark(self.key, self.tail, self.check)


def pack(anchors: Iterable[Anchor]) -> bytes:
    return b"".join(_PACKED.pack(*anchor) for anchor in anchors)


def unpack(packed: bytes) -> list[Anchor]:
    return [Anchor(*values) for values in _PACKED.iter_unpack(packed)]


def older(anchors: Sequence[Anchor], turn: int, parent: int | None) -> tuple[list[Anchor], list[Anchor]]:
    """What stays and what goes of a session's anchors, oldest first, now that `turn` is its newest.

    parent: the key that the turn grew from; of the turn before only that one stays.
    """
    earlier = [anchor for anchor in anchors if anchor.turn < turn - 1]
    parents = [anchor for anchor in anchors if anchor.turn == turn - 1 and parent in (None, anchor.key)]
    kept = earlier + parents[-1:]
    if len(kept) > OLDER_ANCHORS:
        kept = [kept[0], *kept[1 - OLDER_ANCHORS :]]
    return kept, [anchor for anchor in anchors if anchor not in kept]
