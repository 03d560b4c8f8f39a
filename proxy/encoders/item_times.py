"""How long it takes to encode an item, on an E and in place: learnt for each model, by this process's turns. Pure.

An E's legs tell what an item takes there. What one takes in place shows in turns whose worker encoded some and that no
E was asked for: by so much their first token came later than the laws had predicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from ..laws.accuracy import Errors
from .choosing import ItemDecision, ItemSeconds

SAMPLES = 32  # the newest, whose median counts: a few turns that hang, or that the laws misjudge, change nothing
LEAST_SAMPLES = 8  # from which on it is known
FRESH_S = 300.0
"""After so long without a new one nothing is known: what was once measured as slow is tried again by that."""
MODELS_KEPT = 64

_TELLING = frozenset(
    (ItemDecision.ABSENT, ItemDecision.BUSY, ItemDecision.UNNAMED, ItemDecision.HELD, ItemDecision.PREFIX)
)


class ItemTimes:
    """Bounded: the model that has taught nothing for longest is forgotten."""

    def __init__(self) -> None:
        self._on_encoders: OrderedDict[str, _Samples] = OrderedDict()
        self._in_place: OrderedDict[str, _Samples] = OrderedDict()

    def of(self, model: str, now_s: float) -> ItemSeconds:
        return ItemSeconds(_known(self._on_encoders, model, now_s), _known(self._in_place, model, now_s))

    def encoded(self, model: str, took_s: float, items: int, now_s: float) -> None:
        """By an E, which was asked so long ago. items: the leg's own, and one for each request before it."""
        _learn(self._on_encoders, model, took_s / items, now_s)

    def computed(self, model: str, late_s: float, items: int, now_s: float) -> None:
        """late_s: measured less predicted, of a turn's first token. items: the worker had to encode before it."""
        _learn(self._in_place, model, late_s / items, now_s)


def tells(decisions: Iterable[ItemDecision]) -> bool:
    """Whether the time of a turn says what its worker's own items took: no E took part, and none of them is small."""
    return _TELLING.issuperset(decisions)


class _Samples(msgspec.Struct):
    newest: Errors
    seen_s: float


def _known(of: OrderedDict[str, _Samples], model: str, now_s: float) -> float | None:
    samples = of.get(model)
    if samples is None or len(samples.newest) < LEAST_SAMPLES or now_s - samples.seen_s > FRESH_S:
        return None
    return max(0.0, samples.newest.median)


def _learn(of: OrderedDict[str, _Samples], model: str, item_s: float, now_s: float) -> None:
    samples = of.get(model)
    if samples is None or now_s - samples.seen_s > FRESH_S:
        samples = of[model] = _Samples(Errors(SAMPLES), now_s)
    samples.newest.add(item_s)
    samples.seen_s = now_s
    of.move_to_end(model)
    if len(of) > MODELS_KEPT:
        of.popitem(last=False)
