"""How far a setup is from what a source measured: errors by region, and the ranking of configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..simulation.setup import Setup
from .errors import Errors, errors
from .errors import markdown as shown_errors
from .fit import Simulations
from .ranking import Ranking, disagreements, rank
from .ranking import markdown as shown_ranking
from .sources import CalibrationSource


@dataclass(frozen=True, slots=True)
class Assessment:
    regions: Sequence[Sequence[Errors]]  # the checked one first; those without a cell are left out
    rankings: Sequence[Ranking]  # empty where nothing competes
    disagreements: tuple[float, float]  # of TTFT's best and TPOT's: share of points, measured and simulated

    @property
    def checks(self) -> Sequence[Errors]:
        return self.regions[0] if self.regions else ()

    def ranking(self) -> str:
        """Markdown; empty where nothing competes."""
        return shown_ranking(self.rankings, self.disagreements) if self.rankings else ""

    def markdown(self, fitted_on: Sequence[str]) -> str:
        parts = [f"{lines[0].region}:\n\n{shown_errors(lines, fitted_on)}" for lines in self.regions]
        return "\n\n".join([*parts, self.ranking()] if self.rankings else parts)


def assess(source: CalibrationSource, setup: Setup, simulations: Simulations) -> Assessment:
    observations = source.observations
    simulated = simulations.by_run(observations, setup)
    means = np.array([runs.mean(axis=0) for runs in simulated])
    regions = []
    for region in (source.check_region, *source.other_regions):
        chosen = [place for place, one in enumerate(observations) if region.holds(one)]
        lines = errors([observations[place] for place in chosen], means[chosen], region.name, source.configs)
        if lines:
            regions.append(lines)
    if len(source.configs) < 2:
        return Assessment(regions, (), (0.0, 0.0))
    return Assessment(regions, rank(observations, simulated), disagreements(observations, simulated))
