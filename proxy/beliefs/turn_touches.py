"""What one attempt at a turn tells the books of its workers, as its legs go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec
from msgspec.structs import replace

from ..fleet.worker import WorkerId
from .beliefs import Beliefs
from .held import BeliefEvidence, CacheFound, Held, LegOutcome, PromptEntry, SentLeg

_MOST_TOKENS = 1 << 40  # above any context; an engine may report any integer


class TurnCaches(msgspec.Struct, frozen=True):
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


class TurnTouches:
    """Touches the prompt's entries, and compares what answers say with what was believed at the decision.

    Each call states what has happened; `close` may come at any time, and twice.
    """

    __slots__ = (
        "_awaited",
        "_beliefs",
        "_decode",
        "_entry",
        "_held",
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
        self._held = held
        self._decode = caches.decode
        self._prefill = caches.prefill
        self._prompt_tokens = prompt_tokens
        computing, source = caches.prefill or caches.decode, caches.source
        self._source = None if source not in held or source == computing else source
        self._reach_tokens = 0 if self._source is None else min(caches.reach_tokens, held[self._source].tokens)
        self._since: dict[WorkerId, int] = {}  # tokens that each worker had used since it used the prefix
        self._awaited: dict[WorkerId, int] = {}  # the legs on those that have not used it yet

    def sent(self) -> None:
        """To its first worker: turns that are sent there later find the cache as this one will leave it."""
        self._expect(self._decode if self._prefill is None else self._prefill)
        if self._source is not None:
            self._lend(self._source)

    def prefilled(self, cached: int | None) -> None:
        """The prompt's KV is on P, which had found so many of its tokens cached; None: P does not say.

        As after a handoff, what was fetched counts as cached.
        """
        assert self._prefill is not None, "only a SPLIT has a P"
        self._found(self._prefill, cached)
        self._touch(self._prefill)
        if self._decode not in self._since:  # else it answers already: both legs ran at once
            self._expect(self._decode)

    def answering(self) -> None:
        """The prompt's KV is on the answering worker from here on, whatever becomes of its answer."""
        self._touch(self._decode)

    def answered(self, cached: int | None) -> None:
        """So many of the prompt's tokens had been cached on the answering worker; after a handoff it cannot say.

        Before `close`, which else takes it that a source was not read.
        """
        if self._prefill is None:
            self._found(self._decode, cached)

    def close(self) -> None:
        """Workers that have not got so far will not."""
        while self._awaited:
            _, leg = self._awaited.popitem()
            self._beliefs.ended_leg(LegOutcome(leg, has_used=False))

    def _expect(self, worker: WorkerId) -> None:
        entry, number = self._entry, next(self._beliefs.leg_numbers)
        opens = entry.source is None and worker == self._decode
        branch = (None, 0) if entry.source == entry.history else (entry.source, entry.shared)
        leg = SentLeg(number, worker, entry.history, self._prompt_tokens, entry.marks, entry.points, opens, *branch)
        self._since[worker] = self._beliefs.sent(leg)
        self._awaited[worker] = number

    def _lend(self, source: WorkerId) -> None:
        entry, number = self._entry, next(self._beliefs.leg_numbers)
        history = entry.history if entry.source is None else entry.source
        leg = SentLeg(number, source, history, self._held[source].tokens, entry.marks)
        self._since[source] = self._beliefs.sent(leg)
        self._awaited[source] = number

    def _found(self, worker: WorkerId, cached: int | None) -> None:
        """By the worker that computed the prompt. If it fetched, that says what the source still held."""
        if self._source is None:
            self._compare(worker, cached, self._held.get(worker))
            return
        held = self._held[self._source]
        self._compare(self._source, cached, replace(held, tokens=self._reach_tokens))
        if leg := self._awaited.pop(self._source, None):
            was_read = cached is None or 2 * cached >= self._reach_tokens  # if so, it is the newest there
            self._beliefs.ended_leg(LegOutcome(leg, has_used=was_read))
        self._source = None

    def _touch(self, worker: WorkerId) -> None:
        if worker not in self._awaited:  # P has computed nothing for it
            self._expect(worker)
        self._beliefs.ended_leg(LegOutcome(self._awaited.pop(worker), has_used=True))

    def _compare(self, worker: WorkerId, cached: int | None, held: Held | None) -> None:
        where = None if held is None else self._beliefs.residency(worker, held.tokens)
        if cached is not None and where is not None and held is not None and held.evidence is BeliefEvidence.OWN_TURNS:
            cached = min(cached, held.tokens if worker == self._source else _MOST_TOKENS)
            self._beliefs.found(CacheFound(where, self._since.get(worker, 0), cached))
