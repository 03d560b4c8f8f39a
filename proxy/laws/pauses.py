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

HORIZON_S = 3600.0  # a session that stays away for longer counts as one that does not return
SLOT_S = 30.0  # to which the ages of sessions that are waited for are known
CURVE_S = 2.0  # for which a survival curve is used

_HORIZON_SLOTS = int(HORIZON_S // SLOT_S)
_HALVED = 4000.0  # pauses: then all count by half, so that those seen lately count for more
_PER_DOUBLING = 2  # bins, of equal ratio
_LEAST_S = 0.1  # shorter pauses count in the first bin
_PRIOR_TURNS = 4.0  # that what is believed at first is worth: half return, within 1 s to 10 minutes
_PRIOR_FROM_S, _PRIOR_TO_S = 1.0, 600.0


def _bin(gap_s: float) -> int:
    return int(math.log2(gap_s / _LEAST_S) * _PER_DOUBLING) if gap_s > _LEAST_S else 0


def _begin(number: float) -> float:
    """Where a bin begins; between two of them for a fraction."""
    return _LEAST_S * math.exp2(number / _PER_DOUBLING)


BINS = _bin(HORIZON_S) + 1
_ENDS_SLOTS = [*(_begin(number) / SLOT_S for number in range(1, BINS)), math.inf]  # the last one has all that is longer


class PauseHabits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    gaps: list[float]
    never: float
    waited_for: dict[int, int]


class Pauses:
    """After answers of one kind."""

    def __init__(self) -> None:
        first, last = _bin(_PRIOR_FROM_S), _bin(_PRIOR_TO_S)
        self._gaps = [0.0] * BINS  # how many returned after such pauses
        self._gaps[first:last] = [_PRIOR_TURNS / 2 / (last - first)] * (last - first)
        self._returned = _PRIOR_TURNS / 2  # the sum of these
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
        if not 0.0 <= gap_s <= HORIZON_S:  # below 0 the clock jumped
            return
        slot = int(ended_s // SLOT_S)
        if (waiting := self._waited_for.get(slot, 0)) > 1:
            self._waited_for[slot] = waiting - 1
        else:
            self._waited_for.pop(slot, None)
        self._gaps[_bin(gap_s)] += 1.0
        self._returned += 1.0
        if self._returned > _HALVED:
            self._gaps = [count / 2 for count in self._gaps]
            self._returned /= 2
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

    def _survival(self, now_s: float) -> list[float]:
        """At the begin of each bin, and at the end of the last one."""
        if self._curve and 0.0 <= now_s - self._made_s < CURVE_S:
            return self._curve
        counts = self._gaps
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
        return PauseHabits(list(self._gaps), self._never, dict(self._waited_for))

    def adopt(self, theirs: PauseHabits) -> None:
        self._gaps, self._returned = list(theirs.gaps), sum(theirs.gaps)
        self._never, self._waited_for, self._curve = theirs.never, dict(sorted(theirs.waited_for.items())), []
        self._slot = None
