"""The load ledger: what turns do on each worker, by this proxy's own books.

Each process keeps one `Use` for each worker and hears of the others'; a worker's view shows their sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .worker import WorkerId


@dataclass(slots=True)
class Use:
    """What one process does on one worker. The view is updated when it is read, not at each step of a turn."""

    inflight: int = 0
    queued_prefill_tokens: int = 0
    placed_tokens: int = 0  # of KV that turns brought to a D or R since it last reported its load
    answers: int = 0  # seconds in which the worker sent some of an answer
    recent_tokens: int = 0  # of KV that turns brought there, the older ones counting ever less
    halvings: int = 0  # of recent tokens, since the first process began


RECENT_TOKENS = 1 << 19
"""For each worker: when turns have brought as many, what they brought until then counts by half. Some caches full."""


class Uses:
    """Of all workers and processes.

    A process halves what turns of all of them brought lately. Each tells how often it has, and the others follow, so
    that older tokens count as little as if one process had all turns.
    """

    def __init__(self) -> None:
        self.own: dict[WorkerId, Use] = {}
        self.others: dict[WorkerId, dict[int, Use]] = {}  # by process
        self._recent_tokens = 0  # of all workers, by all processes
        self._halvings = 0

    def joined(self, worker_id: WorkerId) -> Use:
        return self.own.setdefault(worker_id, Use(halvings=self._halvings))

    def drop(self, worker_id: WorkerId) -> None:
        self._recent_tokens -= sum(use.recent_tokens for use in self.of(worker_id))
        self.own.pop(worker_id, None)
        self.others.pop(worker_id, None)

    def of(self, worker_id: WorkerId) -> Iterator[Use]:
        if worker_id in self.own:
            yield self.own[worker_id]
        yield from self.others.get(worker_id, {}).values()

    def placed(self, use: Use, tokens: int) -> bool:
        """Counts what a turn brings. True where all counts were halved by that."""
        use.recent_tokens += tokens
        self._recent_tokens += tokens
        if self._recent_tokens <= RECENT_TOKENS * len(self.own):
            return False
        self._halve(1)
        return True

    def heard(self, process: int, worker_id: WorkerId, use: Use) -> bool:
        """Another process's use. True where all counts were halved by that."""
        behind = use.halvings - self._halvings
        if behind > 0:
            self._halve(behind)
        elif behind < 0:
            use.recent_tokens >>= -behind
            use.halvings = self._halvings
        uses = self.others.setdefault(worker_id, {})
        known = uses.get(process)
        self._recent_tokens += use.recent_tokens - (0 if known is None else known.recent_tokens)
        uses[process] = use
        return behind > 0

    def ended(self, process: int) -> list[WorkerId]:
        """Forgets what the process does. Where it did anything."""
        touched = [worker_id for worker_id, uses in self.others.items() if process in uses]
        for worker_id in touched:
            uses = self.others[worker_id]
            known = uses[process]
            uses[process] = Use(answers=known.answers)
            self._recent_tokens -= known.recent_tokens
        return touched

    def _halve(self, times: int) -> None:
        self._halvings += times
        self._recent_tokens = 0
        for worker_id in self.own.keys() | self.others.keys():
            for use in self.of(worker_id):
                use.recent_tokens >>= times
                use.halvings = self._halvings
                self._recent_tokens += use.recent_tokens
