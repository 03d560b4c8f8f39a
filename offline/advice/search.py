"""Which contenders are tried, in which order, and how closely: first all coarsely, then the best few.

Rounds have a fixed number of jobs, and each is planned from what the rounds before it found. So the same seed finds the
same, on however many processors, unless the budget ends it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from .contenders import Contender, Setting, neighbours
from .interval import Interval
from .trying import Figures, Job, TryOutcome

ROUND = 8  # jobs
COARSE_SESSIONS, COARSE_STEP = 100, 0.1
FINE_SESSIONS, FINE_STEP = 300, 0.03
NEAR_BEST = 0.9  # of the goodput of the last that would be refined: who is coarsely below is out
COARSE_SHARE = 0.6  # of the budget, after which nothing more is tried coarsely
FINE_SHARE = 0.9  # after which nothing more is tried closely: the rest is for figures at the log's rate, and settings
CLOSE = 6  # that are tried closely with the first draw
REFINED = 3  # of them, with the others
DRAWS = 3  # of the log's sessions, with which each of the best is refined
FAR = 5.0  # times its goodput: so high a rate is not played. All turns are late there, and it takes minutes
SETTINGS = 2  # at most, that the best is tried with beside its own


class Ask(Protocol):
    def __call__(self, jobs: Sequence[Job]) -> list[TryOutcome]: ...


@dataclass(frozen=True, slots=True)
class Standing:
    """One contender. `rates`: its goodput for each draw of the log's sessions."""

    contender: Contender
    rates: tuple[float, ...]
    at_log: Figures | None = None  # at the log's own rate; None: that is far beyond its goodput

    @property
    def goodput(self) -> Interval:
        return Interval.of(self.rates)

    def beside(self, best: Standing) -> Interval:
        """Its goodput over the best one's, draw by draw."""
        pairs = [(mine, other) for mine, other in zip(self.rates, best.rates, strict=False) if other]
        return Interval.of([mine / other for mine, other in pairs] or [0.0])


@dataclass(frozen=True, slots=True)
class Improvement:
    """The best contender with another setting, on the same draws."""

    setting: Setting
    standing: Standing


@dataclass(frozen=True, slots=True)
class Budget:
    """now: the clock that jobs read too, wherever they are done."""

    seconds: float = math.inf
    began_s: float = 0.0
    now: Callable[[], float] = time.monotonic

    def until_s(self, share: float) -> float:
        """When so much of it is spent."""
        return self.began_s + share * self.seconds

    def is_late(self, share: float) -> bool:
        return self.now() > self.until_s(share)


