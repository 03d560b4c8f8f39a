"""Pauses between an answer's end and the session's next turn.

A session that has not come back may still do so: it counts only for the time that it has been waited for (Kaplan and
Meier's estimate).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from operator import mul

import msgspec

from .log_histogram import LogHistogram

HORIZON_S = 3600.0  # a session that stays away for longer counts as one that does not return
SLOT_S = 30.0  # to which the ages of sessions that are waited for are known
CURVE_S = 2.0  # for which a survival curve is used

_HORIZON_SLOTS = int(HORIZON_S // SLOT_S)
_PER_DOUBLING = 2
_LEAST_S = 0.1
_PRIOR_TURNS = 4.0  # that what is believed at first is worth: half return, within 1 s to 10 minutes
_PRIOR_FROM_S, _PRIOR_TO_S = 1.0, 600.0


_BINS = LogHistogram(_LEAST_S, HORIZON_S, _PER_DOUBLING)
_BEGINS = [_BINS.begin(number) for number in range(len(_BINS.counts) + 1)]
_ENDS = _BEGINS[1:-1]  # but for the last bin, which has all that is longer
_ENDS_SLOTS = [*(end / SLOT_S for end in _ENDS), math.inf]


class PauseHabits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    gaps: list[float]
    never: float
    waited_for: dict[int, int]


class Pauses:
    """After answers of one kind."""

    def __init__(self) -> None:
        self._gaps = LogHistogram(_LEAST_S, HORIZON_S, _PER_DOUBLING)
        first, last = self._gaps.bin(_PRIOR_FROM_S), self._gaps.bin(_PRIOR_TO_S)
        for number in range(first, last):
            self._gaps.add(self._gaps.begin(number + 0.5), _PRIOR_TURNS / 2 / (last - first))
        self._never = _PRIOR_TURNS / 2
        self._waited_for: dict[int, int] = {}  # by the slot in which they ended
        self._slot: int | None = None  # in which the newest one ended: nobody is given up until another one begins
        self._curve: list[float] = []
        self._away_for_good = 1.0  # share
        self._made_s = math.nan

    def ended(self, now_s: float) -> None:
        slot, waited_for = int(now_s // SLOT_S), self._waited_for
        waited_for[slot] = waited_for.get(slot, 0) + 1
        if slot != self._slot:
            self._slot = slot
            self._give_up(slot - _HORIZON_SLOTS)

    def returned(self, ended_s: float, gap_s: float) -> None:
        """One that is not known to be waited for teaches all the same."""
        slot = int(ended_s // SLOT_S)
        if gap_s > HORIZON_S:
            return
        if (waiting := self._waited_for.get(slot, 0)) > 1:
            self._waited_for[slot] = waiting - 1
        else:
            self._waited_for.pop(slot, None)
        before = self._gaps.total
        self._gaps.add(gap_s)
        if self._gaps.total < before:
            self._never /= 2

    def _give_up(self, before_slot: int) -> None:
        while self._waited_for and (oldest := next(iter(self._waited_for))) < before_slot:
            self._never += self._waited_for.pop(oldest)
        if len(self._waited_for) > 2 * HORIZON_S / SLOT_S:  # a clock that jumps about
            self._never += self._waited_for.pop(next(iter(self._waited_for)))

    def away(self, idle_s: float, now_s: float) -> float:
        """The share of sessions that stay away for so long."""
        curve = self._survival(now_s)
        place = math.log2(min(idle_s, HORIZON_S) / _LEAST_S) * _PER_DOUBLING if idle_s > _LEAST_S else 0.0
        number = int(place)  # the last bin begins before the horizon
        here = curve[number]
        return here + (curve[number + 1] - here) * (place - number)

    def chance(self, idle_s: float, now_s: float) -> float:
        """That one who has stayed away for so long returns at all."""
        away, end = self.away(idle_s, now_s), self._away_for_good
        return (away - end) / away if away > end else 0.0

    def time_of(self, share: float, now_s: float) -> float:
        """When so small a share is still away."""
        curve = self._survival(now_s)
        for number in range(len(curve) - 1):
            if curve[number + 1] <= share:
                fall = curve[number] - curve[number + 1]
                return self._gaps.begin(number + (min(1.0, (curve[number] - share) / fall) if fall > 0.0 else 0.0))
        return HORIZON_S

    def _survival(self, now_s: float) -> list[float]:
        """At the begin of each bin, and at the end of the last one."""
        if self._curve and 0.0 <= now_s - self._made_s < CURVE_S:
            return self._curve
        counts = self._gaps.counts
        slots = sorted(self._waited_for)
        waiting = [0, *accumulate(map(self._waited_for.__getitem__, slots))]  # up to each slot
        newest = now_s / SLOT_S - 0.5
        # Those that have been waited for through all of each bin.
        waited = [waiting[bisect_right(slots, newest - end)] for end in _ENDS_SLOTS]
        seen = list(accumulate(reversed(counts)))
        seen.reverse()  # pauses that were so long or longer
        never = self._never
        at_risk = [never + some + others for some, others in zip(seen, waited, strict=True)]
        hazards = [count / all_ if all_ > 0.0 else 0.0 for count, all_ in zip(counts, at_risk, strict=True)]
        curve = [*accumulate([1.0 - hazard for hazard in hazards], mul, initial=1.0)]
        self._curve, self._made_s = curve, now_s
        self._away_for_good = self.away(HORIZON_S, now_s)
        return curve

    def habits(self) -> PauseHabits:
        return PauseHabits(list(self._gaps.counts), self._never, dict(self._waited_for))

    def adopt(self, theirs: PauseHabits) -> None:
        self._gaps.counts, self._gaps.total = list(theirs.gaps), sum(theirs.gaps)
        self._never, self._waited_for, self._curve = theirs.never, dict(sorted(theirs.waited_for.items())), []
        self._slot = None
