"""Which turns meet the SLO, and how many of a window do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ppd.proxy.errors import ConfigError
from ppd.proxy.laws.step_time import EngineProfile, attention_pairs, request_time_s, step_time_s
from ppd.proxy.laws.targets import MOST, SloTargets

from ..experiment.records import Record
from ..simulation.playback import PlayedTurn

BLOCK_TOKENS = 16  # hits are whole blocks


class Slo(SloTargets, frozen=True, kw_only=True):
    """Targets of a turn, and the share of the first turns that must meet them, and of the later ones."""

    share: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share = {self.share}: must be above 0 and at most 1", param="share")
        if not 0 < self.tpot_s <= MOST["tpot"]:
            raise ConfigError(f"tpot = {self.tpot_s}: must be a number above 0, at most {MOST['tpot']:g}", param="tpot")
        for name, value in (("ttft", self.ttft_s), ("ttft_factor", self.ttft_factor)):
            if not 0 <= value <= MOST[name]:
                raise ConfigError(f"{name} = {value}: must be a number from 0 to {MOST[name]:g}", param=name)
        if not self.ttft_s and not self.ttft_factor:
            raise ConfigError("ttft, ttft_factor: one of them must be above 0", param="ttft")

    @property
    def targets(self) -> SloTargets:
        """As a proxy has them."""
        return SloTargets(ttft_s=self.ttft_s, ttft_factor=self.ttft_factor, tpot_s=self.tpot_s)

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
