"""What is likely to come: whether and when a session's next turn comes.

That is learnt for each model, in histograms of bounded size that forget slowly. Pauses are told apart by the turn that
they follow, and by whether its answer called a tool.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import msgspec

from ..runtime.replicated import Replicated
from .pauses import BINS, HORIZON_S, PauseHabits, Pauses

MODELS_KEPT = 64
MOST_NOTED = 64  # habits; to learn so many takes 30 us
KINDS = 6  # of pauses, see `kind_of`


class AnswerEnded(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="answer"):
    model: str
    turn: int
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
    pauses: list[PauseHabits]


class Forecasts:
    """Above `MODELS_KEPT` the model unused for longest is forgotten.

    What turns teach is only noted, until somebody asks or `MOST_NOTED` are there: many in a row take less time each.
    """

    def __init__(self) -> None:
        self._models: OrderedDict[str, list[Pauses]] = OrderedDict()  # by `kind_of` what has ended
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
            pauses = self._known(habit.model)[kind_of(habit.turn, habit.calls_tool)]
            if isinstance(habit, SessionReturned):
                pauses.returned(habit.ended_s, habit.came_s - habit.ended_s)
            elif math.isfinite(habit.ended_s):
                pauses.ended(habit.ended_s)

    def chance_of_return(self, model: str, turn: int, *, calls_tool: bool, idle_s: float, now_s: float) -> float:
        """That a session comes back, whose turn `turn` ended `idle_s` ago."""
        return self.pauses(model)[kind_of(turn, calls_tool)].chance(idle_s, now_s) if idle_s < HORIZON_S else 0.0

    def pauses(self, model: str) -> Sequence[Pauses]:
        """By `kind_of` what has ended."""
        if self._noted:
            self._learn_noted()
        return self._models.get(model, _ALL_UNKNOWN)

    def _known(self, model: str) -> list[Pauses]:
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = [Pauses() for _ in range(KINDS)]
            if len(self._models) > MODELS_KEPT:
                self._models.popitem(last=False)
        else:
            self._models.move_to_end(model)
        return known

    def habits(self) -> Iterator[ModelHabits]:
        """What `adopt` takes."""
        self._learn_noted()
        for name, known in self._models.items():
            yield ModelHabits(name, [pauses.habits() for pauses in known])

    def adopt(self, theirs: ModelHabits) -> None:
        """What another process has learned; what this one has is in it."""
        self._learn_noted()  # which is in it too
        if [len(one.gaps) for one in theirs.pauses] != [BINS] * KINDS:  # the process is of another version
            return
        known = self._models[theirs.model] = [Pauses() for _ in range(KINDS)]
        for own, habits in zip(known, theirs.pauses, strict=True):
            own.adopt(habits)


_ALL_UNKNOWN = [Pauses()] * KINDS  # which never learns


def kind_of(turn: int, calls_tool: bool) -> int:
    """Of pauses, by the turn before and whether its answer called a tool."""
    return (0 if turn <= 1 else 2 if turn <= 3 else 4) + calls_tool
