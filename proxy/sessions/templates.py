"""What is known of models' chat templates, as far as it decides which prompts begin alike.

Whether a template renders the tools before the system's text or after it is learned from what workers find cached.
Where a head is new to a worker that has lately seen its tools with another system's text, or its text with other tools,
the two orders foretell different numbers of cached tokens.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from fnmatch import translate
from functools import lru_cache

import msgspec

from ..fleet.worker import WorkerId
from .prefix_chain import Chain

MODELS_LIMIT = 256
HEADS_LIMIT = 4096  # remembered of all workers
PARTS_LIMIT = 20_000  # of those heads: 150 bytes each
UNITS_LIMIT = 512  # heads with more units are not learned from
RECENT_S = 300.0  # what was seen earlier may have been evicted since

# A claim that came true says more than one that did not: the engine may also have evicted what was claimed.
_STRONG, _WEAK, _DECIDED, _MOST = 3, 1, 3, 6
_INEXACT = 0.1  # of an estimate
_SLACK_TOKENS = 32  # engines cache whole blocks


class Template(msgspec.Struct, frozen=True, gc=False):
    tools_first: bool = False  # it renders the tools before the system's text
    prints_call_ids: bool = False


PLAIN = Template()


class Templates(msgspec.Struct, frozen=True):
    """Of all models. A helper process is sent it."""

    with_call_ids: tuple[str, ...] = ()  # patterns of models' names; `*` stands for any characters
    tools_first: frozenset[str] = frozenset()  # models

    def of(self, *names: str) -> Template:
        """names: all by which one model is known."""
        return _template(self.with_call_ids, self.tools_first, names)


NO_TEMPLATES = Templates()


@lru_cache(256)
def _template(with_call_ids: tuple[str, ...], tools_first: frozenset[str], names: tuple[str, ...]) -> Template:
    pattern = _pattern(with_call_ids)
    return Template(
        not tools_first.isdisjoint(names),
        any(pattern.match(name.casefold()) for name in names),
    )


@lru_cache(8)
def _pattern(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(translate(one.casefold()) for one in patterns) or r"(?!)")


class Claim(msgspec.Struct, frozen=True):
    """What a worker should find cached of a head: `least` tokens, and of the next unit any part."""

    least: float
    most: float

    def allows(self, tokens: int) -> bool:
        slack = _SLACK_TOKENS
        return self.least * (1 - _INEXACT) - slack <= tokens <= self.most * (1 + _INEXACT) + slack


def vote(cached_tokens: int, head_tokens: float, tools_first: Claim, system_first: Claim) -> int:
    """Above 0 for tools first, below 0 for the system's text first; 0: this tells nothing.

    A worker that has all of the head cached got it from elsewhere: another proxy, or before this one started.
    """
    if cached_tokens >= head_tokens * (1 - _INEXACT) - _SLACK_TOKENS:
        return 0
    for_tools, for_system = tools_first.allows(cached_tokens), system_first.allows(cached_tokens)
    if for_tools == for_system:
        return 0
    true = tools_first if for_tools else system_first
    weight = _STRONG if true.least > 2 * _SLACK_TOKENS else _WEAK
    return weight if for_tools else -weight


class TemplateOrder:
    """Learns the order of each model's template. `known` is replaced whole when something is learned."""

    def __init__(self, with_call_ids: tuple[str, ...] = ()) -> None:
        self.known = Templates(with_call_ids)
        self._scores: OrderedDict[str, int] = OrderedDict()  # by model: the votes so far, bounded
        self._heads: OrderedDict[tuple[WorkerId, int], None] = OrderedDict()
        self._parts: OrderedDict[tuple[WorkerId, int], float] = OrderedDict()  # when each was last seen

    def __len__(self) -> int:
        return len(self._scores) + len(self._heads) + len(self._parts)

    def learn(
        self, model: str, worker: WorkerId, chain: Chain, prompt_tokens: int, cached_tokens: int | None, now_s: float
    ) -> bool:
        """Takes what a worker has found cached of a prompt, and computed of it. Whether the order in force changed."""
        marks = chain.marks
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
            claims = [self._claim(worker, *head, per_byte, now_s) for head in (tools_first, system_first)]
            score = vote(cached_tokens, chain.ends[marks.head] * per_byte, *claims)
        self._heads[name] = None
        for key in {*tools_first[0][1:], *system_first[0][1:]}:
            self._parts[worker, key] = now_s
            self._parts.move_to_end((worker, key))
        while len(self._heads) > HEADS_LIMIT:
            self._heads.popitem(last=False)
        while len(self._parts) > PARTS_LIMIT:
            self._parts.popitem(last=False)
        return score != 0 and self._count(model, score)

    def _claim(
        self, worker: WorkerId, keys: tuple[int, ...], ends: tuple[int, ...], per_byte: float, now_s: float
    ) -> Claim:
        """keys, ends: of a head that is new to the worker."""
        at = len(keys) - 2
        while at > 0 and now_s - self._parts.get((worker, keys[at]), -math.inf) > RECENT_S:
            at -= 1
        return Claim(ends[at] * per_byte, ends[at + 1] * per_byte)

    def _count(self, model: str, score: int) -> bool:
        total = max(-_MOST, min(_MOST, self._scores.get(model, 0) + score))
        self._scores[model] = total
        self._scores.move_to_end(model)
        models = set(self.known.tools_first)
        if len(self._scores) > MODELS_LIMIT:
            models.discard(self._scores.popitem(last=False)[0])
        if total >= _DECIDED:
            models.add(model)
        elif total <= -_DECIDED:
            models.discard(model)
        before, self.known = self.known, Templates(self.known.with_call_ids, frozenset(models))
        return before != self.known
