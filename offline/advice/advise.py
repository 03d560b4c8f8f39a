"""An advice: the search, and what it found."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ppd.proxy.errors import ConfigError

from ..replay.past_turns import PastLog
from .caveats import Caveat, ProfileFit, caveats, fits
from .contenders import Contender, first_contenders, settings_for
from .search import REFINED, Ask, Budget, Improvement, Search, Standing
from .trying import Conditions


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    workers: int
    modes: tuple[str, ...]
    rate: float  # of the log, or another that is asked for
    budget_s: float
    processors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """`standings`: the best first, of which that is recommended."""

    workers: int
    rate: float
    standings: list[Standing]
    improvements: list[Improvement]  # of that
    coarse: list[tuple[Contender, float]]  # others, the best first: goodput in small windows of one draw
    below: list[Contender]  # behind those
    untried: list[Contender]
    draws: int  # 0: the standings are by small windows too
    cut: int  # searches that the budget ended: what they found may be higher
    windows: int
    caveats: list[Caveat]
    fits: list[ProfileFit]

    @property
    def best(self) -> Standing:
        return self.standings[0]

    @property
    def runner_up(self) -> Standing | None:
        return self.standings[1] if len(self.standings) > 1 else None

    @property
    def meets_none(self) -> bool:
        """At any rate."""
        return not self.best.goodput.value


def advise(
    log: PastLog,
    conditions: Conditions,
    plan: Plan,
    ask: Ask,
    told: Callable[[str], None],
    now: Callable[[], float] = time.monotonic,
) -> Advice:
    """told: hears beforehand how long it takes, and how far it is. ConfigError where the budget is too small."""
    contenders = first_contenders(plan.workers, plan.modes)
    search = Search(ask, plan.modes, plan.rate, Budget(plan.budget_s, now(), now))
    told(f"{', '.join(map(str, contenders[:REFINED]))} are tried first, to see how long it takes")
    search.pilot(contenders)
    about_s = search.seconds(len(contenders), plan.processors)
    about = _duration(min(about_s, plan.budget_s))
    told(f"{len(contenders)} fleets and modes; about {about} on {plan.processors} processors")
    search.all(contenders)
    if not search.coarse:
        raise ConfigError(
            f"budget = {plan.budget_s / 60:g}: in that time no fleet was found that meets the targets", param="budget"
        )
    told(f"{search.windows} windows played; the best so far: {', '.join(map(str, search.best(3)))}; they are refined")
    standings = search.refined()
    improvements = search.improved(standings[0], settings_for(standings[0].contender, conditions.profile))
    told(f"{search.windows} windows in {_duration(search.cpu_s)} of processor time")
    profile, traffic = conditions.profile, conditions.traffic
    known = fits([turn for turn in log.turns if turn.model == traffic.model], profile)
    return Advice(
        workers=plan.workers,
        rate=plan.rate,
        standings=standings,
        improvements=improvements,
        coarse=[*search.others(standings)],
        below=sorted(search.below),
        untried=search.untried,
        draws=search.draws,
        cut=search.cut,
        windows=search.windows,
        caveats=caveats(log, traffic, profile, known, conditions.most_pause_s),
        fits=known,
    )


def modes_of(names: Collection[str], *, has_table: bool) -> tuple[str, ...]:
    """As asked for, or the usual few."""
    return tuple(names) or tuple(name for name in USUAL_MODES if has_table or name != "table")


USUAL_MODES = ("slo", "least_ttft", "always_local", "table", "replica")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
