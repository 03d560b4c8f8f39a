"""Which blocks one engine's prefix cache holds, and how far each session's prompt reaches unbroken from its start.

Chains of blocks are kept as *runs*, which split only where prompts part: a radix tree. A run knows how many of its
first blocks are there, so the answer for a session takes one step a fork, however long its prompt is. What is removed
keeps its place until a sweep, because a prompt that loses its tail still holds its head.

Where events' tokens are read, a run has the tokens of its first blocks too, and each branch is found by its first
block's. So a prompt of no session is found as well, by comparing its tokens with those of the runs on its way.

That a block was stored proves that all blocks before it are there, as the request uses them. That counts where engines
hold one block twice, of two requests that computed it at once: they announce the removal of each copy.

Only evidence is kept. What follows a block that is not known, or contradicts the tree, is passed over.
"""

from __future__ import annotations

from array import array

import msgspec

from .block_tokens import TOKEN_BYTES, BlockTokens
from .event_batch import CacheChange, Cleared, Removed, Stored

BLOCKS_LIMIT = 4_000_000  # that are there; twice as many with those that are gone
TOKENS_LIMIT = 1 << 27  # whose ids are kept; 16 of each of them
SESSIONS_LIMIT = 200_000
SWEEP_SLACK = 4096
PLACE_BITS = 32
_POSITION = (1 << PLACE_BITS) - 1
_DEPTH_BITS = 2 * PLACE_BITS
_PLACE = (1 << _DEPTH_BITS) - 1
_NO_RUN = 0
_NO_BRANCH = 0
_ADAPTERS_LIMIT = 4096
FORKS_LIMIT = 512
"""Of one prompt: each takes up to a microsecond for each event and each look. Blocks beyond are passed over."""
_MOST_BITS = _DEPTH_BITS + PLACE_BITS
_NOTHING = (_POSITION << _MOST_BITS) | (_POSITION << _DEPTH_BITS)  # of a session that lost all, and all was told


class Run(msgspec.Struct, gc=False):
    """Blocks of which each follows the one before. By number, not by reference, so that no cycle is to be collected."""

    number: int
    parent: int  # the run that it branches off, or _NO_RUN
    offset: int  # how many blocks of the parent come before it
    hashes: array[int]
    unbroken: int = 0  # how many of its first blocks are there
    tokens: bytearray = msgspec.field(default_factory=bytearray)  # of its first blocks, as far as they are known
    branch: int = _NO_BRANCH  # its key among the branches
    forks: int = 0  # runs before it


