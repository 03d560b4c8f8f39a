"""One session as the table keeps it, and the prefixes by which it is found again.

Numbers are packed into bytes: an idle session has 1 KiB, and a `Residency` or an `Anchor` as an object takes four
times what it is made of.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .chain import KEY_BITS, Mark
from .residency import Residency
from .workers import WorkerId

EARLIER_TURNS = 5
"""Turns before the newest that a session remembers, its first among them: 25 bytes each."""

_ANCHOR = struct.Struct("<QIIII??")
_HEAD = struct.Struct("<ddQQQQ")  # times and lengths: see `_Head`


class _Head(NamedTuple):
    """The packed numbers before the anchors."""

    seen_s: float = 0.0
    output_tokens: float = 0.0  # 0: no turn has ended yet
    decode_tokens: int = 0
    decode_stamp: int = 0
    prefill_tokens: int = 0
    prefill_stamp: int = 0


class Anchor(NamedTuple):
    """A prefix that a later request may start with: `key`, `tail` and `check` are its mark."""

    key: int
    tail: int
    check: int
    turn: int
    tokens: int  # by the worker's own usage
    is_prompt: bool = False  # a whole prompt, without its reply
    is_stored: bool = False  # a response kept by the engine: prompts that name it hold nothing of what was before

    @classmethod
    def at(cls, mark: Mark, turn: int, tokens: int, *, is_prompt: bool = False, is_stored: bool = False) -> Anchor:
        return cls(mark.key, mark.tail, mark.check, turn, tokens, is_prompt, is_stored)

    @property
    def mark(self) -> Mark:
        return Mark(self.key, self.tail, self.check)


@dataclass(slots=True, eq=False)
class Session:
    """One history; `label` is the key of its name where the client gave one."""

    strand: int
    label: int | None
    turn: int = 0
    _packed: bytes = _HEAD.pack(*_Head())
    _decode: WorkerId | None = None
    _decode_incarnation: str = ""
    _prefill: WorkerId | None = None
    _prefill_incarnation: str = ""

    @property
    def id(self) -> str:
        return hexadecimal(self.strand if self.label is None else self.label)

    @property
    def seen_s(self) -> float:
        """When it was last used."""
        return self._head().seen_s

    @seen_s.setter
    def seen_s(self, value: float) -> None:
        self._change(self._head()._replace(seen_s=value))

    @property
    def output_tokens(self) -> float | None:
        """Mean length of its answers."""
        return self._head().output_tokens or None

    @output_tokens.setter
    def output_tokens(self, value: float | None) -> None:
        self._change(self._head()._replace(output_tokens=value or 0.0))

    def residencies(self) -> tuple[Residency | None, Residency | None]:
        """What the decode and the prefill worker were left holding."""
        head = self._head()
        decode = prefill = None
        if self._decode is not None:
            decode = Residency(self._decode, self._decode_incarnation, head.decode_tokens, head.decode_stamp)
        if self._prefill is not None:
            prefill = Residency(self._prefill, self._prefill_incarnation, head.prefill_tokens, head.prefill_stamp)
        return decode, prefill

    def hold(self, decode: Residency | None, prefill: Residency | None) -> None:
        """New residencies; None leaves what was known."""
        head = self._head()
        if decode is not None:
            self._decode, self._decode_incarnation = decode.worker, decode.incarnation
            head = head._replace(decode_tokens=decode.tokens, decode_stamp=decode.stamp)
        if prefill is not None:
            self._prefill, self._prefill_incarnation = prefill.worker, prefill.incarnation
            head = head._replace(prefill_tokens=prefill.tokens, prefill_stamp=prefill.stamp)
        self._change(head)

    def anchors(self) -> list[Anchor]:
        """Oldest first."""
        return [Anchor(*values) for values in _ANCHOR.iter_unpack(self._packed[_HEAD.size :])]

    def remember(self, anchors: Iterable[Anchor]) -> None:
        self._packed = self._packed[: _HEAD.size] + b"".join(_ANCHOR.pack(*anchor) for anchor in anchors)

    def _head(self) -> _Head:
        return _Head(*_HEAD.unpack_from(self._packed))

    def _change(self, head: _Head) -> None:
        self._packed = _HEAD.pack(*head) + self._packed[_HEAD.size :]


def kept(anchors: Iterable[Anchor], turn: int, parent: int | None) -> list[Anchor]:
    """Of a session's anchors those of earlier turns that stay when `turn` is its newest, oldest first.

    parent: the key that the turn grew from; of the turn before only that one stays. Of stored responses none earlier
    than that stays, as each has a place in the index.
    """
    earlier = [anchor for anchor in anchors if anchor.turn < turn]
    before = [anchor for anchor in earlier if anchor.turn == turn - 1]
    grown = [anchor for anchor in before if anchor.key == parent] or before[-1:]
    stay = [anchor for anchor in earlier if anchor.turn < turn - 1 and not anchor.is_stored] + grown
    return stay if len(stay) <= EARLIER_TURNS else [stay[0], *stay[1 - EARLIER_TURNS :]]


def indexed(anchors: list[Anchor], turn: int) -> set[int]:
    """The keys that must lead to the session: the oldest, stored responses, and the newest turn with its reply.

    Whatever begins with an anchor in between begins with the oldest too, so the session is found by that one.
    """
    newest = [anchor for anchor in anchors if anchor.is_stored or (anchor.turn == turn and not anchor.is_prompt)]
    return {anchor.key for anchor in anchors[:1] + newest}


def hexadecimal(key: int) -> str:
    """A key as clients and operators see it; its first digits are as random as its last."""
    return f"{key:0{KEY_BITS // 4}x}"
