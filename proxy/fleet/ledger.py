"""The load ledger: what turns do on each worker, by this proxy's own books.

It needs no telemetry. Seconds are what the caller expects by the laws of the engines, 0 where it knows none. Each
process keeps one `Use` for each worker and hears of the others'; a worker's view shows their sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import msgspec
from msgspec.structs import replace

from ..runtime.replicated import Replicated
from .view import NO_PROMPTS, Others, RecentPrompts, WorkerView
from .worker import Load, Role, WorkerId

LONGEST_S = 3600.0  # an estimate above it, or none at all as NaN, counts as 0: it would hide all others
MOST_TOKENS = 1 << 40


class LegEstimates(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a turn is expected to take. The seconds are by the laws of the engines, 0 where there are none."""

    prompt_tokens: int
    new_tokens: int  # of the prompt, that the answering worker does not hold yet
    output_tokens: int = 0
    new_on_prefill_tokens: int = 0  # of the prompt, that P does not hold yet
    prefill_s: float = 0.0  # of engine time: on P, or on the worker that answers
    beside_s: float = 0.0  # of that, what it delays those that decode there
    fetched_tokens: int = 0  # of the prompt, by the worker that computes it, from one that has no part in it else
    fetch_link_s: float = 0.0  # that these keep the links of both workers from others
    link_s: float = 0.0  # the same for the KV that P hands over
    is_lent: bool = False  # its first leg is on a D or R
    ready_s: float = 0.0  # until the engine that computes the prompt may begin with it
    patience_s: float = math.inf  # that its first token could be later than on an idle engine
    shows_first_token: bool = True  # False: the answer comes as a whole

    def possible(self) -> LegEstimates:
        """The same, with what cannot be left out: 0 for it, or the limit."""
        most, longest_s = MOST_TOKENS, LONGEST_S
        if (
            0 <= self.prompt_tokens <= most
            and 0 <= self.new_tokens <= most
            and 0 <= self.output_tokens <= most
            and 0 <= self.new_on_prefill_tokens <= most
            and 0 <= self.fetched_tokens <= most
            and 0.0 <= self.prefill_s <= longest_s
            and 0.0 <= self.beside_s <= longest_s
            and 0.0 <= self.fetch_link_s <= longest_s
            and 0.0 <= self.link_s <= longest_s
            and 0.0 <= self.ready_s <= longest_s
        ):
            return self  # as nearly always
        tokens = {name: min(max(0, getattr(self, name)), most) for name in _TOKENS}
        seconds = {name: s if 0.0 < (s := getattr(self, name)) <= longest_s else 0.0 for name in _SECONDS}  # not NaN
        return replace(self, **tokens, **seconds)


_TOKENS = ("prompt_tokens", "new_tokens", "output_tokens", "new_on_prefill_tokens", "fetched_tokens")
_SECONDS = ("prefill_s", "beside_s", "fetch_link_s", "link_s", "ready_s")


class LegWork(msgspec.Struct, frozen=True, gc=False):
    """What one leg of a turn has its worker do. All are estimates."""

    prefill_tokens: int = 0  # of the prompt, that are computed there
    prefill_s: float = 0.0
    beside_s: float = 0.0  # of that, what it delays those that decode there
    placed_tokens: int = 0  # of KV that it brings to a D or R
    context_tokens: int = 0  # of the sequence that decodes there, half of its answer included; 0: none does
    reserved_tokens: int = 0  # of KV that it needs in the end, beside what the worker held before
    ready_s: float = 0.0  # until the engine may begin with the prompt
    patience_s: float = math.inf
    shows_first_token: bool = True  # False: the whole answer comes at once, so when the prompt is computed is not seen


