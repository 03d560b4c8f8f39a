"""One session as the table keeps it, and the keys by which it is found again.

What its newest prompt and reply are made of is in its units (`kept_units`). What no unit names is a `KnownPrefix`: an
end inside a block of a raw prompt, and a response that the engine stores. Numbers are packed into bytes: an idle
session of ten turns may take 1,200 bytes, and a `Residency` or a `KnownPrefix` takes four times as much as an object.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import astuple

from ..beliefs.beliefs import marks_of
from ..beliefs.held import Mark, Residency
from ..fleet.worker import WorkerId
from .hasher import KEY_BITS, Hasher
from .kept_units import LEARNT, NOTHING_LEARNT, KeptUnits
from .prefix_chain import Chain, PrefixEnd
from .text_cuts import FIRST_LONG_BLOCK, unpack_points

_PREFIX = struct.Struct("<QIIII??")
_MARK = struct.Struct("<QI")
_HEXADECIMAL = f"%0{KEY_BITS // 4}x"
_MESSAGES_MARKED = 16  # after tools: the first ones
RESPONSES_KEPT = 16  # stored responses known of a session beside its newest: 26 bytes and an entry of the index each


class KnownPrefix(msgspec.Struct, frozen=True, gc=False):
    """A prefix that a later request may start with; `key`, `tail` and `check` are its `PrefixEnd`."""

    key: int
    tail: int
    check: int
    turn: int
    tokens: int  # by the worker's own usage
    is_prompt: bool = False  # a whole prompt, without its reply
    is_stored: bool = False  # a response kept by the engine: a prompt that names it repeats nothing before it

    @classmethod
    def at(
        cls, end: PrefixEnd, turn: int, tokens: int, *, is_prompt: bool = False, is_stored: bool = False
    ) -> KnownPrefix:
        return cls(end.key, end.tail, end.check, turn, tokens, is_prompt, is_stored)

    @property
    def end(self) -> PrefixEnd:
        return PrefixEnd(self.key, self.tail, self.check)


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What the session table needs of a request: the chain of its messages, and the names that its client gave."""

    chain: Chain
    model: str = ""  # the one name by which sessions know it
    label: int | None = None  # key of the client's name for the session, or of the opener
    opener: str | None = None  # MD5 of the first user message, where `session_key` says so
    previous_response_id: str | None = None
    response_scope: int | None = None  # ids of stored responses are unique in it; None: none is stored


def response_key(hasher: Hasher, scope: int, response_id: str) -> int:
    """The chain key of a stored response: prompts that continue it start there."""
    return hasher.key(b"R", f"{scope:x}", response_id)


