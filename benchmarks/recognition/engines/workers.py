"""Workers in virtual time: a queue of prompts, a block cache, and answers at a steady speed.

A worker computes one prompt after the other, in the order in which they came, and decodes any number of sequences at
once. A prompt waits until its blocks and those of its answer find room among the running sequences', as in an engine.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from ppd.proxy.fleet.worker import Load, Role

from .block_cache import BLOCK_TOKENS, BlockCache, Lease
from .kv_events import EventPublisher, EventSetup

PREFILL_TOKENS_PER_S = 20_000.0
TOKEN_S = 0.015


class VirtualTime:
    """What happens at which second; things of one moment happen in the order in which they were put."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._numbers = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, delay_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), happen))

    def run(self) -> None:
        while self._events:
            self.now_s, _, happen = heapq.heappop(self._events)
            happen()


@dataclass(slots=True, kw_only=True)
class Job:
    """One sequence on one worker."""

    keys: Sequence[int]  # of the full blocks of the prompt
    whole: Sequence[int]  # the same, with the answer's
    prompt_tokens: int
    output_tokens: int
    is_pulled: bool = False  # the prompt's KV comes from a P
    session: str | None = None  # as the request names it
    began: Callable[[int], None] = lambda cached: None  # the prompt is computed; it had found so many tokens
    ended: Callable[[], None] = lambda: None
    lease: Lease = field(default_factory=Lease)
    found: int = 0  # blocks


class TimedWorker:
    def __init__(
        self, name: str, role: Role, capacity_tokens: int, time: VirtualTime, events: EventSetup | None = None
    ) -> None:
        """events: None: it publishes none."""
        self.name = name
        self.role = role
        self.events = None if events is None else EventPublisher(events, time)
        self.cache = BlockCache(capacity_tokens, self.events)
        self.capacity_tokens = capacity_tokens
        self.computed_tokens = 0
        self.answers = 0
        self._time = time
        self._waiting: deque[Job] = deque()
        self._running = 0
        self._is_computing = False

    @property
    def load(self) -> Load:
        return Load(self._running, len(self._waiting), self.cache.usage, self.capacity_tokens)

    @property
    def queued_tokens(self) -> int:
        """At most; what is found in the cache is known when a prompt begins."""
        return sum(job.prompt_tokens for job in self._waiting)

    def ask(self, job: Job) -> None:
        self._waiting.append(job)
        self._pump()

    def held(self, keys: Sequence[int], prompt_tokens: int) -> int:
        """Tokens of the prompt that an engine would find cached: at least the last one is computed."""
        return self.cache.holds(keys[: (prompt_tokens - 1) // BLOCK_TOKENS]) * BLOCK_TOKENS

    def _pump(self) -> None:
        while self._waiting and not self._is_computing:
            job = self._waiting[0]
            findable = job.keys[: (job.prompt_tokens - 1) // BLOCK_TOKENS]
            blocks = -(-(job.prompt_tokens + job.output_tokens) // BLOCK_TOKENS)
            taken = self.cache.take(findable, blocks, job.session)
            if taken is None:
                if not self._running:
                    raise ValueError(f"a prompt of {job.prompt_tokens} tokens does not fit into {self.name}")
                return
            self._waiting.popleft()
            self._running += 1
            job.lease, job.found = taken
            self._begin(job)

    def _begin(self, job: Job) -> None:
        if job.is_pulled:
            self._answer(job)
            return
        new_tokens = job.prompt_tokens - job.found * BLOCK_TOKENS
        self.computed_tokens += new_tokens
        self._is_computing = True

        def computed() -> None:
            self._is_computing = False
            self._answer(job)
            self._pump()

        self._time.after(new_tokens / PREFILL_TOKENS_PER_S, computed)

    def _answer(self, job: Job) -> None:
        self.cache.publish(job.lease, job.keys)
        job.began(job.found * BLOCK_TOKENS)

        def ended() -> None:
            self.cache.publish(job.lease, job.whole)
            self.cache.release(job.lease)
            self._running -= 1
            self.answers += 1
            job.ended()
            self._pump()

        self._time.after(job.output_tokens * TOKEN_S, ended)


def fleet(shape: str, capacity_tokens: int, time: VirtualTime, events: EventSetup | None = None) -> list[TimedWorker]:
    """shape: as `2P_2D` or `4R`."""
    roles = {role.value: role for role in Role}
    return [
        TimedWorker(f"{group[-1]}{number}", roles[group[-1]], capacity_tokens, time, events)
        for group in shape.split("_")
        for number in range(1, int(group[:-1]) + 1)
    ]