class Use(msgspec.Struct, array_like=True, gc=False):
    """What one process does on one worker. The view is updated when it is read, not at each step of a turn."""

    inflight: int = 0
    queued_prefill_tokens: int = 0
    placed_tokens: int = 0  # of KV that turns brought to a D or R since it last reported its load
    answers: int = 0  # seconds in which the worker sent some of an answer
    recent_tokens: int = 0  # of KV that turns brought there, the older ones counting ever less
    halvings: int = 0  # of recent tokens, since the first process began
    decoding: int = 0
    context_tokens: int = 0
    reserved_tokens: int = 0
    prefills: int = 0  # whose end will be seen
    queued_prefill_s: float = 0.0
    prefills_since_s: float = 0.0  # when the first of them began, as far as known
    unseen_prefill_until_s: float = 0.0  # when prompts should be computed whose end is not seen
    sends_free_s: float = 0.0
    receives_free_s: float = 0.0
    sending: int = 0  # handoffs whose KV the link has not moved yet
    receiving_s: float = 0.0  # of link time, for such
    recent_prompts: RecentPrompts = NO_PROMPTS

    def begin(self, leg: LegWork, now_s: float) -> None:
        self.inflight += 1
        self.placed_tokens += leg.placed_tokens
        self.reserved_tokens += leg.reserved_tokens
        if leg.context_tokens:
            self.decoding += 1
            self.context_tokens += leg.context_tokens
        if leg.prefill_tokens:
            self.queued_prefill_tokens += leg.prefill_tokens
            self.recent_prompts = self.recent_prompts.plus(leg.beside_s, leg.patience_s, now_s)
            if not leg.shows_first_token:
                self.unseen_prefill_until_s = max(now_s, self.unseen_prefill_until_s) + leg.prefill_s
                return
            if not self.prefills:
                self.prefills_since_s = now_s + leg.ready_s
            self.prefills += 1
            self.queued_prefill_s += leg.prefill_s

    def computed(self, leg: LegWork, now_s: float) -> None:
        """The leg's prompt is computed there, or will not be."""
        if leg.prefill_tokens:
            left = self.queued_prefill_tokens - leg.prefill_tokens
            self.queued_prefill_tokens = left if left > 0 else 0
            if leg.shows_first_token:
                self.prefills -= 1
                # Of none the sum is exactly 0, whatever was lost in adding fractions.
                self.queued_prefill_s = max(0.0, self.queued_prefill_s - leg.prefill_s) if self.prefills else 0.0
                self.prefills_since_s = now_s if self.prefills else 0.0

    def end(self, leg: LegWork) -> None:
        """After `computed`."""
        if self.inflight > 0:
            self.inflight -= 1
        self.reserved_tokens -= leg.reserved_tokens
        if leg.context_tokens:
            self.decoding -= 1
            self.context_tokens -= leg.context_tokens

    def begin_sending(self, free_s: float) -> None:
        self.sending += 1
        self.sends_free_s = free_s

    def end_sending(self, early_s: float, now_s: float) -> None:
        """early_s: of link time that it was to take still. What P computes next is sent so much earlier."""
        self.sending -= 1
        self.sends_free_s = self.sends_free_s - early_s if self.sending else min(self.sends_free_s, now_s)

    def begin_receiving(self, free_s: float, transfer_s: float) -> None:
        self.receiving_s += transfer_s
        self.receives_free_s = free_s

    def end_receiving(self, transfer_s: float, now_s: float) -> None:
        self.receiving_s = max(0.0, self.receiving_s - transfer_s)
        self.receives_free_s = min(self.receives_free_s, now_s + self.receiving_s)


RECENT_TOKENS = 1 << 19
"""For each worker: when turns have brought as many, what they brought until then counts by half. Some caches full."""


_NO_USES: dict[int, Use] = {}


class Uses:
    """Of all workers and processes.

    A process halves what turns of all of them brought lately. Each tells how often it has, and the others follow, so
    that older tokens count as little as if one process had all turns.
    """

    def __init__(self) -> None:
        self.own: dict[WorkerId, Use] = {}
        self.others: dict[WorkerId, dict[int, Use]] = {}  # by process
        self.replicated: Replicated[WorkerId, bool] | None = None  # changed: own use, and whether that has other legs
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

    def inflight(self, worker_id: WorkerId) -> int:
        """Legs of all processes on this worker."""
        own = self.own.get(worker_id)
        legs = 0 if own is None else own.inflight
        for use in self.others.get(worker_id, _NO_USES).values():
            legs += use.inflight
        return legs

    def total(self, worker_id: WorkerId) -> Use:
        own, others = self.own[worker_id], self.others.get(worker_id)
        return summed(own, others.values()) if others else own

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
        uses = self.others.get(worker_id)
        if uses is None:
            uses = self.others[worker_id] = {}
        known = uses.get(process)
        self._recent_tokens += use.recent_tokens if known is None else use.recent_tokens - known.recent_tokens
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


