"""One mode in one cell: its goodput by each question and seed, and its figures at a rate."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from ppd.offline.experiment.statistics import percentile
from ppd.offline.goodput.highest_rate import highest_rate
from ppd.offline.goodput.modes import ORACLE, proxy_setup
from ppd.offline.goodput.slo import BLOCK_TOKENS, Attainment, Slo, attainment
from ppd.offline.goodput.windows import Bounds, JudgedWindow, TurnPace, bounds
from ppd.offline.simulation.modelled_hardware import profile_for
from ppd.offline.simulation.playback import Playback, PlayedTurn
from ppd.offline.simulation.setup import Setup, pulled
from ppd.offline.simulation.simulate import play
from ppd.proxy.config import Mode
from ppd.proxy.laws.profile_file import ProfileFile
from ppd.proxy.laws.targets import USUAL as USUAL_TARGETS
from ppd.proxy.laws.targets import SloTargets

from . import traces
from .cells import Cell
from .records import AtRate, CellRecord
from .variants import CellSetting, varied

AT_RATE_SEEDS = 3
HEAR_TPOT = frozenset({Mode.SLO.value, ORACLE})  # they decide by the TPOT that is asked for, all others alike


class Connector(StrEnum):
    PULL = "pull"  # D reads the blocks that it lacks, and P goes on meanwhile, as with NIXL
    PROFILE = "profile"  # as the profile has it: the shipped one was fitted to P2pNccl, which pushes whole prompts


@dataclass(frozen=True, slots=True)
class Question:
    """A mean TPOT, a share of turns, and how many seeds answer it."""

    tpot_s: float
    share: float
    seeds: int

    @property
    def name(self) -> str:
        return f"{self.tpot_s * 1000:g}ms@{self.share:g}"

    @property
    def slo(self) -> Slo:
        return Slo(tpot_s=self.tpot_s, share=self.share)

    def is_looser(self, other: Question) -> bool:
        return self.tpot_s >= other.tpot_s and self.share <= other.share


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How cells are measured; the same for all of a run."""

    data: Path
    hardware: str = "h100-llama-3.1-8b"
    connector: Connector = Connector.PULL
    questions: tuple[Question, ...] = (Question(0.025, 0.9, 3), Question(0.025, 0.98, 6))
    sessions: int = 300
    later_turns: int = 300
    precision: float = 0.05

    @property
    def name(self) -> str:
        """Records of one name can stand beside each other."""
        return f"{self.hardware} {self.connector} {self.sessions}+{self.later_turns} {self.precision:g}"

    def setting(
        self, cell: Cell, mode: str, *, rate: float, seed: int, targets: SloTargets = USUAL_TARGETS
    ) -> CellSetting:
        """targets: what the mode is told."""
        profile = _profile(self.hardware, self.connector)
        playback = Playback(rate=rate, seed=seed, sessions=self.sessions, later_turns=self.later_turns)
        proxy = proxy_setup(mode, cell.topology, targets=targets)
        return varied(cell.variant, CellSetting(cell.topology, Setup(profile=profile), proxy, playback))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureJob:
    """What an executor is asked for: a search, or the figures at a rate."""

    cell: Cell
    mode: str
    method: Method
    near: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # another mode's rates, by question and seed
    at_rate: float | None = None


def measure(job: MeasureJob) -> CellRecord:
    began_s = time.process_time()
    search = Search(job.cell, job.mode, job.method)
    if job.at_rate is None:
        found = CellRecord(cell=job.cell.name, mode=job.mode, goodput=search.goodput(job.near), windows=search.windows)
    else:
        found = CellRecord(cell=job.cell.name, mode=job.mode, goodput={}, at_rate=search.figures(job.at_rate))
    return msgspec.structs.replace(
        found, method=job.method.name, windows=search.windows, cpu_s=time.process_time() - began_s
    )


