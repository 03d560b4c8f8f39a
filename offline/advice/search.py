"""Which contenders are tried, in which order, and how closely: first all coarsely, then the best few.

Rounds have a fixed number of jobs, and each is planned from what the rounds before it found. So the same seed finds the
same, on however many processors, unless the budget ends it.
"""

from __future__ import annotations

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
COARSE_SHARE = 0.6  # of the budget, after which no contender more is tried coarsely
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


@dataclass(slots=True)
class Search:
    ask: Ask
    modes: Collection[str]
    near: float  # the log's own rate
    is_late: Callable[[float], bool] = lambda share: False  # whether so much of the budget is spent
    coarse: dict[Contender, float] = field(default_factory=dict)  # goodput of one draw
    below: set[Contender] = field(default_factory=set)  # that are behind those that are refined
    untried: list[Contender] = field(default_factory=list)  # for want of time
    draws: int = 0
    windows: int = 0
    cpu_s: float = 0.0

    def tried(self, jobs: Sequence[Job]) -> list[TryOutcome]:
        found = self.ask(jobs)
        self.windows += sum(one.windows for one in found)
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
            if self.is_late(COARSE_SHARE):
                self.untried = waiting
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
            )
            for one in contenders
        ]
        for one, found in zip(contenders, self.tried(jobs), strict=True):
            if found.rate is None:
                self.below.add(one)
            else:
                self.coarse[one] = found.rate

    def best(self, count: int) -> list[Contender]:
        """Equal ones in the order in which they were tried."""
        return sorted(self.coarse, key=lambda one: -self.coarse[one])[:count]

    # -- the best, closely

    def refined(self) -> list[Standing]:
        """The best first."""
        rates = {one: list[float]() for one in _with_plain(self.best(CLOSE), self.best(len(self.coarse)))}
        finalists = [*rates]
        for draw in range(1, DRAWS + 1):
            if draw > 1 and self.is_late(1.0):
                break
            if draw == 2:
                ranked = sorted(rates, key=lambda one: -rates[one][0])
                finalists = _with_plain(ranked[:REFINED], ranked)
            jobs = [
                Job(
                    contender=one,
                    draw=draw,
                    sessions=FINE_SESSIONS,
                    precision=FINE_STEP,
                    near=(rates[one][-1] if rates[one] else self.coarse[one]) or self.near,
                )
                for one in finalists
            ]
            for one, found in zip(finalists, self.tried(jobs), strict=True):
                rates[one].append(found.rate or 0.0)
            self.draws = draw
        if self.draws == 1:
            finalists = sorted(rates, key=lambda one: -rates[one][0])
        near = [one for one in finalists if not 0.0 < FAR * max(rates[one]) < self.near]
        jobs = [Job(contender=one, sessions=FINE_SESSIONS, at=self.near) for one in near]
        figures = {one: found.figures for one, found in zip(near, self.tried(jobs), strict=True)}
        standings = [Standing(one, tuple(rates[one]), figures.get(one)) for one in finalists]
        return sorted(standings, key=lambda one: -one.goodput.value)

    def improved(self, best: Standing, settings: Sequence[Setting]) -> list[Improvement]:
        """None for want of time, or where there is nothing to improve."""
        if self.is_late(1.0) or not best.goodput.value:
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
            )
            for setting in settings
            for draw in draws
        ]
        found = iter(self.tried(jobs))
        return [
            Improvement(setting, Standing(best.contender, tuple(next(found).rate or 0.0 for _ in draws)))
            for setting in settings
        ]

    def others(self, finalists: Sequence[Standing]) -> Iterator[tuple[Contender, float]]:
        """What was not refined, the best first, by its coarse goodput."""
        refined = {one.contender for one in finalists}
        return ((one, self.coarse[one]) for one in self.best(len(self.coarse)) if one not in refined)


def _with_plain(found: Sequence[Contender], ranked: Sequence[Contender]) -> list[Contender]:
    """And the best of all that is not disaggregated."""
    plain = (one for one in ranked if not one.is_disaggregated)
    return [*dict.fromkeys((*found, *islice(plain, 1)))]
