"""The highest rate that passes, by few trials."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ppd.proxy.errors import ConfigError

LEAST_RPS, MOST_RPS = 1e-3, 1e3  # sessions a second, between which a goodput is sought
FACTOR = 2.0  # between the rates that are tried until the highest is between two of them


@dataclass(frozen=True, slots=True)
class HighestRate:
    """`rate`: the highest that passed; 0 where none did. `failed`: the lowest above it that did not; None: none."""

    rate: float
    failed: float | None
    trials: int
    is_cut: bool = False  # it was late before all was tried


def highest_rate(
    passes: Callable[[float], bool],
    *,
    first: float = 1.0,
    least: float = LEAST_RPS,
    most: float = MOST_RPS,
    precision: float = 0.02,
    near: float | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> HighestRate:
    """Brackets the highest rate that passes, from `first` on by doubling and halving, then bisects its logarithm.

    Rates are `first * (1 + precision) ** k`, so searches that begin alike try the same rates. Where rates pass above
    one that fails, one of the rates at which that changes is found. near: where the rate is expected: the search begins
    there, with small steps that grow. is_late: asked after each trial, whether it is to be the last.
    """
    if not 0 < least <= first <= most < math.inf:
        raise ConfigError(f"first = {first}: must be between {least} and {most}, all above 0", param="first")
    if not precision > 0:
        raise ConfigError(f"precision = {precision}: must be above 0", param="precision")
    step = math.log1p(precision)
    lowest, highest = (math.trunc(math.log(bound / first) / step) for bound in (least, most))
    known: dict[int, bool] = {}

    def tried(place: int) -> bool:
        if place not in known:
            known[place] = passes(first * math.exp(place * step))
        return known[place]

    farthest = max(1, round(math.log(FACTOR) / step))
    begin = 0 if near is None else min(highest, max(lowest, round(math.log(near / first) / step)))
    jump = farthest if near is None else 1
    good, bad = (begin, None) if tried(begin) else (None, begin)
    while bad is None and good is not None and good < highest and not is_late():
        following = min(good + jump, highest)
        good, bad = (following, None) if tried(following) else (good, following)
        jump = min(2 * jump, farthest)
    while good is None and bad is not None and bad > lowest and not is_late():
        following = max(bad - jump, lowest)
        good, bad = (following, bad) if tried(following) else (None, following)
        jump = min(2 * jump, farthest)
    while good is not None and bad is not None and bad - good > 1 and not is_late():
        middle = (good + bad) // 2
        good, bad = (middle, bad) if tried(middle) else (good, middle)
    is_cut = (highest + 1 if bad is None else bad) - (lowest - 1 if good is None else good) > 1
    rate = 0.0 if good is None else first * math.exp(good * step)
    return HighestRate(rate, None if bad is None else first * math.exp(bad * step), len(known), is_cut)
