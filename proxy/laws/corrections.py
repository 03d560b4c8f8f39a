"""What measured times say of the laws: for each worker a factor for TTFT and one for TPOT.

Each factor follows the logarithm of measured over predicted time, in steps that no single turn makes large. With few
turns, or after long silence, a worker's factor is mostly that of its likes, and theirs is mostly 1.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TypeVar

import msgspec
from msgspec.structs import replace

MOST = math.log(4.0)
"""Of a factor, either way: a law that is wrong by more needs another profile."""

_STEP = 0.5  # a turn counts as off by no more than exp of this, from what was believed before it
_STEP_OF_LIKES = 0.25  # the same for what they have in common, which one slow worker hardly moves
_GAIN = 0.05  # of a turn, once there were 1 / _GAIN
_MOST_TURNS = 100.0  # that count
_PRIOR_TURNS = 4.0  # that what is known without any turn of its own is worth
_PRIOR_TURNS_OFF = 20.0  # the same for how far turns lie from it
_MOST_OFF = 1.0
_HALF_LIFE_S = 1800.0
_MOVE = 0.2  # in a second, after the first turns, also of `off`: after a standstill all turns look slow at once
_FIRST_TURNS = 5.0
_LEAST_S = 1e-6  # a shorter time was not measured
_MOST_S = 86_400.0
_NEWS = 0.01  # by which a factor has to move until workers that share it hear of it

WORKERS_KEPT = 4096
LIKES_KEPT = 256


def bounded(value: float, least: float, most: float) -> float:
    """As `max(least, min(most, value))`, in half the time."""
    return value if least <= value <= most else least if value < least else most


class Figure(StrEnum):
    TTFT = "ttft"
    TPOT = "tpot"


TTFT, TPOT = Figure.TTFT, Figure.TPOT  # named, as Python 3.11 takes 0.2 us to find a member of an enum

USUAL_SPREAD = 0.35
"""Of TTFT's logarithm of measured over predicted time, before any turn has shown it."""
LEAST_SPREAD = 0.1
_MEAN_OFF = math.sqrt(2.0 / math.pi)  # the mean distance from the middle, over the standard deviation


