"""What one contender comes to, by windows that are played."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from ppd.proxy.decision_table.table import ScoredTable
from ppd.proxy.laws.profile_file import ProfileFile, with_cap
from ppd.servers.fleet.topology import Topology

from ..experiment.statistics import percentile
from ..goodput.modes import proxy_setup
from ..goodput.slo import Slo
from ..goodput.trials import Trials
from ..simulation.playback import Playback
from ..simulation.setup import Setup
from ..simulation.traced_prompts import TracedPrompts, traced_prompts
from .contenders import Contender, Setting
from .traffic import Traffic

AS_IT_IS = Setting()  # as the profile and the mode have it by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The same for all trials."""

    traffic: Traffic
    profile: ProfileFile
    slo: Slo
    scored: ScoredTable | None = None  # of mode `table`
    most_pause_s: float = 60.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A search for the goodput, or figures at one rate."""

    contender: Contender
    setting: Setting = AS_IT_IS
    draw: int = 0  # of the log's sessions
    sessions: int  # of a window, and as many later turns
    precision: float = 0.05
    near: float | None = None
    bar: float | None = None  # whoever does not pass at this rate is not searched
    at: float | None = None
    until_s: float = math.inf  # by `time.monotonic`, of all processes: after that a search tries no further rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """At one rate. None: no turn of a kind was answered."""

    rate: float
    first_share: float  # of the first turns, that meet the SLO
    later_share: float
    ttft_first: tuple[float, float] | None  # median and 99th percentile, in s
    ttft_later: tuple[float, float] | None
    tpot: tuple[float, float] | None
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TryOutcome:
    rate: float | None = None  # None: below the bar, or cut before any rate passed
    is_cut: bool = False  # the search was late: the rate may be higher
    figures: Figures | None = None
    windows: int = 0
    cpu_s: float = 0.0


class Trying:
    """Keeps the prompts of each draw."""

    def __init__(self, conditions: Conditions, now: Callable[[], float] = time.monotonic) -> None:
        self._conditions = conditions
        self._now = now
        self._prompts: dict[int, TracedPrompts] = {}

    def __call__(self, job: Job) -> TryOutcome:
        if self._is_late(job):
            return TryOutcome(is_cut=True)
        began_s, trials = time.process_time(), self._trials(job)
        rate, figures, is_cut = None, None, False
        if job.at is not None:
            figures = self._figures(trials, job.at)
        elif job.bar is None or trials.passes(job.bar, self._conditions.slo):
            found = trials.goodput(
                self._conditions.slo,
                precision=job.precision,
                near=job.near if job.bar is None else job.bar,
                is_late=partial(self._is_late, job),
            )
            is_cut = found.is_cut
            rate = None if is_cut and not found.rate else found.rate
        cpu_s = time.process_time() - began_s
        return TryOutcome(rate=rate, is_cut=is_cut, figures=figures, windows=trials.played, cpu_s=cpu_s)

    def _is_late(self, job: Job) -> bool:
        return self._now() > job.until_s

    def _trials(self, job: Job) -> Trials:
        conditions, contender, setting = self._conditions, job.contender, job.setting
        proxy = proxy_setup(
            contender.mode,
            Topology.parse(contender.topology),
            targets=conditions.slo.targets,
            scored=conditions.scored,
        )
        if setting.prefills_answer:
            proxy = replace(proxy, rules=msgspec.structs.replace(proxy.rules, prefills_answer=True))
        profile = with_cap(conditions.profile, setting.long_prefill_tokens)
        prompts = self._drawn(job.draw)
        later = min(job.sessions, job.sessions * prompts.later_turns // len(prompts.conversations))
        playback = Playback(rate=None, seed=1000 * conditions.seed + job.draw, sessions=job.sessions, later_turns=later)
        return Trials(prompts, contender.topology, Setup(profile=profile), proxy, playback)

    def _drawn(self, draw: int) -> TracedPrompts:
        if draw not in self._prompts:
            conditions = self._conditions
            self._prompts[draw] = traced_prompts(
                conditions.traffic.drawn(draw and 1000 * conditions.seed + draw),
                most_tokens=conditions.profile.kv_capacity_tokens,
                most_pause_s=conditions.most_pause_s,
            )
        return self._prompts[draw]

    def _figures(self, trials: Trials, rate: float) -> Figures:
        met, played = trials.met_at(rate, self._conditions.slo), trials.at(rate).played
        return Figures(
            rate=rate,
            first_share=met.first_met / max(1, met.first),
            later_share=met.later_met / met.later if met.later else 1.0,
            ttft_first=_middle_and_tail([one.record.ttft_s for one in played if one.record.turn == 1]),
            ttft_later=_middle_and_tail([one.record.ttft_s for one in played if one.record.turn > 1]),
            tpot=_middle_and_tail([one.record.tpot_s for one in played]),
            turns=len(played),
        )


def _middle_and_tail(values: Sequence[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (percentile(known, 0.5), percentile(known, 0.99)) if known else None
