"""A window of a trace whose turns are the same whatever the mode, and which ends as soon as its verdict is certain.

It lasts until so many sessions and so many later turns would have been sent if every answer came at the usual pace. So
modes are compared on the same arrivals, and the number of first turns is known beforehand. Of the later turns the most
that can come are known: no engine answers faster than its steps. So a share is out of reach as soon as too many turns
missed the SLO, and certain as soon as enough met it once the window has ended. Neither is an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise, takewhile

import numpy as np
from numpy.typing import NDArray

from ppd.proxy.laws.step_time import EngineProfile

from ..experiment.records import Record
from ..simulation.playback import USUAL_TOKEN_S, Playback, Window
from ..simulation.traced_prompts import TracedPrompts, TurnPrompt
from ..simulation.workers.links import Work
from .slo import Slo, idle_ttft_s

SPARE = 1.1  # of later turns: some come after the window where a fleet is slower than the usual pace

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TurnPace:
    """When each turn of each conversation would be sent, in s after its first one."""

    usual: tuple[Times, ...]
    soonest: tuple[Times, ...]  # no turn can be sent before

    @classmethod
    def of(cls, prompts: TracedPrompts, step_s: float) -> TurnPace:
        """step_s: of an idle engine."""
        conversations = prompts.conversations
        return cls(
            tuple(_offsets(turns, USUAL_TOKEN_S) for turns in conversations),
            tuple(_offsets(turns, step_s) for turns in conversations),
        )


def _offsets(turns: tuple[TurnPrompt, ...], token_s: float) -> Times:
    at_s, found = 0.0, [0.0]
    for before, turn in pairwise(turns):
        at_s += max(before.output_tokens * token_s + turn.think_s, turn.gap_s)
        found.append(at_s)
    return np.asarray(found)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a window: its times, the sessions that begin in it, and the most later turns that can be sent by its end."""

    begins_s: float
    ends_s: float
    first: int
    later_by_end: int  # those before the window included


def bounds(prompts: TracedPrompts, playback: Playback, pace: TurnPace) -> Bounds:
    begins_s = playback.warm_up(prompts)
    ends_s = _end(prompts, playback, pace, begins_s)
    first = later = 0
    for at_s, which in _starts(prompts, playback, ends_s):
        first += at_s >= begins_s
        later += int(np.searchsorted(pace.soonest[which], ends_s - at_s, side="right")) - 1
    return Bounds(begins_s, ends_s, first, later)


def _starts(prompts: TracedPrompts, playback: Playback, until_s: float) -> Iterator[tuple[float, int]]:
    known = ((at_s, which) for at_s, which, _ in playback.starts(prompts))
    return takewhile(lambda one: one[0] <= until_s, known)


def _end(prompts: TracedPrompts, playback: Playback, pace: TurnPace, begins_s: float) -> float:
    """When the last session has begun that is needed, and the last later turn."""
    wanted, sessions, known, ends_s = round(SPARE * playback.later_turns), 0, 0, begins_s
    coming: list[float] = []  # later turns, by when they are sent
    for at_s, which, _ in playback.starts(prompts):
        while coming and coming[0] <= at_s:
            known += heappop(coming) >= begins_s
        if sessions >= playback.sessions and known >= wanted:
            break
        sessions += at_s >= begins_s
        for offset_s in pace.usual[which][1:].tolist():
            heappush(coming, at_s + offset_s)
        ends_s = max(begins_s, at_s)
    return ends_s


@dataclass(slots=True, eq=False)
class JudgedWindow(Window):
    """`verdict` says whether both classes reach the share; None: not certain yet."""

    slo: Slo | None = None  # None: the window is played to its end
    profile: EngineProfile = field(default_factory=EngineProfile)
    first: int = 0  # turns that begin in it
    later_by_end: int = 0
    verdict: bool | None = None
    _met: list[int] = field(default_factory=lambda: [0, 0])  # first turns, later turns
    _missed: list[int] = field(default_factory=lambda: [0, 0])
    _later_before: int = 0  # sent before the window

    @classmethod
    def within(cls, limits: Bounds, playback: Playback, profile: EngineProfile, slo: Slo | None) -> JudgedWindow:
        first, later_by_end = limits.first, limits.later_by_end
        times = limits.begins_s, limits.ends_s
        return cls(playback, *times, slo=slo, profile=profile, first=first, later_by_end=later_by_end)

    def sent(self, turn: int, now_s: float) -> None:
        # In the class's own words: a dataclass with slots is made anew, which zero-argument super() cannot follow.
        Window.sent(self, turn, now_s)
        self._later_before += turn > 1 and now_s < self.begins_s

    def ended(self, record: Record, known_tokens: int, work: Work) -> None:
        Window.ended(self, record, known_tokens, work)
        if not record.measured or self.slo is None or self.verdict is not None:
            return
        met = self.slo.is_met(record, idle_ttft_s(self.profile, record.prompt_tokens, known_tokens))
        kind = record.turn > 1
        self._met[kind] += met
        self._missed[kind] += not met
        most = self.later_by_end - self._later_before if kind else self.first
        if self._is_out_of_reach(kind, most):
            self.verdict = False

    def is_over(self, now_s: float) -> bool:
        if self.verdict is not None:
            return True
        if self.ends_s is None or now_s <= self.ends_s:
            return False
        if self.slo is not None:
            self._judge()
        return self.verdict is not None or Window.is_over(self, now_s)

    def _is_out_of_reach(self, kind: bool, most: int) -> bool:
        assert self.slo is not None, "the caller saw it"
        return most - self._missed[kind] < self.slo.share * most

    def _judge(self) -> None:
        """After its end, when all that was sent in it is known."""
        assert self.slo is not None, "the caller saw it"
        counts = (self.sessions, self.later_turns)
        if not self.is_whole or any(self._is_out_of_reach(bool(kind), most) for kind, most in enumerate(counts)):
            self.verdict = False
        elif all(self._met[kind] >= self.slo.share * most for kind, most in enumerate(counts)):
            self.verdict = True