def summed(own: Use, others: Iterable[Use]) -> Use:
    """Of all processes. Times are the latest, as a link or an engine is free when the last of them has done with it.

    Made anew: to set a struct's fields one by one takes twice as long, and so does `max()` of two numbers.
    """
    total = own
    for use in others:
        prefills_s, until_s = use.prefills_since_s, use.unseen_prefill_until_s
        sends_s, receives_s = use.sends_free_s, use.receives_free_s
        total = Use(
            inflight=total.inflight + use.inflight,
            queued_prefill_tokens=total.queued_prefill_tokens + use.queued_prefill_tokens,
            placed_tokens=total.placed_tokens + use.placed_tokens,
            recent_tokens=total.recent_tokens + use.recent_tokens,
            decoding=total.decoding + use.decoding,
            context_tokens=total.context_tokens + use.context_tokens,
            reserved_tokens=total.reserved_tokens + use.reserved_tokens,
            prefills=total.prefills + use.prefills,
            queued_prefill_s=total.queued_prefill_s + use.queued_prefill_s,
            prefills_since_s=before_s if (before_s := total.prefills_since_s) > prefills_s else prefills_s,
            unseen_prefill_until_s=before_s if (before_s := total.unseen_prefill_until_s) > until_s else until_s,
            sends_free_s=before_s if (before_s := total.sends_free_s) > sends_s else sends_s,
            receives_free_s=before_s if (before_s := total.receives_free_s) > receives_s else receives_s,
            recent_prompts=total.recent_prompts.joined(use.recent_prompts),
        )
    return total


def shown(view: WorkerView, use: Use) -> WorkerView:
    """The view with this use of all processes."""
    return replace(
        view,
        inflight=use.inflight,
        queued_prefill_tokens=use.queued_prefill_tokens,
        placed_tokens=use.placed_tokens,
        recent_tokens=use.recent_tokens,
        decoding=use.decoding,
        context_tokens=use.context_tokens,
        reserved_tokens=use.reserved_tokens,
        prefills=use.prefills,
        queued_prefill_s=use.queued_prefill_s,
        prefills_since_s=use.prefills_since_s,
        unseen_prefill_until_s=use.unseen_prefill_until_s,
        sends_free_s=use.sends_free_s,
        receives_free_s=use.receives_free_s,
        recent_prompts=use.recent_prompts,
    )


def prefill_left_s(of: Use | WorkerView, now_s: float) -> float:
    """Engine time until all prompts there are computed.

    The first of them has been computed since `prefills_since_s`. It takes no longer than the mean of them: where it is
    late, that says nothing of the others. It may begin only later, as its request's host work comes before.
    """
    seen_s, unseen_s = of.queued_prefill_s, of.unseen_prefill_until_s - now_s
    if of.prefills:
        computed_s, each_s = now_s - of.prefills_since_s, seen_s / of.prefills
        seen_s -= computed_s if computed_s < each_s else each_s
    return seen_s + unseen_s if unseen_s > 0.0 else seen_s


class Backlog(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one worker has to do, as operators are shown it: by turns of this proxy, in all its processes."""

    decoding_sequences: int = 0
    decoding_context_tokens: int = 0
    prefill_left_s: float = 0.0  # of engine time, for prompts that wait or are computed
    reserved_kv_tokens: int = 0
    link_free_in_s: float = 0.0  # until all KV that it sends or receives is moved


def backlog(view: WorkerView, now_s: float) -> Backlog:
    link_free_s = max(view.sends_free_s, view.receives_free_s)
    return Backlog(
        decoding_sequences=view.decoding,
        decoding_context_tokens=view.context_tokens,
        prefill_left_s=round(prefill_left_s(view, now_s), 3),
        reserved_kv_tokens=view.reserved_tokens,
        link_free_in_s=round(max(0.0, link_free_s - now_s), 3),
    )


REPORT_AGE_S = 30.0  # an older report of an engine's load says nothing of the sequences there


class DecodingSequences(msgspec.Struct, frozen=True, gc=False):
    """That decode on one worker, or will."""

    count: int
    context_tokens: int  # theirs, in sum


def believed_decoding(view: WorkerView, now_s: float) -> DecodingSequences:
    """Of this proxy and of others. A report that is old counts for nothing."""
    others = view.others
    if not others.running or now_s - view.reported_s > REPORT_AGE_S:
        return DecodingSequences(view.decoding, view.context_tokens)
    return DecodingSequences(view.decoding + others.running, view.context_tokens + others.context_tokens)


def of_other_proxies(view: WorkerView, load: Load) -> Others:
    """By a report that comes now. What of ours is on its way there, or has just left, makes them a little off.

    The KV that the engine has in use, beside that of our sequences, is theirs; without its capacity theirs are as long
    as ours.
    """
    requests = max(0, load.running + load.waiting - view.inflight)
    # What runs on a P are prompts, unless it answers turns too.
    running = 0 if view.role is Role.PREFILL and not view.decoding else min(load.running, requests)
    if not running:
        context_tokens = 0
    elif load.kv_capacity_tokens:
        context_tokens = max(0, round(load.kv_usage * load.kv_capacity_tokens) - view.context_tokens)
    else:
        context_tokens = running * view.context_tokens // max(1, view.decoding)
    return Others(requests, running, context_tokens)
