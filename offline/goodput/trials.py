"""A trace on one simulated fleet at several rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..simulation.playback import Playback
from ..simulation.routing import ProxySetup
from ..simulation.setup import Setup
from ..simulation.simulate import play
from ..simulation.traced_prompts import TracedPrompts
from .highest_rate import LEAST_RPS, MOST_RPS, HighestRate, highest_rate
from .slo import Attainment, Slo, attainment
from .windows import JudgedWindow, TurnPace, bounds


@dataclass(slots=True)
class Trials:
    """Of the playback only the rate changes. A rate is played to its end once at most, whoever asks for it."""

    prompts: TracedPrompts
    topology: str
    setup: Setup
    proxy: ProxySetup
    playback: Playback
    played: int = 0  # windows
    _pace: TurnPace | None = None
    _whole: dict[float, JudgedWindow] = field(default_factory=dict)
    _verdicts: dict[tuple[float, Slo], bool] = field(default_factory=dict)

    def at(self, rate: float) -> JudgedWindow:
        """Played to its end."""
        return self._whole.get(rate) or self._play(rate, None)

    def met_at(self, rate: float, slo: Slo) -> Attainment:
        return attainment(self.at(rate).played, slo, self.setup.profile.costs)

    def passes(self, rate: float, slo: Slo) -> bool:
        """A window that could not be filled fails: its sessions hardly get to their later turns."""
        key = (rate, slo)
        if key not in self._verdicts:
            window = self._whole.get(rate) or self._play(rate, slo)
            verdict = window.verdict if window.slo == slo else None
            if verdict is None:
                verdict = window.is_whole and self.met_at(rate, slo).reaches(slo.share)
            self._verdicts[key] = verdict
        return self._verdicts[key]

    def goodput(
        self,
        slo: Slo,
        *,
        first: float = 1.0,
        least: float = LEAST_RPS,
        most: float = MOST_RPS,
        precision: float = 0.02,
        near: float | None = None,
        is_late: Callable[[], bool] = lambda: False,
    ) -> HighestRate:
        return highest_rate(
            lambda rate: self.passes(rate, slo),
            first=first,
            least=least,
            most=most,
            precision=precision,
            near=near,
            is_late=is_late,
        )

    def _play(self, rate: float, slo: Slo | None) -> JudgedWindow:
        self.played += 1
        playback, profile = replace(self.playback, rate=rate), self.setup.profile.costs
        if self._pace is None:
            self._pace = TurnPace.of(self.prompts, profile.step_s)
        limits = bounds(self.prompts, playback, self._pace)
        window = JudgedWindow.within(limits, playback, profile, slo)
        play(self.prompts, playback, self.topology, self.setup, self.proxy, window)
        if window.verdict is None:
            self._whole[rate] = window
        return window
