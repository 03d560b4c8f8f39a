"""What is known of models' chat templates, as far as it decides which prompts begin alike.

Whether a template renders the tools before the system's text or after it is learned from what workers find cached.
Where a head is new to a worker that has lately seen its tools with another system's text, or its text with other tools,
the two orders foretell different numbers of cached tokens.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import translate
from functools import lru_cache

import msgspec

from ..fleet.worker import WorkerId
from ..runtime.replicated import Replicated
from .prefix_chain import Chain

MODELS_LIMIT = 256
HEADS_LIMIT = 4096  # remembered of all workers
PARTS_LIMIT = 20_000  # of those heads: 150 bytes each
UNITS_LIMIT = 512  # heads with more units are not learned from
RECENT_TOKENS = 64 * 1024  # what a worker has computed since it had a part: after more it may have evicted that
WORKERS_LIMIT = 4096

# A claim that came true says more than one that did not: the engine may also have evicted what was claimed.
_STRONG, _WEAK, _DECIDED, _MOST = 3, 1, 3, 9
_INEXACT, _INEXACT_WHOLE = 0.25, 0.1  # of an estimate: of a part (JSON has more tokens a byte than text), of the head
_SLACK_TOKENS = 32  # engines cache whole blocks


class Template(msgspec.Struct, frozen=True, gc=False):
    tools_first: bool | None = None  # it renders the tools before the system's text; None: not known
    prints_call_ids: bool = False


PLAIN = Template()


class Templates(msgspec.Struct, frozen=True):
    """Of all models. A helper process is sent it."""

    with_call_ids: tuple[str, ...] = ()  # patterns of models' names; `*` stands for any characters
    tools_first: frozenset[str] = frozenset()  # models
    system_first: frozenset[str] = frozenset()  # by any evidence, as that order is taken where there is none

    def of(self, *names: str) -> Template:
        """names: all by which one model is known."""
        return _template(self, names)


NO_TEMPLATES = Templates()


@lru_cache(256)
def _template(known: Templates, names: tuple[str, ...]) -> Template:
    pattern, tools_first = _pattern(known.with_call_ids), not known.tools_first.isdisjoint(names)
    return Template(
        None if not tools_first and known.system_first.isdisjoint(names) else tools_first,
        any(pattern.match(name.casefold()) for name in names),
    )


@lru_cache(8)
def _pattern(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(translate(one.casefold()) for one in patterns) or r"(?!)")


class Claim(msgspec.Struct, frozen=True):
    """What a worker should find cached of a head: `least` tokens, and of the next unit any part."""

    least: float
    most: float

    def allows(self, tokens: int, inexact: float = _INEXACT) -> bool:
        slack = _SLACK_TOKENS
        return self.least * (1 - inexact) - slack <= tokens <= self.most * (1 + inexact) + slack


def vote(cached_tokens: int, head_tokens: float, tools_first: Claim, system_first: Claim) -> int:
    """Above 0 for tools first, below 0 for the system's text first; 0: this tells nothing.

    A worker that has all of the head cached may have got it from elsewhere: another proxy, or before this one started.
    Then, and where both allow so many but one does not by the estimate itself, this can only confirm the order that is
    taken if nothing is known.
    """
    is_whole = cached_tokens >= head_tokens * (1 - _INEXACT_WHOLE) - _SLACK_TOKENS
    for_tools, for_system = tools_first.allows(cached_tokens), system_first.allows(cached_tokens)
    if for_system and (is_whole or for_tools):
        return 0 if tools_first.allows(cached_tokens, 0.0) else -_WEAK
    if is_whole or for_tools == for_system:
        return 0
    true = tools_first if for_tools else system_first
    weight = _STRONG if true.least > 2 * _SLACK_TOKENS else _WEAK
    return weight if for_tools else -weight


class NewHeads(msgspec.Struct, frozen=True, array_like=True):
    """What a worker has computed for the first time."""

    worker: WorkerId
    heads: Sequence[int]  # keys of their ends
    parts: Mapping[int, int]  # by keys inside of them, in both orders: tokens that it has computed since
    model: str = ""
    votes: int = 0  # for the order of the model's template


class TemplateOrder:
    """Learns the order of each model's template. `known` is replaced whole when something is learned."""

    def __init__(self, with_call_ids: tuple[str, ...] = (), processes: int = 1) -> None:
        """processes: each counts only what its own turns have workers compute."""
        self.known = Templates(with_call_ids)
        self._recent_tokens = RECENT_TOKENS // processes
        self._scores: OrderedDict[str, int] = OrderedDict()  # by model: the votes so far, bounded
        self._heads: OrderedDict[tuple[WorkerId, int], None] = OrderedDict()
        self._computed: OrderedDict[WorkerId, int] = OrderedDict()  # tokens
        self._parts: OrderedDict[tuple[WorkerId, int], int] = OrderedDict()  # what was computed before it
        self.replicated: Replicated[NewHeads] | None = None  # `changed` takes what `take` takes

    def __len__(self) -> int:
        return len(self._scores) + len(self._heads) + len(self._parts) + len(self._computed)

    def computed(self, worker: WorkerId, tokens: int) -> int:
        """Counts tokens whose KV is new on a worker; returns how many there were."""
        before = self._computed.pop(worker, 0)
        self._computed[worker] = before + tokens
        if len(self._computed) > WORKERS_LIMIT:
            self._computed.popitem(last=False)
        return before

    def learn(self, model: str, worker: WorkerId, chain: Chain, prompt_tokens: int, cached_tokens: int | None) -> bool:
        """Takes what a worker has found cached of a prompt, and computed of it. Whether the order in force changed."""
        marks, before = chain.marks, self.computed(worker, prompt_tokens - (cached_tokens or 0))
        if not marks.tools or not marks.system or marks.head > UNITS_LIMIT:
            return False
        name = worker, chain.keys[marks.head]
        if name in self._heads:  # nearly always
            self._heads.move_to_end(name)
            return False
        tools_first, system_first = chain.head(tools_first=True), chain.head(tools_first=False)
        score = 0
        if cached_tokens is not None and prompt_tokens > 0:
            per_byte = prompt_tokens / chain.size
            ours = self._claim(worker, *tools_first, per_byte, before)
            theirs = self._claim(worker, *system_first, per_byte, before)
            # Not where both parts were seen, each beside another.
            if ours and theirs and (ours.least < tools_first[1][-2] * per_byte or not theirs.least):
                score = vote(cached_tokens, chain.ends[marks.head] * per_byte, ours, theirs)
        new = NewHeads(worker, [name[1]], dict.fromkeys({*tools_first[0][1:], *system_first[0][1:]}, 0), model, score)
        has_changed = self._take(new, before)
        if self.replicated is not None:
            self.replicated.changed(new)
        return has_changed

    def take(self, new: NewHeads) -> bool:
        """What a turn of another process has shown."""
        return self._take(new, self._computed.get(new.worker, 0))

    def adopt(self, model: str, score: int) -> None:
        """The sum of votes that another process has come to; those of this one are in it."""
        self._set(model, score)

    def scores(self) -> list[tuple[str, int]]:
        """What `adopt` takes."""
        return list(self._scores.items())

    def heads(self) -> list[NewHeads]:
        """All that is known of each worker, as `take` takes it."""
        heads, parts = defaultdict[WorkerId, list[int]](list), defaultdict[WorkerId, dict[int, int]](dict)
        for worker, key in self._heads:
            heads[worker].append(key)
        for (worker, key), before in self._parts.items():
            parts[worker][key] = max(0, self._computed.get(worker, 0) - before)
        return [NewHeads(worker, keys, parts[worker]) for worker, keys in heads.items()]

    def _claim(
        self, worker: WorkerId, keys: tuple[int, ...], ends: tuple[int, ...], per_byte: float, computed: int
    ) -> Claim | None:
        """keys, ends: of a head that is new to the worker. None: it may hold what it had of that, or not."""
        at = len(keys) - 2
        while at > 0 and (worker, keys[at]) not in self._parts:
            at -= 1
        if at and computed - self._parts[worker, keys[at]] > self._recent_tokens:
            return None
        return Claim(ends[at] * per_byte, ends[at + 1] * per_byte)

    def _take(self, new: NewHeads, before: int) -> bool:
        """before: tokens that the worker had computed by then. Whether the order in force changed."""
        worker = new.worker
        for head in new.heads:
            self._heads[worker, head] = None
        for key, since in new.parts.items():
            self._parts[worker, key] = before - since
            self._parts.move_to_end((worker, key))
        while len(self._heads) > HEADS_LIMIT:
            self._heads.popitem(last=False)
        while len(self._parts) > PARTS_LIMIT:
            self._parts.popitem(last=False)
        if not new.votes:
            return False
        return self._set(new.model, max(-_MOST, min(_MOST, self._scores.get(new.model, 0) + new.votes)))

    def _set(self, model: str, score: int) -> bool:
        self._scores[model] = score
        self._scores.move_to_end(model)
        before, forgotten = self.known, set[str]()
        if len(self._scores) > MODELS_LIMIT:
            forgotten.add(self._scores.popitem(last=False)[0])
        tools_first, system_first = before.tools_first - forgotten, before.system_first - forgotten
        if score >= _DECIDED:
            tools_first |= {model}
        elif score <= -_DECIDED:
            tools_first -= {model}
        system_first = system_first | {model} if score < 0 and model not in tools_first else system_first - {model}
        self.known = Templates(before.with_call_ids, tools_first, system_first)
        return before.tools_first != tools_first
