"""What is likely to come: how long an answer will be, and whether and when a session's next turn comes.

Both are learnt for each model, in histograms of bounded size that forget slowly. A session keeps only the mean length
of its answers: how far answers lie from that mean is the model's. Pauses are told apart by the turn that they follow,
and by whether its answer called a tool.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import msgspec

from ..runtime.replicated import Replicated
from .log_histogram import LogHistogram
from .pauses import HORIZON_S, PauseHabits, Pauses

MODELS_KEPT = 64
MOST_TOKENS = 1 << 20
MOST_NOTED = 64  # habits; to learn so many takes 50 us

_LENGTHS_PER_DOUBLING = 4
_RATIOS = 64.0  # the middle of the histogram of an answer's length over its session's mean
_OWN_TURNS = 20.0  # answers of others at the same turn, from which on a session's mean says something
_USUAL_TOKENS, _USUAL_SPREAD = 256.0, 4.0  # of answers of a model of which nothing is known: median, and p90 over it


class OutputForecast(msgspec.Struct, frozen=True):
    """In tokens."""

    median: int
    p90: int  # nine in ten answers are no longer


class AnswerEnded(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="answer"):
    model: str
    turn: int
    tokens: int
    session_mean: float | None  # of the answers before it
    calls_tool: bool
    ended_s: float


class SessionReturned(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="return"):
    model: str
    turn: int  # that had ended
    calls_tool: bool  # its answer
    ended_s: float
    came_s: float


Habit = AnswerEnded | SessionReturned


class ModelHabits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All that is known of one model, for another process."""

    model: str
    lengths: list[float]
    ratios: list[list[float]]
    pauses: list[PauseHabits]


class _Model:
    def __init__(self) -> None:
        self.lengths = LogHistogram(1.0, MOST_TOKENS, _LENGTHS_PER_DOUBLING)
        self.ratios = [LogHistogram(1.0, _RATIOS * _RATIOS, _LENGTHS_PER_DOUBLING) for _ in range(3)]
        self.pauses = [Pauses() for _ in range(6)]


