"""What a model's chat template leaves of replies in the next prompt, learned from answers.

A round is the user's message and all that follows until the next one: calls of tools, their results, and the reasoning
before each. Templates of reasoning models (Qwen3, GLM) render that reasoning only in the newest round, and only what
the client sends back. So inside of a round engines hold the prompt with its reply, and the user's next message changes
what comes after the last one. Of a reply without reasoning some templates leave out the empty block that they have put
before it, so that nothing from there on is held.

Until an answer has shown it, a template is taken to drop reasoning, and to keep replies that had none. That is the safe
error: where it keeps the reasoning, some turns are computed on a P that D could have computed itself, until one runs
where the prefix is; the other way round D computes thousands of tokens, unforeseen, in the midst of its decoding.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from ..runtime.replicated import Replicated

LEAST_GAP = 256
"""Tokens in doubt by which one outcome can be told from the other."""

SLACK = 64  # engines cache whole blocks, and templates begin the reply in one of two ways
_MOST_SCORE = 3  # so few answers outweigh all before them: an operator may change the template

Case = tuple[str, bool, bool]
"""A model, whether the reply was reasoned, and whether the user's next message has come since."""


class Doubt(msgspec.Struct, frozen=True, gc=False):
    """How much of a prompt is held, as the template keeps or drops a reply; the same where that is no question."""

    least_tokens: int  # up to the reply; after a reasoned round up to the end of the message that began it
    most_tokens: int  # with the reply, as it was held
    is_reasoned: bool
    round_is_over: bool


def keeps_reply(doubt: Doubt, prompt_tokens: int, cached_tokens: int | None) -> bool | None:
    """Whether a turn shows that its template keeps what is in doubt; None: it shows nothing.

    cached_tokens: of a worker that held all of it; None: it had no such worker.
    """
    if doubt.most_tokens - doubt.least_tokens < LEAST_GAP:
        return None
    if prompt_tokens < doubt.most_tokens:
        return False  # it was longer by itself
    if cached_tokens is None:
        return None
    if cached_tokens >= doubt.most_tokens - SLACK:
        return True
    return False if abs(cached_tokens - doubt.least_tokens) <= SLACK else None  # else it was evicted in part


class RenderedReplies:
    """What is known of each case; above `capacity` the one unused for longest is forgotten."""

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._scores: OrderedDict[Case, int] = OrderedDict()  # above 0: the template keeps the reply
        self.replicated: Replicated[Case, int] | None = None  # `changed` takes what `adopt` takes

    def held(self, model: str, doubt: Doubt | None, tokens: int) -> int:
        """How many of so many tokens are held."""
        if doubt is None:
            return tokens
        return doubt.most_tokens if self.keeps(model, doubt) else doubt.least_tokens

    def keeps(self, model: str, doubt: Doubt) -> bool:
        unknown = 0 if doubt.is_reasoned else 1
        return self._scores.get((model, doubt.is_reasoned, doubt.round_is_over), unknown) > 0

    def learn(self, model: str, doubt: Doubt, prompt_tokens: int, cached_tokens: int | None) -> None:
        kept = keeps_reply(doubt, prompt_tokens, cached_tokens)
        if kept is None:
            return
        case = model, doubt.is_reasoned, doubt.round_is_over
        before = self._scores.get(case, 0)
        score = max(-_MOST_SCORE, min(before + (1 if kept else -1), _MOST_SCORE))
        self.adopt(case, score)
        if score != before and self.replicated is not None:
            self.replicated.changed(case, score)

    def adopt(self, case: Case, score: int) -> None:
        """The score that another process has come to; what this one has seen is in it."""
        self._scores[case] = score
        self._scores.move_to_end(case)
        if len(self._scores) > self._capacity:
            self._scores.popitem(last=False)

    def scores(self) -> list[tuple[Case, int]]:
        """What `adopt` takes."""
        return list(self._scores.items())
