"""What a session keeps of its newest prompt and the reply to it: the end of each unit, packed into 14 bytes.

Keys are chained. So if one unit is in another prompt, all before it are too, and the last common one is found by binary
search. A unit's tokens are a worker's own count where a prompt or a reply ended there; between two such counts they go
by bytes. Its turn is the one that a prompt has which differs from this unit on: a reply is of the turn that follows it.

Units of the head are not kept: what only the head has in common is no conversation. Of more than `KEPT` units, the
middle is thinned out: an edit there is placed at the nearest before it that is left, an eighth of the history before at
most. Of a raw prompt the blocks are kept by which it has grown by an eighth.

Cuts of texts (`text_cuts`) are kept of the opener, which is the first message by the user, and of the newest message,
because those are what other prompts begin with or replace. So is, before any second turn, the key of the first
reply alone, which stands for the end of the head: clients that replace their first message keep the reply to it.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from .. import plane
from ..beliefs.held import Residency
from .hasher import LONG_BYTES
from .prefix_chain import UNIT_OVERHEAD_BYTES, Chain, PrefixEnd
from .text_cuts import kept_blocks

KEPT = 256
"""Units, 3.6 KB of them; nine in ten sessions have fewer."""

_FIRST = 32  # of these, so many of the first and of the newest always stay
_NEWEST = 128

LEARNT = struct.Struct("<dII")
"""What is before the units in the same bytes: the mean length of answers in tokens, 0 before any turn has ended; tokens
of D's residency, then of P's."""

_HEAD = struct.Struct("<IHHHHBQI")
_UNIT = struct.Struct("<QIH")
_HEAD_BYTES, _MOST_BYTES = LEARNT.size + _HEAD.size, KEPT * _UNIT.size
_MOST = (1 << 32) - 1  # tokens
_MOST_TURNS = (1 << 16) - 1
_REASONED, _BLOCKS, _REPLY_REASONED, _REPLY_ALONE = 1, 2, 4, 8

Place = tuple[int, int]
"""Bytes of a prompt, and the tokens up to there."""


class TurnOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a completed turn taught. A residency of None leaves the known one as it is."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None  # of the prompt, on a worker believed to hold its prefix; None: on no such worker
    reply_key: PrefixEnd | None = None
    response_id: str | None = None
    decode: Residency | None = None
    prefill: Residency | None = None
    reasoned: bool = False  # the reply held reasoning
    calls_tool: bool = False
    reply_alone: int = 0  # see `text_cuts`

    @property
    def held_tokens(self) -> int:
        """Of the prompt with its reply, as far as a next prompt that names it will surely hold it."""
        return self.prompt_tokens if self.reasoned else self.prompt_tokens + self.completion_tokens


class UncompiledUnits:
    """What `plane.PackedUnits` does, for machines without it."""

    entries: int  # units and cuts
    count: int  # units
    in_prompt: int  # without the reply
    opener: int
    opener_cuts: int
    head_mask: int  # of the prompt's keys, see `Chain.head_mask`
    head_tokens: int  # by bytes
    round_tokens: int  # of the newest prompt that ended in the user's message
    reasoned: bool  # a reply since then was
    reply_reasoned: bool  # the newest was

    __slots__ = (
        "_data",
        "count",
        "entries",
        "has_reply_alone",
        "head_mask",
        "head_tokens",
        "in_prompt",
        "is_blocks",
        "opener",
        "opener_cuts",
        "reasoned",
        "reply_reasoned",
        "round_tokens",
    )

    def __init__(self, data: bytes) -> None:
        """ValueError for bytes that `pack` does not write."""
        self._data = data
        if len(data) == LEARNT.size:
            data = NOTHING_LEARNT + _EMPTY
        elif len(data) < _HEAD_BYTES or (len(data) - _HEAD_BYTES) % _UNIT.size:
            raise ValueError("kept units have another layout")
        counts = _HEAD.unpack_from(data, LEARNT.size)
        self.round_tokens, count, in_prompt, opener, opener_cuts, flags, self.head_mask, self.head_tokens = counts
        self.count, self.in_prompt, self.opener, self.opener_cuts = count, in_prompt, opener, opener_cuts
        self.reasoned, self.is_blocks = flags & _REASONED > 0, flags & _BLOCKS > 0
        self.reply_reasoned, self.has_reply_alone = flags & _REPLY_REASONED > 0, flags & _REPLY_ALONE > 0
        self.entries = entries = (len(data) - _HEAD_BYTES) // _UNIT.size
        if not opener <= in_prompt <= count <= count + opener_cuts <= entries:
            raise ValueError("kept units have another layout")

    def is_of(self, data: bytes) -> bool:
        """Whether they were read from this very object: no turn of its session has ended since."""
        return self._data is data

    def key(self, place: int) -> int:
        return self._unit(place)[0]

    def tokens(self, place: int) -> int:
        return self._unit(place)[1]

    def turn(self, place: int) -> int:
        return self._unit(place)[2]

    def slice(self, start: int, end: int) -> bytes:
        return self._data[_HEAD_BYTES + start * _UNIT.size : _HEAD_BYTES + end * _UNIT.size]

    @property
    def newest_key(self) -> int | None:
        """Where its newest prompt ends, if a unit does there."""
        return None if self.is_blocks or not self.in_prompt else self.key(self.in_prompt - 1)

    def shared(self, sizes: dict[int, int]) -> int:
        """How many of the units are in a prompt, of whose keys these are."""
        if self.count and self.key(self.count - 1) in sizes:  # nearly always: the session goes on
            return self.count
        return bisect_left(range(self.count), True, key=lambda place: self.key(place) not in sizes)

    def place(self, shared: int, sizes: dict[int, int]) -> Place | None:
        """Where the last of so many shared units is; where the first is that needs no more tokens."""
        if not shared:
            return None
        at, tokens = shared - 1, self.tokens(shared - 1)
        while at and self.tokens(at - 1) == tokens:
            at -= 1
        return sizes[self.key(at)], tokens

    def within(self, tokens: int, shared: int) -> int:
        """How many of the first `shared` units end within so many tokens."""
        if shared and self.tokens(shared - 1) <= tokens:  # nearly always
            return shared
        return bisect_right(range(shared), tokens, key=self.tokens)

    def kept(
        self, shared: int, since: Place, tokens: int, keys: Sequence[int], ends: Sequence[int]
    ) -> tuple[int, Place]:
        """How many of the `shared` units a prompt of so many tokens keeps, and where the last one is.

        since: the last place of the prompt whose tokens were known before; those of units after it were not. keys,
        ends: the prompt's, with those units in the same order; KeyError where one is missing.
        """
        shared, at = self.within(since[1] or tokens, shared), len(keys)
        while shared:
            at = _last(keys, self.key(shared - 1), at)
            end = ends[at]
            if end <= since[0] or not since[1]:
                return shared, (end, self.tokens(shared - 1))
            shared -= 1
        return 0, (0, 0)

    def index_keys(self, long_blocks: int) -> set[int]:
        """The opener and its cuts, the newest prompt without its last unit, and the reply, whatever the head is.

        Of a raw prompt, whose opener nobody can tell, the end of its first turn, and the blocks from `long_blocks` on.
        """
        if self.is_blocks:
            places = [self.opener, *range(long_blocks, self.in_prompt)]
        else:
            places = [self.opener, max(self.opener, self.in_prompt - 2)]
        keys = {self.key(place) for place in places if place < self.count}
        if self.count > self.in_prompt:
            keys.add(self.key(self.in_prompt) ^ self.head_mask)
        keys.update(map(self.key, range(self.count, self.count + self.opener_cuts)))
        return keys

    def _unit(self, place: int) -> tuple[int, int, int]:
        if not 0 <= place < self.entries:
            raise IndexError(f"no unit is kept at {place}")
        unit: tuple[int, int, int] = _UNIT.unpack_from(self._data, _HEAD_BYTES + place * _UNIT.size)
        return unit


def _last(keys: Sequence[int], key: int, before: int) -> int:
    """Where a key is, nearly always near the end."""
    for at in range(before - 1, -1, -1):
        if keys[at] == key:
            return at
    raise KeyError(key)


class UncompiledLine:
    """What `plane.TokenLine` does, for machines without it: tokens by bytes, between places where both are known."""

    def __init__(self, *places: Place) -> None:
        known = dict([(0, 0), *places])
        self._ends, self._tokens = list(known), list(known.values())

    def at(self, end: int) -> int:
        """No more than are kept."""
        after = min(bisect_left(self._ends, end), len(self._ends) - 1)
        if end >= self._ends[after]:
            return min(self._tokens[after], _MOST)
        start, tokens = self._ends[after - 1], self._tokens[after - 1]
        more = (self._tokens[after] - tokens) * (end - start) // (self._ends[after] - start)
        return max(0, min(tokens + more, _MOST))

    def packed(self, keys: Sequence[int], ends: Sequence[int], places: Sequence[int], turn: int) -> bytes:
        """Units at these places."""
        return b"".join([_packed(keys[at], self.at(ends[at]), turn) for at in places])


if TYPE_CHECKING or not plane.IS_BUILT:
    _Units = UncompiledUnits
    TokenLine = UncompiledLine
else:
    _Units = plane.PackedUnits
    TokenLine = plane.TokenLine


class KeptUnits(_Units):
    """Reads what `pack` has written, behind what the session has learnt.

    Units come first, then cuts, the opener's before those of the newest message.
    """

    __slots__ = ()

    @property
    def reply(self) -> PrefixEnd | None:
        return PrefixEnd(self.key(self.in_prompt)) if self.count > self.in_prompt else None

    def last_cut(self, sizes: dict[int, int], beyond: int) -> Place | None:
        """The last cut that is in a prompt, beyond so many bytes of it."""
        found = [(sizes.get(self.key(place), 0), self.tokens(place)) for place in range(self.count, self.entries)]
        return max((cut for cut in found if cut[0] > beyond), default=None)

    def under(self, head_mask: int) -> KeptUnits:
        """The units as they would be after another head, with the tokens that they have after theirs; without cuts."""
        change = self.head_mask ^ head_mask
        units = [(self.key(at) ^ change, self.tokens(at), self.turn(at)) for at in range(self.count)]
        head = _HEAD.pack(self.round_tokens, self.count, self.in_prompt, self.opener, 0, 0, head_mask, 0)
        return KeptUnits(NOTHING_LEARNT + head + b"".join([_UNIT.pack(*unit) for unit in units]))

    @property
    def cuts_of_opener(self) -> bytes:
        return self.slice(self.count + self.has_reply_alone, self.count + self.opener_cuts)


_EMPTY = _HEAD.pack(0, 0, 0, 0, 0, 0, 0, 0)
NOTHING_LEARNT = LEARNT.pack(0.0, 0, 0)
NO_UNITS_KEPT = KeptUnits(NOTHING_LEARNT)


def pack(before: KeptUnits, shared: int, since: Place, chain: Chain, turn: int, outcome: TurnOutcome) -> bytes:
    """The units of a prompt and its reply. The first `shared` ones of `before` are the same, and stay as they are.

    Without what the session has learnt. since: the last place of the prompt whose tokens were known before.
    """
    prompt_tokens, is_blocks = outcome.prompt_tokens, chain.is_blocks
    if since[1] > prompt_tokens:  # this history is rendered in fewer tokens than it was
        since = 0, 0
    shared, start = before.kept(shared, since, prompt_tokens, chain.keys, chain.ends)
    line = TokenLine(start, since, (chain.size, prompt_tokens))
    places = _new_places(chain, start[0])
    units = before.slice(0, shared) + line.packed(chain.keys, chain.ends, places, turn)
    if before.count and not shared:
        units = _with_turns(units, before)
    if len(units) > _MOST_BYTES:
        every = [units[at : at + _UNIT.size] for at in range(0, len(units), _UNIT.size)]
        units = b"".join([every[place] for place in _thinned([_UNIT.unpack(one)[1] for one in every])])
    in_prompt = count = len(units) // _UNIT.size
    if outcome.reply_key is not None and in_prompt and not is_blocks:
        units += _packed(outcome.reply_key.key, prompt_tokens + outcome.completion_tokens, turn + 1)
        count += 1
    opener_cuts, newest = _cuts(chain, line, turn)
    if before.opener < shared:
        opener = before.opener
        if before.opener_cuts:
            opener_cuts = before.cuts_of_opener or opener_cuts
    else:
        opener = max(0, min(shared + _opener(chain, places), in_prompt - 1))
    head_tokens = before.head_tokens if shared else line.at(chain.ends[chain.marks.head])
    if outcome.reply_alone:
        opener_cuts = _packed(outcome.reply_alone, head_tokens, turn) + opener_cuts
    round_tokens, reasoned = _round(before, since, chain, outcome, line)
    flags = reasoned * _REASONED | is_blocks * _BLOCKS | outcome.reasoned * _REPLY_REASONED
    flags |= (outcome.reply_alone > 0) * _REPLY_ALONE
    cuts = len(opener_cuts) // _UNIT.size
    head = _HEAD.pack(min(round_tokens, _MOST), count, in_prompt, opener, cuts, flags, chain.head_mask, head_tokens)
    return b"".join((head, units, opener_cuts, newest))


def _packed(key: int, tokens: int, turn: int) -> bytes:
    return _UNIT.pack(key, tokens if tokens < _MOST else _MOST, turn if turn < _MOST_TURNS else _MOST_TURNS)


def _new_places(chain: Chain, beyond: int) -> Sequence[int]:
    """Which keys of a prompt are kept, beyond so many bytes of it."""
    ends = chain.ends
    if chain.is_blocks:
        return [place for place in kept_blocks(ends) if ends[place] > beyond]
    start, head = bisect_right(ends, beyond), chain.marks.head
    if head and start <= head:
        start = head + 1
    if len(ends) - start <= KEPT:  # nearly always
        return range(start, len(ends))
    return [start + place for place in _thinned(ends[start:])]  # thinned, if it is a history that nobody has seen grow


def _with_turns(units: bytes, before: KeptUnits) -> bytes:
    """The units, each with the turn that it has in `before`, which knew other tokens."""
    turns = {before.key(place): before.turn(place) for place in range(before.count)}
    return b"".join([_UNIT.pack(key, tokens, turns.get(key, turn)) for key, tokens, turn in _UNIT.iter_unpack(units)])


def _thinned(ends: Sequence[int]) -> Sequence[int]:
    """Which units stay: gaps in the middle grow with the distance to the nearer end of the history."""
    if len(ends) <= KEPT:
        return range(len(ends))
    for share in (8, 4, 2, 1):
        at = len(ends) - _NEWEST
        kept = [*range(len(ends) - 1, at - 1, -1)]
        while True:
            end = ends[at]
            at = min(at - 1, bisect_left(ends, end - min(end - ends[0], ends[-1] - end) // share))
            if at < _FIRST:
                break
            kept.append(at)
        if len(kept) + _FIRST <= KEPT:
            break
    return [*range(_FIRST), *reversed(kept)]


def _opener(chain: Chain, places: Sequence[int]) -> int:
    """Which of these places is the opener's: of a raw prompt the last, as it is one text."""
    if chain.is_blocks:
        return len(places) - 1
    first_user = chain.marks.first_user
    return places.index(first_user) if first_user and first_user in places else 0