class Forecasts:
    """Above `MODELS_KEPT` the model unused for longest is forgotten.

    What turns teach is only noted, until somebody asks or `MOST_NOTED` are there: many in a row take less time each.
    """

    def __init__(self) -> None:
        self._models: OrderedDict[str, _Model] = OrderedDict()
        self._noted: list[Habit] = []
        self.replicated: Replicated[Habit] | None = None

    def learn(self, habit: Habit) -> None:
        self.take(habit)
        if self.replicated is not None:
            self.replicated.changed(habit)

    def take(self, habit: Habit) -> None:
        """What a turn of this process or of another one taught."""
        self._noted.append(habit)
        if len(self._noted) >= MOST_NOTED:
            self._learn_noted()

    def _learn_noted(self) -> None:
        noted, self._noted = self._noted, []
        for habit in noted:
            if isinstance(habit, AnswerEnded):
                self._answered(habit)
            elif 0.0 <= habit.came_s - habit.ended_s < math.inf:  # else the clock jumped
                pauses = self._known(habit.model).pauses[kind_of(habit.turn, habit.calls_tool)]
                pauses.returned(habit.ended_s, habit.came_s - habit.ended_s)

    def _answered(self, answer: AnswerEnded) -> None:
        known = self._known(answer.model)
        if math.isfinite(answer.ended_s):
            known.pauses[kind_of(answer.turn, answer.calls_tool)].ended(answer.ended_s)
        if answer.tokens <= 0:
            return
        tokens, mean = min(answer.tokens, MOST_TOKENS), answer.session_mean
        known.lengths.add(tokens)
        if mean is not None and 0.0 < mean < math.inf:
            known.ratios[_bucket(answer.turn - 1)].add(tokens / mean * _RATIOS)

    def output(self, model: str, session_mean: float | None, turn: int, cap: int | None = None) -> OutputForecast:
        """Of turn `turn`, by the session's earlier answers, else by the model's; never above the cap."""
        known = self._learnt(model)
        median, p90 = _USUAL_TOKENS, _USUAL_TOKENS * _USUAL_SPREAD
        if session_mean is not None and 0.0 < session_mean < math.inf:
            ratios = None if known is None else known.ratios[_bucket(turn - 1)]
            median, p90 = session_mean, session_mean * _USUAL_SPREAD
            if ratios is not None and ratios.total >= _OWN_TURNS:
                median = session_mean * ratios.quantile(0.5) / _RATIOS
                p90 = session_mean * ratios.quantile(0.9) / _RATIOS
        elif known is not None and known.lengths.total > 0.0:
            median, p90 = known.lengths.quantile(0.5), known.lengths.quantile(0.9)
        most = MOST_TOKENS if cap is None else max(1, min(cap, MOST_TOKENS))
        return OutputForecast(max(1, min(most, round(median))), max(1, min(most, round(p90))))

    def chance_of_return(self, model: str, turn: int, *, calls_tool: bool, idle_s: float, now_s: float) -> float:
        """That a session comes back, whose turn `turn` ended `idle_s` ago."""
        return self._pauses(model, turn, calls_tool).chance(idle_s, now_s) if idle_s < HORIZON_S else 0.0

    def pauses(self, model: str) -> Sequence[Pauses]:
        """By `kind_of` what has ended."""
        known = self._learnt(model)
        return _ALL_UNKNOWN if known is None else known.pauses

    def median_left_s(self, model: str, turn: int, *, calls_tool: bool, idle_s: float, now_s: float) -> float:
        """Until half of the sessions like it are back that come back at all."""
        pauses = self._pauses(model, turn, calls_tool)
        here, end = pauses.away(idle_s, now_s), pauses.away(HORIZON_S, now_s)
        return max(0.0, pauses.time_of((here + end) / 2, now_s) - (idle_s if idle_s > 0.0 else 0.0))

    def _pauses(self, model: str, turn: int, calls_tool: bool) -> Pauses:
        return self.pauses(model)[kind_of(turn, calls_tool)]

    def _learnt(self, model: str) -> _Model | None:
        if self._noted:
            self._learn_noted()
        return self._models.get(model)

    def _known(self, model: str) -> _Model:
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = _Model()
            if len(self._models) > MODELS_KEPT:
                self._models.popitem(last=False)
        else:
            self._models.move_to_end(model)
        return known

    def habits(self) -> Iterator[ModelHabits]:
        """What `adopt` takes."""
        self._learn_noted()
        for name, known in self._models.items():
            pauses = [one.habits() for one in known.pauses]
            yield ModelHabits(name, list(known.lengths.counts), [list(one.counts) for one in known.ratios], pauses)

    def adopt(self, theirs: ModelHabits) -> None:
        """What another process has learned; what this one has is in it."""
        self._learn_noted()  # which is in it too
        known = _Model()
        histograms = [known.lengths, *known.ratios]
        counts = [theirs.lengths, *theirs.ratios]
        pauses = [one.gaps for one in theirs.pauses]
        sizes = [len(one.counts) for one in histograms], [len(one.habits().gaps) for one in known.pauses]
        if ([len(one) for one in counts], [len(one) for one in pauses]) != sizes:  # the process is of another version
            return
        for histogram, one in zip(histograms, counts, strict=True):
            histogram.counts, histogram.total = list(one), sum(one)
        for own, habits in zip(known.pauses, theirs.pauses, strict=True):
            own.adopt(habits)
        self._models[theirs.model] = known


_UNKNOWN = Pauses()  # never learns
_ALL_UNKNOWN = [_UNKNOWN] * 6


def _bucket(turn: int) -> int:
    """1, 2 to 3, or more."""
    return 0 if turn <= 1 else 1 if turn <= 3 else 2


def kind_of(turn: int, calls_tool: bool) -> int:
    """Of pauses, by the turn before and whether its answer called a tool."""
    return (0 if turn <= 1 else 2 if turn <= 3 else 4) + calls_tool
