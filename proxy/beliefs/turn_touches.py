# cython: language_level=3, annotation_typing=False, infer_types=True
"""What one attempt at a turn tells the books of its workers, as its legs go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from ..fleet.worker import WorkerId
from .beliefs import Beliefs
from .held import BeliefEvidence, CacheFound, Held, LegOutcome, PromptEntry, SentLeg

_MOST_TOKENS = 1 << 40  # above any context; an engine may report any integer
_OWN_TURNS = BeliefEvidence.OWN_TURNS  # an enum's members take long
NONE_HELD: Mapping[WorkerId, Held] = {}
"""Of a turn whose answer says nothing of caches."""


class TurnCaches(msgspec.Struct, frozen=True, gc=False):
    """The workers whose caches a turn uses."""

    decode: WorkerId  # or R
    prefill: WorkerId | None = None
    source: WorkerId | None = None  # from which whoever computes the prompt fetches its start
    reach_tokens: int = 0  # of the prompt, that it then has


class Touches(Protocol):
    """What an attempt tells of itself; see `TurnTouches`."""

    def sent(self) -> None: ...

    def prefilled(self, cached: int | None) -> None: ...

    def answering(self) -> None: ...

    def answered(self, cached: int | None) -> None: ...

    def close(self) -> None: ...

    def settled(self) -> Touches:
        """What tells the rest, once the answer has begun."""


class NoTouches(msgspec.Struct, gc=False):
    """Of an attempt that has nothing to tell, or nothing more."""

    def sent(self) -> None: ...

    def prefilled(self, cached: int | None) -> None: ...

    def answering(self) -> None: ...

    def answered(self, cached: int | None) -> None: ...

    def close(self) -> None: ...

    def settled(self) -> Touches:
        return self


NO_TOUCHES = NoTouches()


class LateTouches(NoTouches, gc=False):
    """Of an attempt whose answer has begun: its end may say how much of the prompt its worker had cached."""

    beliefs: Beliefs
    worker: WorkerId
    history: int
    held_tokens: int  # as the decision saw it, by turns of this history
    since: int  # see `CacheFound`

    def answered(self, cached: int | None) -> None:
        if cached is not None and (where := self.beliefs.residency(self.worker, self.held_tokens)) is not None:
            self.beliefs.found(CacheFound(self.history, where, self.since, min(cached, _MOST_TOKENS)))


class TurnTouches:
    """Touches the prompt's entries, and compares what answers say with what was believed at the decision.

    Each call states what has happened; `close` may come at any time, and twice.
    """

    __slots__ = (
        "_beliefs",
        "_decode",
        "_entry",
        "_held",
        "_is_on_decode",
        "_legs",
        "_prefill",
        "_prompt_tokens",
        "_reach_tokens",
        "_since",
        "_source",
    )

    def __init__(
        self,
        beliefs: Beliefs,
        entry: PromptEntry,
        held: Mapping[WorkerId, Held],
        prompt_tokens: int,
        caches: TurnCaches,
    ) -> None:
        """held: as the decision saw it; prompt_tokens: an estimate."""
        self._beliefs = beliefs
        self._entry = entry
        self._held = held or NONE_HELD
        self._decode = caches.decode
        self._prefill = caches.prefill
        self._prompt_tokens = prompt_tokens
        self._legs: dict[WorkerId, int] = {}  # on workers that have not used the prefix yet
        self._since = 0  # tokens that were used since the prefix was, on the worker of which the answer tells
        self._source: WorkerId | None = None
        self._reach_tokens = 0
        self._is_on_decode = False  # a leg is, or was
        source = caches.source
        if source is not None and source in held and source != (caches.prefill or caches.decode):
            self._source, self._reach_tokens = source, min(caches.reach_tokens, held[source].tokens)
            self._is_on_decode = source == caches.decode

    def sent(self) -> None:
        """To its first worker: turns that are sent there later find the cache as this one will leave it."""
        self._since = self._expect(self._decode if self._prefill is None else self._prefill)
        if self._source is not None:
            self._since = self._lend(self._source)

    def prefilled(self, cached: int | None) -> None:
        """The prompt's KV is on P, which had found so many of its tokens cached; None: P does not say.

        As after a handoff, what was fetched counts as cached.
        """
        assert self._prefill is not None, "only a SPLIT has a P"
        self._found(self._prefill, cached)
        self._touch(self._prefill)
        if not self._is_on_decode:  # else it answers already: both legs ran at once
            self._is_on_decode = True
            self._expect(self._decode)

    def answering(self) -> None:
        """The prompt's KV is on the answering worker from here on, whatever becomes of its answer."""
        self._is_on_decode = True
        self._touch(self._decode)

    def settled(self) -> Touches:
        if self._legs:  # P's is under way, or a source's
            return self
        held, entry = self._held.get(self._decode), self._entry
        if self._prefill is not None or held is None or held.evidence is not _OWN_TURNS:
            return NO_TOUCHES
        return LateTouches(self._beliefs, self._decode, entry.source or entry.history, held.tokens, self._since)

    def answered(self, cached: int | None) -> None:
        """So many of the prompt's tokens had been cached on the answering worker; after a handoff it cannot say.

        Before `close`, which else takes it that a source was not read.
        """
        if self._prefill is None:
            self._found(self._decode, cached)

    def close(self) -> None:
        """Workers that have not got so far will not."""
        while self._legs:
            _, leg = self._legs.popitem()
            self._beliefs.ended_leg(LegOutcome(leg, has_used=False))

    def _expect(self, worker: WorkerId) -> int:
        """See `Beliefs.sent`."""
        entry, number = self._entry, next(self._beliefs.leg_numbers)
        history, source, tokens = entry.history, entry.source, self._prompt_tokens
        if source == history:
            leg = SentLeg(number, worker, history, tokens, entry.marks, entry.points)
        else:
            opens = source is None and worker == self._decode
            leg = SentLeg(number, worker, history, tokens, entry.marks, entry.points, opens, source, entry.shared)
        self._legs[worker] = number
        return self._beliefs.sent(leg)

    def _lend(self, source: WorkerId) -> int:
        entry, number = self._entry, next(self._beliefs.leg_numbers)
        history = entry.history if entry.source is None else entry.source
        leg = SentLeg(number, source, history, self._held[source].tokens, entry.marks)
        self._legs[source] = number
        return self._beliefs.sent(leg)

    def _found(self, worker: WorkerId, cached: int | None) -> None:
        """By the worker that computed the prompt. If it fetched, that says what the source still held."""
        source = self._source
        if source is None:
            if cached is not None and (held := self._held.get(worker)) is not None:
                self._compare(worker, held.tokens, min(cached, _MOST_TOKENS), held.evidence)
            return
        reach = self._reach_tokens
        if cached is not None:
            self._compare(source, reach, min(cached, reach), self._held[source].evidence)
        leg = self._legs.pop(source, None)
        if leg is not None:
            was_read = cached is None or 2 * cached >= reach  # if so, it is the newest there
            self._beliefs.ended_leg(LegOutcome(leg, has_used=was_read))

    def _touch(self, worker: WorkerId) -> None:
        if worker not in self._legs:  # P has computed nothing for it
            self._expect(worker)
        self._beliefs.ended_leg(LegOutcome(self._legs.pop(worker), has_used=True))

    def _compare(self, worker: WorkerId, held: int, cached: int, evidence: BeliefEvidence) -> None:
        if evidence is _OWN_TURNS and (where := self._beliefs.residency(worker, held)) is not None:
            entry = self._entry
            self._beliefs.found(CacheFound(entry.source or entry.history, where, self._since, cached))