def _cuts(chain: Chain, line: TokenLine, turn: int) -> tuple[bytes, bytes]:
    """The cuts that were made of the opener, fine ones excepted, and those of the newest message."""
    known = () if chain.long_texts is None else chain.long_texts.known
    if not known:
        return b"", b""
    ends, marks = chain.ends, chain.marks
    opener = marks.first_user or min(marks.head + 1 if marks.head else bisect_right(ends, 0), len(ends) - 1)
    keys, sizes = [key for key, _ in known], [size for _, size in known]
    long = bisect_left(sizes, (ends[opener - 1] if opener else 0) + UNIT_OVERHEAD_BYTES + LONG_BYTES)
    in_opener = range(long, bisect_right(sizes, ends[opener]))
    newest = bisect_right(sizes, ends[-2] if len(ends) > 1 else 0)
    in_newest = range(newest, len(sizes) if opener < len(ends) - 1 else long)
    return line.packed(keys, sizes, in_opener, turn), line.packed(keys, sizes, in_newest, turn)


def _round(before: KeptUnits, since: Place, chain: Chain, outcome: TurnOutcome, line: TokenLine) -> tuple[int, bool]:
    """Tokens up to the newest message by the user, and whether a reply since then was reasoned."""
    last_user = chain.marks.last_user
    if not last_user:
        return 0, False
    if last_user == len(chain.keys) - 1:
        return outcome.prompt_tokens, outcome.reasoned
    if before.round_tokens and chain.ends[last_user] <= since[0]:
        return before.round_tokens, before.reasoned or outcome.reasoned
    return line.at(chain.ends[last_user]), outcome.reasoned