class BlockIndex:
    def __init__(
        self,
        blocks_limit: int = BLOCKS_LIMIT,
        sessions_limit: int = SESSIONS_LIMIT,
        sweep_slack: int = SWEEP_SLACK,
        tokens_limit: int = TOKENS_LIMIT,
    ) -> None:
        self.is_whole = False  # it has heard of all blocks: what it does not know is not there
        self._sweep_slack = sweep_slack
        self._blocks_limit = blocks_limit
        self._bytes_limit = TOKEN_BYTES * tokens_limit
        self._sessions_limit = sessions_limit
        self.adapters: set[str] = set()  # whose blocks it has heard of, as far as events' tokens are read
        self.is_full = False  # more than it may keep: it knows nothing until it is cleared
        # To the place after its newest last block, that one's depth in blocks, and the most of all; oldest news first.
        self._sessions: dict[int, int] = {}
        self._empty()

    def __len__(self) -> int:
        """Blocks that are there."""
        return len(self._places) - len(self._gone)

    @property
    def block_tokens(self) -> int:
        """0: not known yet."""
        return self._block_tokens

    @property
    def slots(self) -> int:
        """Blocks that it remembers, with those that are gone."""
        return sum(len(run.hashes) for run in self._runs.values())

    def held(self, session: int) -> int | None:
        """Tokens of the session's prompt that are there, from its start; None if nothing was heard of the session."""
        known = self._sessions.get(session)
        if known is None or self.is_full:
            return None
        place = known & _PLACE
        number, held = place >> PLACE_BITS, place & _POSITION
        if number == _NO_RUN:
            return 0
        run = self._runs[number]
        held = min(held, run.unbroken)
        while run.parent != _NO_RUN:
            parent = self._runs[run.parent]
            held = run.offset + held if parent.unbroken >= run.offset else parent.unbroken
            run = parent
        return held * self._block_tokens

    def held_of(self, tokens: bytes, scope: str) -> int | None:
        """How many tokens of any prompt are there, at least; None if that is not known. See `block_tokens`."""
        if self.is_full:
            return None
        width = self._block_tokens * TOKEN_BYTES
        blocks, place, at = len(tokens) // width if width else 0, _NO_RUN, 0
        for _ in range(FORKS_LIMIT):
            if at == blocks:
                break
            number = self._branches.get(_branch_key(place, scope, tokens[at * width : (at + 1) * width]), _NO_RUN)
            run = self._runs.get(number)
            if run is None or (run.parent << PLACE_BITS) + run.offset != place:
                break
            same = _common_blocks(run.tokens, tokens, at * width, width)
            at += min(same, run.unbroken)
            if not same or same > run.unbroken:
                break
            place = (number << PLACE_BITS) + same
        return at * self._block_tokens

    def has_told(self, session: int, tokens: int, *, of_newest: bool = False) -> bool:
        """Whether so many tokens of a prompt of the session were stored, as events told; they may be gone since.

        of_newest: of the one that was told last. Several prompts go on from one session where they come at once.
        A sequence's last block may stay unannounced: the newest token has no KV yet, and lookahead takes more.
        """
        known = self._sessions.get(session)
        if known is None or known == _NOTHING:
            return known is not None
        depth = known >> _DEPTH_BITS & _POSITION if of_newest else known >> _MOST_BITS
        return (depth + 2) * self._block_tokens >= tokens

    def apply(self, change: CacheChange) -> str | None:
        """Why the change was passed over, if it was."""
        if isinstance(change, Cleared):
            self.clear()
            return None
        if self.is_full:
            return "full"
        if isinstance(change, Removed):
            return self._remove(change)
        reason = self._store(change)
        places = len(self._places)
        is_beyond = places - len(self._gone) > self._blocks_limit or places > 2 * self._blocks_limit
        if is_beyond or self._token_bytes > self._bytes_limit:
            self.forget()
            self.is_full = True
        elif len(self._gone) + len(self._runs) + len(self._sessions) > self._sweep_at:
            self._sweep()
        return reason

    def clear(self) -> None:
        """Nothing is there: each session that is known holds nothing."""
        self._empty()
        self.is_full, self.is_whole = False, True
        self._sessions = dict.fromkeys(self._sessions, _NOTHING)

    def forget(self) -> None:
        """Nothing is known."""
        self._empty()
        self.is_full = self.is_whole = False
        self._sessions.clear()

    def _empty(self) -> None:
        self._runs: dict[int, Run] = {}
        self._places: dict[int, int] = {}  # of each block that has one: its run's number, and its position there
        self._gone: set[int] = set()  # those of them that are not there
        self._branches: dict[int, int] = {}  # by place and first block, the run that begins there
        self._numbers = _NO_RUN
        self._token_bytes = 0  # of all runs
        self._block_tokens = 0  # 0: not known yet
        self._group = 0
        self._sweep_at = self._sweep_slack

    # -- changes

    def _remove(self, removed: Removed) -> str | None:
        if removed.group != self._group:
            return "other_group"
        for block in removed.hashes:
            place = self._places.get(block)
            if place is not None and block not in self._gone:
                self._gone.add(block)
                run = self._runs[place >> PLACE_BITS]
                run.unbroken = min(run.unbroken, place & _POSITION)
        return None

    def _store(self, stored: Stored) -> str | None:
        if not stored.hashes:
            return None
        if not self._block_tokens:
            self._block_tokens, self._group = stored.block_tokens, stored.group
        if stored.group != self._group:
            return "other_group"
        if stored.block_tokens != self._block_tokens:
            return "partial_block"
        end = self._end(stored)
        if stored.session is not None:
            if isinstance(end, int):
                self._name(stored.session, end)
            else:
                self._sessions.pop(stored.session, None)  # its newest prompt is another one than what was told before
        return None if isinstance(end, int) else end

    def _end(self, stored: Stored) -> int | str:
        """The place after these blocks; or why there is none."""
        if stored.parent is None:
            return self._follow(_NO_RUN, stored)
        parent = self._places.get(stored.parent)
        if parent is None:
            return "unknown_parent"
        self._heal(parent + 1)
        return self._follow(parent + 1, stored)

    def _heal(self, place: int) -> None:
        """All blocks before this place are there."""
        number, upto = place >> PLACE_BITS, place & _POSITION
        while number != _NO_RUN:
            run = self._runs[number]
            if run.unbroken < upto:
                self._gone.difference_update(run.hashes[run.unbroken : upto])
                run.unbroken = upto
                while run.unbroken < len(run.hashes) and run.hashes[run.unbroken] not in self._gone:
                    run.unbroken += 1
            number, upto = run.parent, run.offset

    def _follow(self, place: int, stored: Stored) -> int | str:
        """The place after these blocks, which begin at `place`; or why there is none."""
        hashes, at = stored.hashes, 0
        while hashes:
            run, position = self._runs.get(place >> PLACE_BITS), place & _POSITION
            if run is not None and position < len(run.hashes) and run.hashes[position] == hashes[0]:
                known = _common(run.hashes[position : position + len(hashes)], hashes)
                place += known
                self._heal(place)
            elif (other := self._places.get(hashes[0])) is not None:  # where another prompt went on from here
                branch = self._runs[other >> PLACE_BITS]
                if other & _POSITION or (branch.parent << PLACE_BITS) + branch.offset != place:
                    return "contradiction"
                place, known = other, 0
            else:
                if run is not None and run.forks == FORKS_LIMIT and position < len(run.hashes):
                    return "forks"
                known = self._unknown(hashes)
                start, place = place, self._extend(place, hashes[:known])
                if stored.tokens is not None:
                    tokens = stored.tokens.read(len(stored.hashes), opens=stored.parent is None)
                    self._note_tokens(start, place, tokens, at)
            hashes, at = hashes[known:], at + known
        return place

    def _unknown(self, hashes: array[int]) -> int:
        """How many of them, from the first, have no place, nor are named before."""
        seen = set(hashes)
        if len(seen) == len(hashes) and self._places.keys().isdisjoint(seen):
            return len(hashes)
        seen, count = set(), 0
        while (block := hashes[count]) not in self._places and block not in seen:
            seen.add(block)
            count += 1
        return count

    def _extend(self, place: int, hashes: array[int]) -> int:
        """Adds blocks that have no place yet after `place`: to its run where that ends there, else as a branch."""
        run, position = self._runs.get(place >> PLACE_BITS), place & _POSITION
        if run is None or position < len(run.hashes):
            self._numbers += 1
            forks = 0 if run is None else run.forks + 1
            run = Run(self._numbers, place >> PLACE_BITS, position, array("Q"), forks=forks)
            self._runs[run.number] = run
        start = (run.number << PLACE_BITS) + len(run.hashes)
        self._places.update(zip(hashes, range(start, start + len(hashes)), strict=True))
        if run.unbroken == len(run.hashes):
            run.unbroken += len(hashes)
        run.hashes.extend(hashes)
        return start + len(hashes)

    def _note_tokens(self, before: int, place: int, tokens: BlockTokens, at: int) -> None:
        """The blocks from `before` to `place` are new, and the event's from its `at`-th on."""
        run, end = self._runs[place >> PLACE_BITS], place & _POSITION
        width = self._block_tokens * TOKEN_BYTES
        first = 0 if before >> PLACE_BITS != run.number else before & _POSITION
        ids = tokens.ids[at * width : (at + end - first) * width]
        if not ids or len(run.tokens) != first * width:
            return  # what comes before them in the run is known by hashes alone
        if not first:
            self._note_adapter(tokens.adapter)
            run.branch = _branch_key(before, tokens.scope, ids[:width])
            self._branches[run.branch] = run.number
        run.tokens += ids
        self._token_bytes += len(ids)

    def _note_adapter(self, name: str) -> None:
        if name and len(self.adapters) < _ADAPTERS_LIMIT:
            self.adapters.add(name)

    def _name(self, session: int, place: int) -> None:
        known, depth = self._sessions.pop(session, 0), self._depth(place)
        most = depth if known == _NOTHING else max(depth, known >> _MOST_BITS)
        self._sessions[session] = most << _MOST_BITS | depth << _DEPTH_BITS | place
        if len(self._sessions) > self._sessions_limit:
            del self._sessions[next(iter(self._sessions))]

    def _depth(self, place: int) -> int:
        """Blocks from a prompt's start up to this place."""
        depth = place & _POSITION
        run = self._runs.get(place >> PLACE_BITS)
        while run is not None:
            depth += run.offset
            run = self._runs.get(run.parent)
        return depth

    # -- sweeping

    def _sweep(self) -> None:
        """Forgets the tails of runs that are not there. Children have higher numbers, so they go first."""
        needed = dict[int, int]()  # by run, up to where its children need it
        moved = dict[int, int]()  # by run that is dropped, the place that it branched off
        for number in reversed(self._runs):
            run = self._runs[number]
            self._trim(run, needed.get(number, 0))
            if run.hashes:
                needed[run.parent] = max(needed.get(run.parent, 0), run.offset)
            else:
                moved[number] = (run.parent << PLACE_BITS) + run.offset
        for number in moved:
            run = self._runs.pop(number)
            if self._branches.get(run.branch) == number:
                del self._branches[run.branch]
        for session, last in self._sessions.items():
            place = last & _PLACE
            while place >> PLACE_BITS in moved:
                place = moved[place >> PLACE_BITS]
            if (last_run := self._runs.get(place >> PLACE_BITS)) is not None:
                place = min(place, (last_run.number << PLACE_BITS) + len(last_run.hashes))
            self._sessions[session] = (last & ~_PLACE) | place
        self._sweep_at = self._sweep_slack + 2 * (len(self._gone) + len(self._runs) + len(self._sessions))

    def _trim(self, run: Run, least: int) -> None:
        length = len(run.hashes)
        while length > least and run.hashes[length - 1] in self._gone:
            length -= 1
        for block in run.hashes[length:]:
            self._places.pop(block, None)
            self._gone.discard(block)
        del run.hashes[length:]
        self._token_bytes -= len(run.tokens)
        del run.tokens[length * self._block_tokens * TOKEN_BYTES :]
        self._token_bytes += len(run.tokens)


def _branch_key(place: int, scope: str, block: bytes) -> int:
    """scope: of the first blocks of prompts; all that follow them are in it too."""
    return hash((place, block) if place else (scope, block))


def _common_blocks(run: bytearray, tokens: bytes, at: int, width: int) -> int:
    """How many blocks of a run are those of a prompt from its byte `at` on."""
    if tokens.startswith(run, at):
        return len(run) // width
    low, high = 0, len(run) // width  # it parts after `low`, and not after more than `high`
    while low < high:
        middle = (low + high + 1) // 2
        if run[low * width : middle * width] == tokens[at + low * width : at + middle * width]:
            low = middle
        else:
            high = middle - 1
    return low


def _common(some: array[int], others: array[int]) -> int:
    """How many of their first members are the same."""
    if len(some) <= len(others) and some == others[: len(some)]:
        return len(some)
    return next(count for count, (one, other) in enumerate(zip(some, others, strict=False)) if one != other)
