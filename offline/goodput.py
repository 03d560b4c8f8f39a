"""Goodput: the highest rate of sessions at which first turns and later turns, each by itself, meet the SLO."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ppd.proxy.errors import ConfigError
from ppd.proxy.laws.step_time import EngineProfile, attention_pairs, request_time_s, step_time_s

from .experiment.records import Record
from .simulation.playback import Playback, PlayedTurn, Window
from .simulation.routing import ProxySetup
from .simulation.setup import Setup
from .simulation.simulate import play
from .simulation.traced_prompts import TracedPrompts

BLOCK_TOKENS = 16  # hits are whole blocks
FACTOR = 2.0  # between the rates that are tried until the highest is between two of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """A turn's TTFT may be `ttft_s`, or `ttft_factor` times what it takes on an idle engine, whichever is more."""

    ttft_s: float = 0.25
    ttft_factor: float = 3.0
    tpot_s: float = 0.025  # the mean of the turn
    share: float = 0.9  # of the first turns that must meet it, and of the later ones

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share = {self.share}: must be above 0 and at most 1", param="share")
        for name in ("ttft_s", "ttft_factor", "tpot_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 0", param=name)

    def is_met(self, record: Record, idle_ttft_s: float) -> bool:
        """A turn that failed or did not end misses it; an answer of one token has no TPOT."""
        if record.error or record.ttft_s is None:
            return False
        limit_s = max(self.ttft_s, self.ttft_factor * idle_ttft_s)
        return record.ttft_s <= limit_s and (record.tpot_s is None or record.tpot_s <= self.tpot_s)


@dataclass(frozen=True, slots=True)
class Attainment:
    """How many turns of a window there are, and how many met the SLO."""

    first: int
    first_met: int
    later: int
    later_met: int

    def reaches(self, share: float) -> bool:
        """Of first and of later turns; a class without turns is reached, and a window without any turn is not."""
        classes = ((self.first, self.first_met), (self.later, self.later_met))
        return any(turns for turns, _ in classes) and all(met >= share * turns for turns, met in classes)


def attainment(played: Iterable[PlayedTurn], slo: Slo, profile: EngineProfile) -> Attainment:
    counts = [[0, 0], [0, 0]]
    for one in played:
        of_class = counts[one.record.turn > 1]
        of_class[0] += 1
        of_class[1] += slo.is_met(one.record, idle_ttft_s(profile, one.record.prompt_tokens, one.known_tokens))
    return Attainment(*counts[0], *counts[1])


def idle_ttft_s(profile: EngineProfile, prompt_tokens: int, known_tokens: int) -> float:
    """On an idle engine that holds the `known_tokens` which the session's turn before had."""
    cached = min(known_tokens, prompt_tokens - 1)
    done = cached - cached % BLOCK_TOKENS
    total_s = request_time_s(profile, prompt_tokens, prompt_tokens - done)
    while done < prompt_tokens:
        chunk = min(profile.max_batched_tokens, prompt_tokens - done)
        if chunk == 1:  # as an engine counts it
            total_s += step_time_s(profile, 1, done + 1, 0, 0)
        else:
            total_s += step_time_s(profile, 0, 0, chunk, attention_pairs(chunk, done))
        done += chunk
    return total_s


@dataclass(frozen=True, slots=True)
class HighestRate:
    """`rate`: the highest that passed; 0 where none did. `failed`: the lowest above it that did not; None: none."""

    rate: float
    failed: float | None
    trials: int


def highest_rate(
    passes: Callable[[float], bool],
    *,
    first: float,
    least: float,
    most: float,
    precision: float = 0.02,
    near: float | None = None,
) -> HighestRate:
    """Brackets the highest rate that passes, from `first` on by doubling and halving, then bisects its logarithm.

    Rates are `first * (1 + precision) ** k`, so searches that begin alike try the same rates. Where rates pass above
    one that fails, one of the rates at which that changes is found. near: where the rate is expected: the search begins
    there, with small steps that grow.
    """
    if not 0 < least <= first <= most < math.inf:
        raise ConfigError(f"first = {first}: must be between {least} and {most}, all above 0", param="first")
    if not precision > 0:
        raise ConfigError(f"precision = {precision}: must be above 0", param="precision")
    step = math.log1p(precision)
    lowest, highest = (math.trunc(math.log(bound / first) / step) for bound in (least, most))
    known: dict[int, bool] = {}

    def tried(place: int) -> bool:
        if place not in known:
            known[place] = passes(first * math.exp(place * step))
        return known[place]

    farthest = max(1, round(math.log(FACTOR) / step))
    begin = 0 if near is None else min(highest, max(lowest, round(math.log(near / first) / step)))
    jump = farthest if near is None else 1
    good, bad = (begin, None) if tried(begin) else (None, begin)
    while bad is None and good is not None and good < highest:
        following = min(good + jump, highest)
        good, bad = (following, None) if tried(following) else (good, following)
        jump = min(2 * jump, farthest)
    while good is None and bad is not None and bad > lowest:
        following = max(bad - jump, lowest)
        good, bad = (following, bad) if tried(following) else (None, following)
        jump = min(2 * jump, farthest)
    while good is not None and bad is not None and bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if tried(middle) else (good, middle)
    at = [0.0 if good is None else first * math.exp(good * step), None if bad is None else first * math.exp(bad * step)]
    return HighestRate(at[0] or 0.0, at[1], len(known))


class Trials:
    """A trace on one simulated fleet at several rates, each played once, whichever SLO asks for it."""

    def __init__(
        self, prompts: TracedPrompts, topology: str, setup: Setup, proxy: ProxySetup, playback: Playback
    ) -> None:
        """playback: of which only the rate changes."""
        self._prompts = prompts
        self._topology = topology
        self._setup = setup
        self._proxy = proxy
        self._playback = playback
        self._windows: dict[float, Window] = {}

    def at(self, rate: float) -> Window:
        if rate not in self._windows:
            playback = replace(self._playback, rate=rate)
            self._windows[rate] = play(self._prompts, playback, self._topology, self._setup, self._proxy)
        return self._windows[rate]

    def passes(self, rate: float, slo: Slo) -> bool:
        """A window that could not be filled fails: its sessions hardly get to their later turns."""
        window = self.at(rate)
        met = attainment(window.played, slo, self._setup.profile.to_engine())
        return window.is_whole and met.reaches(slo.share)

    def goodput(
        self, slo: Slo, *, first: float = 1.0, least: float = 1e-3, most: float = 1e3, precision: float = 0.02
    ) -> HighestRate:
        return highest_rate(
            lambda rate: self.passes(rate, slo), first=first, least=least, most=most, precision=precision
        )