@dataclass(slots=True)
class Search:
    ask: Ask
    modes: Collection[str]
    near: float  # the log's own rate
    budget: Budget = Budget()
    coarse: dict[Contender, float] = field(default_factory=dict)  # goodput of one draw
    below: set[Contender] = field(default_factory=set)  # that are behind those that are refined
    untried: list[Contender] = field(default_factory=list)  # for want of time
    draws: int = 0  # 0: the best are known coarsely only, for want of time
    cut: int = 0  # searches that were ended before their end, and have found a rate
    windows: int = 0
    cpu_s: float = 0.0

    def tried(self, jobs: Sequence[Job]) -> list[TryOutcome]:
        found = self.ask(jobs)
        self.windows += sum(one.windows for one in found)
        self.cut += sum(one.is_cut and one.rate is not None for one in found)
        self.cpu_s += sum(one.cpu_s for one in found)
        return found

    # -- all of them, coarsely

    def pilot(self, contenders: Sequence[Contender]) -> None:
        """The first few: they set the bar, and show what a search costs."""
        self._coarsely(contenders[:REFINED])

    def seconds(self, contenders: int, processors: int) -> float:
        """About how long all takes, by what the pilot cost: most of the others cost one window."""
        window_s = self.cpu_s / max(1, self.windows)
        fine_s = window_s * FINE_SESSIONS / COARSE_SESSIONS
        coarse = 2 * (contenders - REFINED)
        fine = 4 * (CLOSE + REFINED * (DRAWS - 1) + SETTINGS * DRAWS) + REFINED
        return (window_s * coarse + fine_s * fine) / min(processors, ROUND)

    def all(self, contenders: Sequence[Contender]) -> None:
        """Those given, and what lies about the best of them."""
        waiting = [one for one in contenders if one not in self.coarse]
        while waiting:
            if self.budget.is_late(COARSE_SHARE):
                self.untried = [*dict.fromkeys((*self.untried, *waiting))]
                return
            self._coarsely(waiting[:ROUND])
            waiting = waiting[ROUND:] or neighbours(self.best(2), self.modes, {*self.coarse, *self.below})

    def _coarsely(self, contenders: Sequence[Contender]) -> None:
        best = self.best(REFINED)
        bar = NEAR_BEST * self.coarse[best[-1]] if len(best) == REFINED else None
        jobs = [
            Job(
                contender=one,
                sessions=COARSE_SESSIONS,
                precision=COARSE_STEP,
                near=self.coarse[best[0]] if best and self.coarse[best[0]] else self.near,
                bar=bar or None,
                until_s=self.budget.until_s(COARSE_SHARE),
            )
            for one in contenders
        ]
        for one, found in zip(contenders, self.tried(jobs), strict=True):
            if found.rate is not None:
                self.coarse[one] = found.rate
            elif found.is_cut:
                self.untried.append(one)
            else:
                self.below.add(one)

    def best(self, count: int) -> list[Contender]:
        """Equal ones in the order in which they were tried."""
        return sorted(self.coarse, key=lambda one: -self.coarse[one])[:count]

    # -- the best, closely

    def refined(self) -> list[Standing]:
        """The best first. Some contender has been tried coarsely."""
        rates = {one: list[float]() for one in _with_plain(self.best(CLOSE), self.best(len(self.coarse)))}
        finalists = [*rates]
        while self.draws < DRAWS and not self.budget.is_late(FINE_SHARE):
            self._closely(finalists, self.draws + 1, rates)
            if self.draws == 0:
                ranked = sorted((one for one in rates if rates[one]), key=lambda one: -rates[one][0])
                if not ranked:
                    break
                finalists = _with_plain(ranked[:REFINED], ranked)
            self.draws += 1
        if self.draws == 0:
            rates = {one: [self.coarse[one]] for one in rates}
        if self.draws < 2:
            finalists = [one for one in rates if rates[one]]
        figures = self._at_log([one for one in finalists if not 0.0 < FAR * max(rates[one]) < self.near])
        standings = [Standing(one, tuple(rates[one]), figures.get(one)) for one in finalists]
        return sorted(standings, key=lambda one: -one.goodput.value)

    def _closely(self, contenders: Sequence[Contender], draw: int, rates: dict[Contender, list[float]]) -> None:
        """Adds a goodput to the rates of each; none to those of whom there was no time to find any."""
        jobs = [
            Job(
                contender=one,
                draw=draw,
                sessions=FINE_SESSIONS,
                precision=FINE_STEP,
                near=(rates[one][-1] if rates[one] else self.coarse[one]) or self.near,
                until_s=self.budget.until_s(FINE_SHARE),
            )
            for one in contenders
        ]
        for one, found in zip(contenders, self.tried(jobs), strict=True):
            if found.rate is not None:
                rates[one].append(found.rate)

    def _at_log(self, contenders: Sequence[Contender]) -> dict[Contender, Figures | None]:
        until_s = self.budget.until_s(1.0)
        jobs = [Job(contender=one, sessions=FINE_SESSIONS, at=self.near, until_s=until_s) for one in contenders]
        return {one: found.figures for one, found in zip(contenders, self.tried(jobs), strict=True)}

    def improved(self, best: Standing, settings: Sequence[Setting]) -> list[Improvement]:
        """Of settings for which there was time. None where there is nothing to improve."""
        if self.budget.is_late(1.0) or not self.draws or not best.goodput.value:
            return []
        draws = range(1, len(best.rates) + 1)
        jobs = [
            Job(
                contender=best.contender,
                setting=setting,
                draw=draw,
                sessions=FINE_SESSIONS,
                precision=FINE_STEP,
                near=best.rates[draw - 1] or self.near,
                until_s=self.budget.until_s(1.0),
            )
            for setting in settings
            for draw in draws
        ]
        found = iter(self.tried(jobs))
        of_each = [[*islice(found, len(draws))] for _ in settings]
        return [
            Improvement(setting, Standing(best.contender, tuple(one.rate or 0.0 for one in outcomes)))
            for setting, outcomes in zip(settings, of_each, strict=True)
            if not any(one.is_cut for one in outcomes)
        ]

    def others(self, finalists: Sequence[Standing]) -> Iterator[tuple[Contender, float]]:
        """What was not refined, the best first, by its coarse goodput."""
        refined = {one.contender for one in finalists}
        return ((one, self.coarse[one]) for one in self.best(len(self.coarse)) if one not in refined)


def _with_plain(found: Sequence[Contender], ranked: Sequence[Contender]) -> list[Contender]:
    """And the best of all that is not disaggregated."""
    plain = (one for one in ranked if not one.is_disaggregated)
    return [*dict.fromkeys((*found, *islice(plain, 1)))]