class Measured(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One figure of one turn."""

    worker: str  # its address
    incarnation: str
    likes: str  # what it has in common with others: profile, role and model
    figure: Figure
    plain_s: float  # predicted by the profile alone
    factor: float  # of the worker, when the turn was decided
    measured_s: float

    @property
    def profile(self) -> str:
        return self.likes.partition("/")[0]

    @property
    def error(self) -> float:
        """Of what was predicted, relative to what was measured."""
        return abs(self.plain_s * self.factor - self.measured_s) / self.measured_s

    @property
    def is_sound(self) -> bool:
        """A clock that stood still, or a figure that is none, teaches nothing."""
        plain_s, least_s, most_s = self.plain_s, _LEAST_S, _MOST_S
        is_predicted = least_s <= plain_s <= most_s and least_s <= plain_s * self.factor <= most_s
        return is_predicted and least_s <= self.measured_s <= most_s  # NaN is not


class Learnt(msgspec.Struct, array_like=True, gc=False):
    """What turns have taught of one factor."""

    log: float = 0.0
    turns: float = 0.0
    seen_s: float = 0.0
    second_s: float = -math.inf  # since when `moved` and `off_moved` count
    moved: float = 0.0
    off: float = 0.0  # how far a turn lies from it, in the mean
    off_moved: float = 0.0

    @property
    def is_possible(self) -> bool:
        """False of what no turns teach; NaN is none of it."""
        is_bounded = -MOST <= self.log <= MOST and 0.0 <= self.off <= _MOST_OFF
        return is_bounded and 0.0 <= self.turns <= _MOST_TURNS and math.isfinite(self.seen_s)

    def learn(self, log_ratio: float, now_s: float, step: float) -> None:
        turns, moved, off_moved = self.turns_left(now_s), self.moved, self.off_moved  # each is read and set once
        gain = bounded(1.0 / (turns + 1.0), _GAIN, 1.0)
        off_by = log_ratio - self.log
        move = gain * bounded(off_by, -step, step)
        off_move = gain * (bounded(abs(off_by), 0.0, _MOST_OFF) - self.off)
        if not 0.0 <= now_s - self.second_s < 1.0:
            self.second_s, moved, off_moved = now_s, 0.0, 0.0
        if turns >= _FIRST_TURNS:
            move = bounded(move, -_MOVE - moved, _MOVE - moved)
            off_move = bounded(off_move, -_MOVE - off_moved, _MOVE - off_moved)
        self.moved, self.off_moved = moved + move, off_moved + off_move
        self.log = bounded(self.log + move, -MOST, MOST)
        self.off += off_move
        self.turns, self.seen_s = bounded(turns + 1.0, 0.0, _MOST_TURNS), now_s

    def turns_left(self, now_s: float) -> float:
        """Of those that taught it, as far as they still count."""
        silent_s = now_s - self.seen_s
        return self.turns * math.exp2(-silent_s / _HALF_LIFE_S) if silent_s > 0.0 else self.turns

    def shrunk(self, prior: float, now_s: float) -> float:
        turns = self.turns_left(now_s)
        return (turns * self.log + _PRIOR_TURNS * prior) / (turns + _PRIOR_TURNS)

    def off_shrunk(self, prior: float, now_s: float) -> float:
        turns = self.turns_left(now_s)
        return (turns * self.off + _PRIOR_TURNS_OFF * prior) / (turns + _PRIOR_TURNS_OFF)


class Corrections:
    """Of all workers. Bounded: the worker that taught nothing for longest is forgotten."""

    def __init__(self) -> None:
        self._of_workers: OrderedDict[tuple[str, Figure], tuple[str, Learnt]] = OrderedDict()  # with the incarnation
        self._of_likes: OrderedDict[tuple[str, Figure], Learnt] = OrderedDict()
        self._told: dict[tuple[str, Figure], float] = {}  # what `factor` said of likes
        self.turns = 0  # figures that have taught something
        self.likes_changed = 0  # changes whenever all workers' factors may have

    def learn(self, measured: Measured, now_s: float) -> bool:
        """Whether it taught anything."""
        if not measured.is_sound:
            return False
        log_ratio = math.log(measured.measured_s / measured.plain_s)
        self.turns += 1
        likes = self._likes(measured.likes, measured.figure)
        likes.learn(log_ratio, now_s, _STEP_OF_LIKES)
        self._own(measured).learn(log_ratio, now_s, _STEP)
        common, key = likes.shrunk(0.0, now_s), (measured.likes, measured.figure)
        if abs(common - self._told.get(key, 0.0)) > _NEWS:
            self._told[key] = common
            self.likes_changed += 1
        return True

    def factor(self, worker: str, incarnation: str, likes: str, figure: Figure, now_s: float) -> float:
        common = self._of_likes.get((likes, figure))
        prior = 0.0 if common is None else common.shrunk(0.0, now_s)
        known = self._of_workers.get((worker, figure))
        if known is None or known[0] != incarnation:
            return math.exp(prior)
        return math.exp(known[1].shrunk(prior, now_s))

    def ttft_spread(self, worker: str, incarnation: str, likes: str, now_s: float) -> float:
        """Standard deviation of the logarithm of measured over predicted TTFT, as of a normal distribution."""
        common = self._of_likes.get((likes, TTFT))
        off = USUAL_SPREAD * _MEAN_OFF
        if common is not None:
            off = common.off_shrunk(off, now_s)
        known = self._of_workers.get((worker, TTFT))
        if known is not None and known[0] == incarnation:
            off = known[1].off_shrunk(off, now_s)
        return max(LEAST_SPREAD, off / _MEAN_OFF)

    def count(self, worker: str, incarnation: str, figure: Figure, now_s: float) -> float:
        """Turns that still count for it."""
        known = self._of_workers.get((worker, figure))
        return 0.0 if known is None or known[0] != incarnation else known[1].turns_left(now_s)

    def rows(self) -> Iterator[CorrectionRow]:
        """What `adopt` takes."""
        for (worker, figure), (incarnation, learnt) in self._of_workers.items():
            yield CorrectionRow(worker, incarnation, figure, replace(learnt))
        for (likes, figure), learnt in self._of_likes.items():
            yield CorrectionRow(likes, None, figure, replace(learnt))

    def adopt(self, rows: Iterable[CorrectionRow]) -> None:
        """What another process has learned; what this one has is in it."""
        for row in rows:
            if not row.learnt.is_possible:
                continue
            if row.incarnation is None:
                self._keep_likes((row.of, row.figure), row.learnt)
            else:
                _keep(self._of_workers, (row.of, row.figure), (row.incarnation, row.learnt), 2 * WORKERS_KEPT)
        self.likes_changed += 1

    def _own(self, measured: Measured) -> Learnt:
        key = (measured.worker, measured.figure)
        known = self._of_workers.get(key)
        if known is None or known[0] != measured.incarnation:
            known = (measured.incarnation, Learnt())
        _keep(self._of_workers, key, known, 2 * WORKERS_KEPT)
        return known[1]

    def _likes(self, likes: str, figure: Figure) -> Learnt:
        learnt = self._of_likes.get((likes, figure)) or Learnt()
        self._keep_likes((likes, figure), learnt)
        return learnt

    def _keep_likes(self, key: tuple[str, Figure], learnt: Learnt) -> None:
        gone = _keep(self._of_likes, key, learnt, LIKES_KEPT)
        if gone is not None:
            self._told.pop(gone, None)


class CorrectionRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One factor, as one process tells another."""

    of: str  # a worker's address, or what workers have in common
    incarnation: str | None  # None: the latter
    figure: Figure
    learnt: Learnt


K = TypeVar("K")
V = TypeVar("V")


def _keep(known: OrderedDict[K, V], key: K, value: V, most: int) -> K | None:
    """Returns the key that is forgotten for it."""
    known[key] = value
    known.move_to_end(key)
    return known.popitem(last=False)[0] if len(known) > most else None
