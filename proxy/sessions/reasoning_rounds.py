"""Whether a model's chat template drops the reasoning of earlier rounds, learned from answers.

A round is the user's message and all that follows until the next one: calls of tools, their results, and the reasoning
before each. Templates of reasoning models (Qwen3, GLM) render that reasoning only in the newest round. So the user's
next message changes what comes after the last one, and engines hold the prompt only up to there.

Until an answer has shown it, a template is taken to drop it. That is the safe error: where it keeps the reasoning, some
turns are computed on a P that D could have computed itself, until one runs where the prefix is; the other way round D
computes thousands of tokens, unforeseen, in the midst of its decoding.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

LEAST_GAP = 256
"""Tokens of a round in which one outcome can be told from the other."""

SLACK = 64  # engines cache whole blocks, and templates begin the reply in one of two ways
_MOST_SCORE = 3  # so few answers outweigh all before them: an operator may change the template


class RoundEnd(msgspec.Struct, frozen=True):
    """Where a prompt's last but one round begins and ends, if a reply of that round was reasoned."""

    opening_tokens: int  # up to the end of the user's message
    whole_tokens: int  # with all that followed, as it was held


def keeps_reasoning(end: RoundEnd, prompt_tokens: int, cached_tokens: int | None) -> bool | None:
    """Whether a turn shows that its template keeps the reasoning of the round before; None: it shows nothing.

    cached_tokens: of a worker that held the whole round; None: it had no such worker.
    """
    if end.whole_tokens - end.opening_tokens < LEAST_GAP:
        return None
    if prompt_tokens < end.whole_tokens:
        return False  # the round was longer by itself
    if cached_tokens is None:
        return None
    if cached_tokens >= end.whole_tokens - SLACK:
        return True
    return False if abs(cached_tokens - end.opening_tokens) <= SLACK else None  # else it was evicted in part


class ReasoningRounds:
    """What is known of each model; above `capacity` the one unused for longest is forgotten."""

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._scores: OrderedDict[str, int] = OrderedDict()  # above 0: the template keeps reasoning

    def keeps(self, model: str) -> bool:
        return self._scores.get(model, 0) > 0

    def learn(self, model: str, end: RoundEnd, prompt_tokens: int, cached_tokens: int | None) -> None:
        kept = keeps_reasoning(end, prompt_tokens, cached_tokens)
        if kept is None:
            return
        score = self._scores.pop(model, 0) + (1 if kept else -1)
        self._scores[model] = max(-_MOST_SCORE, min(score, _MOST_SCORE))
        if len(self._scores) > self._capacity:
            self._scores.popitem(last=False)
