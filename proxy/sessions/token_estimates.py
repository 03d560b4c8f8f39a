# cython: language_level=3, annotation_typing=False, infer_types=True
"""Token counts without a tokenizer, estimated from each model's own `usage` so far.

Tokens are counted by the kinds of text that a prompt adds to what is known of it: bytes of each kind, and units. Each
kind has its own belief of tokens a byte, a mean and a variance; a turn's error is shared among the kinds that it added,
by how much each adds to the doubt about the sum. So JSON teaches nothing about prose that is never beside it, and a
kind that is well known hardly moves for the sake of another. Errors count relative to the turn's size: were they
counted in tokens, a few large turns would set what small ones are believed to have.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import msgspec

from ..runtime.replicated import Replicated
from .text_kinds import TYPICAL_TOKENS, Amounts, Kind

DEFAULT_OUTPUT_TOKENS = 256
_OUTPUT_DECAY = 0.95

# No figure here needs to be exact: half or twice of each moves the errors of `benchmarks.small.estimates` by 0.003.
_NOISE = 0.03  # variance of a turn's relative error where all means are right
_FORGET = 1.02  # how much a kind's variance grows with each turn that has it: habits change
_ERROR_LIMIT = 0.5  # of one turn, relative to its size: what an engine reports may be nonsense
_LEAP = 64.0  # of an answer, above what was expected
_LEAST_TOKENS = 8.0  # smaller turns count as this: a token more or less says little
_MOST_TOKENS = 1 << 40  # above any context; an engine may report any integer
_FIRST_VARIANCES = tuple(400.0 if kind is Kind.START else TYPICAL_TOKENS[kind] ** 2 for kind in Kind)
_HIGHEST = tuple(256.0 if kind in (Kind.START, Kind.UNITS) else 2.0 for kind in Kind)
_LOWEST = tuple(0.0 if kind in (Kind.START, Kind.UNITS) else 0.02 for kind in Kind)


class _Model:
    __slots__ = ("means", "output_tokens", "variances")

    def __init__(self) -> None:
        self.means = list(TYPICAL_TOKENS)  # by kind
        self.variances = list(_FIRST_VARIANCES)
        self.output_tokens: float | None = None

    def expected(self, added: Amounts) -> float:
        means, expected = self.means, 0.0
        for at in range(0, len(added), 2):
            expected += means[added[at]] * added[at + 1]
        return expected

    def learn(self, added: Amounts, tokens: int) -> None:
        """One step of a Kalman filter whose covariances are left out."""
        means, variances = self.means, self.variances
        expected = self.expected(added)
        size = max(expected, float(tokens), _LEAST_TOKENS)
        doubt = _NOISE
        for at in range(0, len(added), 2):
            share = added[at + 1] / size
            doubt += share * share * variances[added[at]]
        error = _bounded((tokens - expected) / size, -_ERROR_LIMIT, _ERROR_LIMIT)
        for at in range(0, len(added), 2):
            kind, share = added[at], added[at + 1] / size
            gain = variances[kind] * share / doubt
            means[kind] = _bounded(means[kind] + gain * error, _LOWEST[kind], _HIGHEST[kind])
            variance, most = variances[kind] * (1.0 - gain * share) * _FORGET, _FIRST_VARIANCES[kind]
            variances[kind] = variance if variance < most else most


class Estimates(msgspec.Struct, frozen=True, array_like=True):
    """What is known of one model."""

    model: str
    means: Sequence[float]  # by kind
    variances: Sequence[float]
    output_tokens: float | None


class TokenEstimator:
    """Tokens by kind of text and length of answers, per model; above `capacity` the model unused for longest goes."""

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._models: OrderedDict[str, _Model] = OrderedDict()
        self.replicated: Replicated[str, Amounts, int, int | None] | None = None

    def learn(self, model: str, added: Amounts, new_tokens: int, completion_tokens: int | None) -> None:
        """added, new_tokens: what a prompt had beyond its known prefix. None of it is learnt from where a template
        left out more than was added."""
        new_tokens = max(0, min(new_tokens, _MOST_TOKENS))
        if completion_tokens is not None:
            completion_tokens = max(0, min(completion_tokens, _MOST_TOKENS))
        self.take(model, added, new_tokens, completion_tokens)
        if self.replicated is not None:
            self.replicated.changed(model, added, new_tokens, completion_tokens)

    def take(self, model: str, added: Amounts, new_tokens: int, completion_tokens: int | None) -> None:
        """What a turn of this process or of another one taught."""
        known = self._known(model)
        if added and new_tokens > 0:
            known.learn(added, new_tokens)
        if completion_tokens:
            known.output_tokens = output_mean(known.output_tokens, completion_tokens, _OUTPUT_DECAY)

    def estimate(self, model: str, added: Amounts) -> int:
        """At least 1 for whatever has a unit or a byte."""
        known = self._models.get(model, _UNKNOWN)
        return max(1, round(known.expected(added))) if added else 0

    def expected_output(self, model: str, session_mean: float | None, cap: int | None) -> int:
        """In tokens: the session's mean, else the model's, never above the cap."""
        known = self._models.get(model)
        mean = session_mean
        if mean is None:
            mean = DEFAULT_OUTPUT_TOKENS if known is None or known.output_tokens is None else known.output_tokens
        expected = max(1, round(mean))
        return expected if cap is None else max(1, min(expected, cap))

    def estimates(self) -> Iterator[Estimates]:
        """What `adopt` takes."""
        for name, known in self._models.items():
            yield Estimates(name, tuple(known.means), tuple(known.variances), known.output_tokens)

    def adopt(self, theirs: Estimates) -> None:
        """What another process has learned; what this one has is in it."""
        if len(theirs.means) != len(Kind) or len(theirs.variances) != len(Kind):  # the process is of another version
            return
        known = self._known(theirs.model)
        known.means, known.variances = list(theirs.means), list(theirs.variances)
        known.output_tokens = theirs.output_tokens

    def _known(self, model: str) -> _Model:
        known = self._models.get(model)
        if known is not None:
            self._models.move_to_end(model)
            return known
        known = self._models[model] = _Model()
        if len(self._models) > self._capacity:
            self._models.popitem(last=False)
        return known


_UNKNOWN = _Model()  # never learns


def _bounded(value: float, least: float, most: float) -> float:
    """As `max(least, min(most, value))`, in half the time."""
    return value if least <= value <= most else least if value < least else most


def output_mean(mean: float | None, tokens: float, decay: float) -> float:
    """Of answers' lengths, with one more. It counts as at most `_LEAP` times what was expected: it may be nonsense."""
    most = _LEAP * (mean if mean is not None and mean > DEFAULT_OUTPUT_TOKENS else DEFAULT_OUTPUT_TOKENS)
    bounded = tokens if tokens < most else most
    return bounded if mean is None else mean * decay + bounded * (1.0 - decay)