class Search:
    """Windows of one mode in one cell. Questions share what they find out."""

    def __init__(self, cell: Cell, mode: str, method: Method) -> None:
        self._cell = cell
        self._mode = mode
        self._method = method
        self._known: dict[tuple[int, float, SloTargets], dict[Question, bool]] = {}  # by seed, rate and what is told
        self.windows = 0

    def goodput(self, near: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        """near: another mode's. Seeds are alike for all modes: one that is easy for that mode is so for this one."""
        found: dict[str, tuple[float, ...]] = {}
        better = 1.0  # than that mode, by the newest answer
        for question in sorted(self._method.questions, key=lambda one: (one.share, -one.tpot_s)):
            known, rates, latest = near.get(question.name, ()), list[float](), 0.0
            for seed in range(question.seeds):
                other = known[seed] if seed < len(known) else 0.0
                rate = self._highest(question, seed, better * other or latest or None)
                better = rate / other if rate and other else better
                latest = rate or latest
                rates.append(rate)
            found[question.name] = tuple(rates)
        return found

    def _highest(self, question: Question, seed: int, near: float | None) -> float:
        return highest_rate(
            lambda rate: self.passes(question, seed, rate),
            precision=self._method.precision,
            near=near,
        ).rate

    def passes(self, question: Question, seed: int, rate: float) -> bool:
        told = self._told(question)
        known = self._known.setdefault((seed, rate, told), {})
        for other, passed in known.items():
            if (passed and question.is_looser(other)) or (not passed and other.is_looser(question)):
                return passed
        window = self.window(seed, rate, question.slo, told)
        if window.verdict is None:  # it was played to its end
            for other in self._method.questions:
                if self._told(other) == told:
                    known[other] = window.is_whole and self._attained(window, other.slo).reaches(other.share)
        else:
            known[question] = window.verdict
        return known[question]

    def _told(self, question: Question) -> SloTargets:
        return question.slo.targets if self._mode in HEAR_TPOT else USUAL_TARGETS

    def window(self, seed: int, rate: float, slo: Slo | None = None, told: SloTargets = USUAL_TARGETS) -> JudgedWindow:
        """slo: None: played to its end."""
        self.windows += 1
        setting = self._method.setting(self._cell, self._mode, rate=rate, seed=seed, targets=told)
        profile = (setting.idle or setting.setup.profile).costs
        prompts = traces.load(self._cell.trace, self._method.data)
        limits = _bounds(self._cell.trace, self._method.data, setting.playback, profile.step_s)
        window = JudgedWindow.within(limits, setting.playback, profile, slo)
        play(prompts, setting.playback, setting.topology.name, setting.setup, setting.proxy, window)
        return window

    def figures(self, rate: float) -> AtRate:
        told = self._told(self._method.questions[0])
        played = [self.window(seed, rate, told=told) for seed in range(AT_RATE_SEEDS)]
        turns = [turn for window in played for turn in window.played]
        met = self._attained_turns(turns, self._method.questions[0].slo)
        first = [turn for turn in turns if turn.record.turn == 1]
        later = [turn for turn in turns if turn.record.turn > 1]
        all_turns = sum(window.all_turns for window in played)
        return AtRate(
            rate=rate,
            tpot_s=self._method.questions[0].tpot_s,
            seeds=len(played),
            turns=len(turns),
            unfinished=sum(bool(turn.record.error) for turn in turns),
            first_share=met.first_met / max(1, met.first),
            later_share=met.later_met / max(1, met.later),
            ttft_first=_middle_and_tail([turn.record.ttft_s for turn in first]),
            ttft_later=_middle_and_tail([turn.record.ttft_s for turn in later]),
            tpot=_middle_and_tail([turn.record.tpot_s for turn in turns]),
            moved_bytes_a_turn=sum(window.moved_bytes for window in played) / max(1, all_turns),
            **computed(turns),
        )

    def _attained(self, window: JudgedWindow, slo: Slo) -> Attainment:
        return self._attained_turns(window.played, slo)

    def _attained_turns(self, turns: Sequence[PlayedTurn], slo: Slo) -> Attainment:
        return attainment(turns, slo, _profile(self._method.hardware, self._method.connector).costs)


def computed(turns: Sequence[PlayedTurn]) -> dict[str, float]:
    """What was computed of the prompts of turns that were answered, beside what had to be."""
    answered = [turn for turn in turns if not turn.record.error and turn.record.cached_tokens is not None]
    known = needed = done = again = 0
    for turn in answered:
        cached, whole_blocks = turn.record.cached_tokens or 0, turn.known_tokens - turn.known_tokens % BLOCK_TOKENS
        known += whole_blocks
        needed += turn.record.prompt_tokens - whole_blocks
        done += turn.record.prompt_tokens - cached
        again += max(0, whole_blocks - cached)
    return {"recomputed_share": again / max(1, known), "prefill_ratio": done / max(1, needed)}


def _middle_and_tail(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    known = np.asarray([value for value in values if value is not None])
    return (percentile(known, 0.5), percentile(known, 0.99)) if len(known) else (None, None)


@lru_cache(maxsize=4)
def _profile(hardware: str, connector: Connector) -> ProfileFile:
    profile = profile_for(hardware)
    return profile if connector is Connector.PROFILE else pulled(profile)


@lru_cache(maxsize=8)
def _pace(trace: str, data: Path, step_s: float) -> TurnPace:
    return TurnPace.of(traces.load(trace, data), step_s)


@lru_cache(maxsize=4096)
def _bounds(trace: str, data: Path, playback: Playback, step_s: float) -> Bounds:
    return bounds(traces.load(trace, data), playback, _pace(trace, data, step_s))