def points_of_prompt(prompt: Prompt, tokens: int) -> list[Mark]:
    """Inside of its head, where it may part from others: of a prompt that no session expects. See `text_cuts`."""
    chain = prompt.chain
    if chain.long_texts is None or not chain.long_texts.known:  # nearly always
        return []
    end, size = chain.ends[chain.marks.head], chain.size
    return [Mark(key, tokens * at // size) for key, at in chain.long_texts.known if at < end]


def marks_of_prompt(prompt: Prompt, tokens: int) -> list[Mark]:
    """Up to where other sessions' prompts may be the same: the ends of tools, of the system's text, and of the messages
    after them. tokens: the prompt's.
    """
    if prompt.previous_response_id is not None:  # what it repeats by name has tokens, but no bytes
        return []
    chain, (tools, system) = prompt.chain, (prompt.chain.marks.tools, prompt.chain.marks.system)
    keys, ends = chain.keys, chain.ends
    if tools:  # each is a unit
        places = [part for part in (min(tools, system), max(tools, system)) if part]
        places += range(places[-1] + 1, min(len(keys), places[-1] + 1 + _MESSAGES_MARKED))
        keys, ends = tuple([keys[place] for place in places]), tuple([ends[place] for place in places])
    return marks_of(keys, ends, chain.size, tokens)


class Session(msgspec.Struct, eq=False, gc=False, array_like=True):
    """One history; `label` is the key of the client's name for it, if any. No `gc`: it is in no reference cycle."""

    history: int
    label: int | None
    turn: int = 0
    seen_s: float = 0.0  # when it was last used
    packed: bytes = NOTHING_LEARNT  # with the units after it, see `kept_units`
    decode: WorkerId | None = None
    decode_incarnation: str = ""
    prefill: WorkerId | None = None
    prefill_incarnation: str = ""
    packed_prefixes: bytes = b""
    packed_marks: bytes = b""
    packed_head: bytes = b""  # see `text_cuts.head_points`
    awaits: bool | None = None
    """No turn has come since the last answer, and whether that called a tool; None: one has come."""

    @property
    def id(self) -> str:
        return hexadecimal(self.history if self.label is None else self.label)

    @property
    def units(self) -> KeptUnits:
        return KeptUnits(self.packed)

    @property
    def output_tokens(self) -> float | None:
        """Mean length of its answers."""
        return LEARNT.unpack_from(self.packed)[0] or None

    @property
    def decode_residency(self) -> Residency | None:
        """What the D or R held after the last turn."""
        if self.decode is None:
            return None
        return Residency(self.decode, self.decode_incarnation, LEARNT.unpack_from(self.packed)[1])

    @property
    def prefill_residency(self) -> Residency | None:
        if self.prefill is None:
            return None
        return Residency(self.prefill, self.prefill_incarnation, LEARNT.unpack_from(self.packed)[2])

    def prefixes(self) -> list[KnownPrefix]:
        if not self.packed_prefixes:  # nearly always
            return []
        return [KnownPrefix(*values) for values in _PREFIX.iter_unpack(self.packed_prefixes)]

    def stored(self, turn: int) -> list[KnownPrefix]:
        """Responses to its turns before this one that its engine has stored, the newest last; of many the newest."""
        return [one for one in self.prefixes() if one.is_stored and one.turn < turn][-RESPONSES_KEPT:]

    def learn(
        self,
        output_tokens: float | None,
        decode: Residency | None,
        prefill: Residency | None,
        units: bytes | None = None,
        calls_tool: bool | None = None,
    ) -> None:
        """Sets the mean length of answers; None leaves a residency, or the units, as they were.

        calls_tool: a turn has been answered so, and the next one is waited for; None: none has.
        """
        _, decode_tokens, prefill_tokens = LEARNT.unpack_from(self.packed)
        if decode is not None:
            self.decode, self.decode_incarnation = decode.worker, decode.incarnation
            decode_tokens = decode.tokens
        if prefill is not None:
            self.prefill, self.prefill_incarnation = prefill.worker, prefill.incarnation
            prefill_tokens = prefill.tokens
        if units is None:
            units = self.packed[LEARNT.size :]
        if calls_tool is not None:
            self.awaits = calls_tool
        self.packed = LEARNT.pack(output_tokens or 0.0, decode_tokens, prefill_tokens) + units

    def keep_prefixes(self, prefixes: Sequence[KnownPrefix]) -> None:
        self.packed_prefixes = b"".join([_PREFIX.pack(*astuple(prefix)) for prefix in prefixes]) if prefixes else b""

    def came_back(self) -> bool | None:
        """Its next turn is here. Whether the answer before called a tool; None if it has been here already."""
        calls_tool, self.awaits = self.awaits, None
        return calls_tool

    @property
    def marks(self) -> list[Mark]:
        """Of its first prompt, shortest first: what its other turns add, few share."""
        if not self.packed_marks:
            return []
        return [Mark(*values) for values in _MARK.iter_unpack(self.packed_marks)]

    @marks.setter
    def marks(self, marks: Iterable[Mark]) -> None:
        self.packed_marks = b"".join([_MARK.pack(*astuple(mark)) for mark in marks])

    @property
    def head_points(self) -> list[tuple[int, int]]:
        """Keys inside of its head and at its end, with the bytes up to there."""
        return unpack_points(self.packed_head)


def index_keys(session: Session, units: KeptUnits | None = None) -> set[int]:
    """The keys by which the index finds the session; ValueError for one that this version cannot read.

    units: the session's, if they have been read.
    """
    keys = (units or session.units).index_keys(FIRST_LONG_BLOCK)
    if session.packed_prefixes:
        if len(session.packed_prefixes) % _PREFIX.size:
            raise ValueError("a session has another layout")
        keys.update([prefix.key for prefix in session.prefixes()])
    return keys


def held_tokens(session: Session) -> int:
    """Of its newest prompt with the reply, as far as a next prompt will hold it."""
    units = session.units
    known = [prefix.tokens for prefix in session.prefixes()]
    if units.count:
        known.append(units.tokens((units.in_prompt if units.reply_reasoned else units.count) - 1))
    return max(known, default=0)


def hexadecimal(key: int) -> str:
    """A key as clients and operators see it; its first digits are as random as its last."""
    return _HEXADECIMAL % key


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSummary:
    """A session as the admin API shows it."""

    session_id: str
    turn: int
    held_tokens: int
    decode: WorkerId | None
    prefill: WorkerId | None
    seen_s: float  # on the caller's clock


def summary_of(session: Session) -> SessionSummary:
    return SessionSummary(
        session_id=session.id,
        turn=session.turn,
        held_tokens=held_tokens(session),
        decode=session.decode,
        prefill=session.prefill,
        seen_s=session.seen_s,
    )
