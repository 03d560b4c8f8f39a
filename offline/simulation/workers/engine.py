"""One engine in virtual time: continuous batching as vLLM schedules it, with many decoding steps in one event.

A step computes one token for every decoding sequence and, within the token budget, chunks of prompts: first the prompts
that have begun, then new ones in order of arrival. Until a sequence ends or another arrives, decoding steps differ only
in their context, which grows by one token a sequence. So the time of any number of them is an arithmetic series, and
they are one event, a *jump*. The cost of a run grows with its requests, not with its tokens.

The simulated engine's scheduler (`ppd.servers.sim.core.scheduler`) is not used here: it steps through every token and
keeps the contents of every KV block, so that wrong KV shows in the text, and a sweep of thousands of runs cannot afford
that. tests/offline/simulation/workers/test_engine.py holds this engine's times to that scheduler's.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ppd.proxy.laws.step_time import EngineProfile, attention_pairs, step_time_s

from ..timeline import Timeline
from .encoder import Embeddings, PlacedItem
from .kv_cache import Held, KvCache, Span, first_of, with_answer
from .links import Work


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """`prompt` and `reply` say what its KV holds, for the prefix cache."""

    prompt: tuple[Span, ...]
    reply: tuple[Span, ...]
    output_tokens: int
    first_token: Callable[[], None]
    finished: Callable[[], None]
    pull: Callable[[int], bool] | None = None  # starts a transfer of missing tokens, at most so many; False: of none
    keeps_kv: bool = False  # at its end the KV stays in use until `let_go`: a handoff
    failed: Callable[[], None] = lambda: None  # the engine was lost
    work: Work = field(default_factory=Work)
    media: tuple[PlacedItem, ...] = ()  # of the prompt
    prompt_tokens: int = field(init=False)
    todo: int = field(init=False)  # tokens to compute before the next one can be sampled
    computed: int = 0  # of them
    generated: int = 0
    cached_tokens: int = 0  # found here when it was first scheduled, or fetched then
    found: list[Held] = field(default_factory=list)
    own_tokens: int = 0  # reserved and not yet part of a span
    ends_at: int = 0  # the engine's count of ticks at its last token
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.prompt_tokens = self.todo = sum([span.tokens for span in self.prompt])


class Engine:
    """Owns its jobs from `arrive` or `add` until their `finished` or `failed`."""

    def __init__(
        self,
        timeline: Timeline,
        profile: EngineProfile,
        cache: KvCache,
        *,
        max_num_seqs: int,
        encoder_item_s: float = 0.0,
    ) -> None:
        """encoder_item_s: what it takes to encode an item here."""
        self.profile = profile
        self.cache = cache
        self.embeddings = Embeddings()
        self._encoder_item_s = encoder_item_s
        self._timeline = timeline
        self._max_num_seqs = max_num_seqs
        self._arriving: dict[SimulatedSequence, None] = {}  # host work on their requests
        self._waiting: deque[SimulatedSequence] = deque()
        self._ready: deque[SimulatedSequence] = deque()  # their KV has arrived; they hold all of their memory
        self._pulling: dict[SimulatedSequence, None] = {}
        self._prefilling: list[SimulatedSequence] = []  # running, prompt not finished
        self._decoding: list[tuple[int, int, SimulatedSequence]] = []  # heap by last tick, then arrival
        self._context = 0  # tokens, summed over the decoding
        self._tick = 0  # decoding steps so far: a job's progress is a difference of these
        self._admitted = 0
        self._chunks: list[tuple[SimulatedSequence, int]] = []  # of the current step
        self._jump: tuple[float, int] | None = None  # start and number of the current decoding steps
        self._epoch = 0  # an event of an older plan is void
        self._busy = False
        self.is_lost = False

    @property
    def running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._ready) + len(self._pulling)

    def arrive(self, job: SimulatedSequence, host_work_s: float) -> None:
        """A request; an engine that is lost refuses it."""
        if self.is_lost:
            self._timeline.after(0.0, job.failed)
            return
        self._arriving[job] = None
        self._timeline.after(host_work_s, self.add, job)

    def add(self, job: SimulatedSequence) -> None:
        self._arriving.pop(job, None)
        if not self.is_lost:
            self._waiting.append(job)
            self._attend()

    def lose(self) -> None:
        """The engine dies, with all that it holds. Its jobs fail."""
        running = [*self._prefilling, *(job for _, _, job in sorted(self._decoding, key=lambda entry: entry[1]))]
        jobs = [*running, *self._ready, *self._pulling, *self._waiting, *self._arriving]
        self.is_lost, self._jump = True, None
        self._epoch += 1
        for held in (self._prefilling, self._decoding, self._ready, self._pulling, self._waiting, self._arriving):
            held.clear()
        for job in jobs:
            job.failed()

    def pulled(self, job: SimulatedSequence) -> None:
        """The KV that `job.pull` asked for is here. The prompt's last token is computed again, for its logits."""
        job.computed = job.todo - 1
        self._resume(job)

    def fetched(self, job: SimulatedSequence, tokens: int) -> None:
        """The KV of so many tokens is here, which `job.pull` asked a cache for, and can be found from here on."""
        self._count_steps()
        job.computed += tokens
        job.cached_tokens += tokens  # as vLLM reports it
        job.own_tokens -= self.cache.publish(first_of(job.prompt, job.computed), job.found)
        self._resume(job)

    def pull_lost(self, job: SimulatedSequence) -> None:
        """The KV will not come: the prompt is computed here."""
        self._resume(job)

    def let_go(self, job: SimulatedSequence) -> None:
        """The handoff was read or has expired."""
        self.cache.release(job.found, job.own_tokens)
        job.own_tokens = 0
        self._attend()

    def pin(self, prompt: Sequence[Span]) -> list[Held]:
        """Takes what is cached of a prompt into use, for a worker that reads it, until `unpin`."""
        self._count_steps()
        found = self.cache.share(prompt)[0]
        if self._jump is not None:  # it was planned with more memory
            self._attend()
        return found

    def unpin(self, found: list[Held]) -> None:
        self.cache.release(found, 0)
        if self._waiting:
            self._attend()

    # -- steps

    def _resume(self, job: SimulatedSequence) -> None:
        if not self.is_lost:
            del self._pulling[job]
            self._ready.append(job)
            self._attend()

    def _attend(self) -> None:
        """Something has arrived: begin a step, or end the jump after its current step."""
        if self.is_lost:
            return
        if not self._busy:
            self._busy = True
            self._timeline.after(0.0, self._begin)  # after all other events of this instant
        elif self._jump is not None:
            start_s, steps = self._jump
            done = self._steps_within(self._timeline.now_s - start_s)
            if done < steps:
                self._plan_jump(start_s, done)

    def _count_steps(self) -> None:
        """Of the jump, those that have been: what they wrote has its memory before others take more of it."""
        if self._jump is None:
            return
        start_s, steps = self._jump
        done = self._steps_within(self._timeline.now_s - start_s) - 1
        written = done * len(self._decoding)
        has_room = self.cache.reserve(written)
        assert has_room, "the jump was planned with as much"
        self._jump = (start_s + self._duration_s(done), steps - done)
        self._tick += done
        self._context += written

    def _begin(self) -> None:
        self._chunks = self._schedule()
        if self._chunks:
            encode_s = self._encoder_item_s * len(self.embeddings.missing(self._begun_items()))
            self._wake(self._timeline.now_s + self._mixed_step_s() + encode_s)
        elif self._decoding:
            self._plan_jump(self._timeline.now_s, self._decoding[0][0] - self._tick)
        else:
            self._busy = False

    def _begun_items(self) -> list[str]:
        """Whose tokens the current step begins to compute."""
        return [
            placed.item.name
            for job, tokens in self._chunks
            for placed in job.media
            if job.computed <= placed.at < job.computed + tokens
        ]

    def _mixed_step_s(self) -> float:
        # A chunk of one token costs what a decoding sequence does. It is usually a prompt whose KV was pulled.
        singles = [job for job, tokens in self._chunks if tokens == 1]
        prefills = [(job, tokens) for job, tokens in self._chunks if tokens > 1]
        return step_time_s(
            self.profile,
            len(self._decoding) + len(singles),
            self._context + sum(job.computed + 1 for job in singles),
            sum(tokens for _, tokens in prefills),
            sum(attention_pairs(tokens, job.computed) for job, tokens in prefills),
        )

    def _plan_jump(self, start_s: float, steps: int) -> None:
        """`steps` decoding steps from `start_s` on, or as many as memory allows; at least one."""
        steps = max(1, min(steps, self.cache.available_tokens // len(self._decoding)))
        self._jump = (start_s, steps)
        self._wake(start_s + self._duration_s(steps))

    def _wake(self, time_s: float) -> None:
        self._busy = True
        self._epoch += 1
        self._timeline.at(time_s, self._end, self._epoch)

    def _end(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        steps = self._jump[1] if self._jump else 1
        self._jump = None
        while self._decoding and not self.cache.reserve(steps * len(self._decoding)):
            self._preempt_youngest()
        self._tick += steps
        self._context += steps * len(self._decoding)
        self.embeddings.add(self._begun_items())
        for job, tokens in self._chunks:
            job.computed += tokens
            job.work.computed_tokens += tokens
            if job.computed == job.todo:
                self._sample(job)
        while self._decoding and self._decoding[0][0] <= self._tick:
            job = heapq.heappop(self._decoding)[2]
            ticks = job.output_tokens - job.generated
            self._context -= job.todo + 1 + ticks
            job.own_tokens += ticks
            self._finish(job)
        self._begin()

    # -- jobs

    def _schedule(self) -> list[tuple[SimulatedSequence, int]]:
        budget = self.profile.max_batched_tokens - len(self._decoding)
        cap = self.profile.most_of_a_prompt(self.running + self.waiting)
        chunks: list[tuple[SimulatedSequence, int]] = []
        for job in self._prefilling:
            chunks.append((job, min(job.todo - job.computed, budget, cap)))
            budget -= chunks[-1][1]
        while budget > 0 and self.running < self._max_num_seqs and (queue := self._ready or self._waiting):
            job = queue[0]
            if queue is self._waiting and not self._find_room(job):
                break
            queue.popleft()
            if job.pull is not None:
                pull, job.pull = job.pull, None
                if pull(job.todo - job.computed):
                    self._pulling[job] = None
                    continue
            self._prefilling.append(job)
            chunks.append((job, min(job.todo - job.computed, budget, cap)))
            budget -= chunks[-1][1]
        return [(job, tokens) for job, tokens in chunks if tokens > 0]

    def _find_room(self, job: SimulatedSequence) -> bool:
        """Shares the cached prefix and reserves the rest; False, and nothing changes, if memory is short."""
        found, held, hit = self.cache.share(job.prompt)
        if not self.cache.reserve(job.todo - held):
            self.cache.release(found, 0)
            return False
        job.found, job.own_tokens, job.computed = found, job.todo - held, hit
        if not job.generated:
            job.cached_tokens = hit
        return True

    def _sample(self, job: SimulatedSequence) -> None:
        """The prompt is computed: its next token, which is the first unless the job was preempted."""
        self._prefilling.remove(job)
        job.own_tokens -= self.cache.publish(job.prompt, job.found)
        job.generated += 1
        if job.generated == 1:
            job.first_token()
        if job.generated == job.output_tokens:
            self._finish(job)
            return
        self._admitted += 1
        job.ends_at = self._tick + job.output_tokens - job.generated
        self._context += job.todo + 1  # with the token that a step computes
        heapq.heappush(self._decoding, (job.ends_at, self._admitted, job))

    def _preempt_youngest(self) -> None:
        # Its memory goes to the others. Its prompt and what it has generated are computed again later.
        index = max(range(len(self._decoding)), key=lambda place: self._decoding[place][1])
        job = self._decoding.pop(index)[2]
        heapq.heapify(self._decoding)
        ticks = job.output_tokens - job.generated - (job.ends_at - self._tick)
        self._context -= job.todo + 1 + ticks
        self.cache.release(job.found, job.own_tokens + ticks)
        job.own_tokens = 0
        job.generated += ticks
        job.todo = job.prompt_tokens + job.generated
        job.preemptions += 1
        self._waiting.appendleft(job)

    def _finish(self, job: SimulatedSequence) -> None:
        # The last token's KV is never written. The rest of the answer can be found behind its prompt.
        spans = with_answer(job.prompt, job.reply, job.output_tokens - 1)
        job.own_tokens -= self.cache.publish(spans, job.found)
        if not job.keeps_kv:
            self.cache.release(job.found, job.own_tokens)
            job.own_tokens = 0
        job.finished()

    def _duration_s(self, steps: int) -> float:
        # An arithmetic series: each step adds one token a sequence to the context.
        one_s, growth_s = self._series()
        return steps * one_s + growth_s * steps * (steps - 1) / 2

    def _steps_within(self, elapsed_s: float) -> int:
        """The steps that have ended after `elapsed_s`, plus the current one."""
        one_s, growth_s = self._series()
        if growth_s <= 0:
            estimate = elapsed_s / one_s
        else:
            linear = one_s - growth_s / 2
            estimate = (math.sqrt(linear * linear + 2 * growth_s * elapsed_s) - linear) / growth_s
        steps = max(1, math.ceil(estimate))
        while self._duration_s(steps) < elapsed_s:
            steps += 1
        while steps > 1 and self._duration_s(steps - 1) >= elapsed_s:
            steps -= 1
        return steps

    def _series(self) -> tuple[float, float]:
        sequences = len(self._decoding)
        return (
            step_time_s(self.profile, sequences, self._context, 0, 0),
            self.profile.context_token_s * sequences + self.profile.mean_context_token_s,
        )
