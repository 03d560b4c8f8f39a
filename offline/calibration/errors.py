"""How far a simulation is from what was measured, configuration by configuration. Errors are shares of the measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ppd.proxy.laws.profile_file import Check

from ..experiment.statistics import percentile
from .fit import Means
from .observations import Observation


@dataclass(frozen=True, slots=True)
class Errors:
    """Over the cells of one configuration in one region; TTFT and TPOT are means of later turns."""

    config: str
    region: str
    cells: int
    ttft_median: float  # of the absolute errors
    ttft_p90: float
    ttft_bias: float  # median of the signed errors
    tpot_median: float
    tpot_p90: float
    tpot_bias: float
    first_ttft_median: float

    def check(self) -> Check:
        return Check(
            config=self.config,
            cells=self.cells,
            ttft_error_median=round(self.ttft_median, 4),
            tpot_error_median=round(self.tpot_median, 4),
            ttft_error_p90=round(self.ttft_p90, 4),
            tpot_error_p90=round(self.tpot_p90, 4),
            note=self.region,
        )


def errors(observations: Sequence[Observation], simulated: Means, region: str, configs: Iterable[str]) -> list[Errors]:
    lines = []
    for config in configs:
        chosen = [place for place, one in enumerate(observations) if one.config == config]
        if not chosen:
            continue
        measured = np.array([observations[place].means for place in chosen])
        relative = simulated[chosen] / measured - 1
        size = np.abs(relative)
        lines.append(
            Errors(
                config=config,
                region=region,
                cells=len(chosen),
                ttft_median=percentile(size[:, 1], 0.5),
                ttft_p90=percentile(size[:, 1], 0.9),
                ttft_bias=percentile(relative[:, 1], 0.5),
                tpot_median=percentile(size[:, 2], 0.5),
                tpot_p90=percentile(size[:, 2], 0.9),
                tpot_bias=percentile(relative[:, 2], 0.5),
                first_ttft_median=percentile(size[:, 0], 0.5),
            )
        )
    return lines


def markdown(lines: Sequence[Errors], fitted_on: Sequence[str]) -> str:
    """fitted_on: the configurations by which the costs were found, whether or not by a search."""
    rows = [
        "| configuration | cells | TTFT: median, p90, bias | TPOT: median, p90, bias | first TTFT: median |",
        "|---|---|---|---|---|",
    ]
    for line in lines:
        name = f"{line.config} (used)" if line.config in fitted_on else line.config
        ttft = f"{line.ttft_median:.1%}, {line.ttft_p90:.1%}, {line.ttft_bias:+.1%}"
        tpot = f"{line.tpot_median:.1%}, {line.tpot_p90:.1%}, {line.tpot_bias:+.1%}"
        rows.append(f"| {name} | {line.cells} | {ttft} | {tpot} | {line.first_ttft_median:.1%} |")
    return "\n".join(rows)
