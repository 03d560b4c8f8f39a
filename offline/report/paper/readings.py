"""What the PPD paper prints (its tables 1, 2 and 4, and section 4.4), and ways to compute it from the published rows.

To find the ways that the paper used, each is compared with the printed figures.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...experiment.cells import MeasuredCell, is_evidence
from ...experiment.statistics import Estimate
from ..analysis import winners
from ..analysis.gains import Band, change, mean_ttft_s, pairs
from ..analysis.winners import Objective, Wins, wins

# Table 1: change of turn-2 TTFT from x=0 to x=1, in percent, at low, medium and high QPS.
PRINTED_GAINS: Final = {
    "1P_3D": (-57.8, -65.2, -73.3),
    "2P_2D": (-47.7, -51.6, -56.2),
    "3P_1D": (-44.3, -38.1, -24.9),
}

# Table 2, and appendix A for the hybrids: points won, in percent, by TTFT, TPOT and throughput.
PRINTED_WINS: Final = {
    "replica": (63.3, 0.6, 0.0),
    "x=0": (0.0, 38.3, 4.4),
    "0<x<1": (3.3, 33.3, 27.8),
    "x=1": (27.2, 15.6, 38.3),
    "hybrid": (6.1, 12.2, 16.1),
}

# Points whose best configuration for TTFT is not the best for TPOT, in percent.
PRINTED_DISAGREEMENT: Final = 92.2

# Table 4: failure rate in percent at these QPS.
PRINTED_FAILURE_QPS: Final = (8.0, 12.0, 16.0, 20.0)
PRINTED_FAILURES: Final = {
    ("3P_1D", 0.0): (11, 44, 61, 89),
    ("3P_1D", 1.0): (6, 22, 44, 67),
    ("2P_2D", 0.0): (0, 6, 11, 22),
    ("2P_2D", 1.0): (0, 0, 6, 11),
    ("4R", None): (0, 0, 0, 0),
}


@dataclass(frozen=True, slots=True)
class GainReading:
    """How the cells of one topology under some loads become one change of TTFT; None where data is missing."""

    name: str
    of: Callable[[Sequence[MeasuredCell], str, Sequence[float]], float | None]


@dataclass(frozen=True, slots=True)
class WinReading:
    name: str
    objective: Objective
    is_eligible: Callable[[MeasuredCell], bool]


def is_whole(cell: MeasuredCell) -> bool:
    return cell.later_ttft_s is not None and not cell.failures and not cell.failed


def is_anything(cell: MeasuredCell) -> bool:
    return cell.later_ttft_s is not None


def own_means(
    cells: Sequence[MeasuredCell], topology: str, qps: Sequence[float], take: Callable[[MeasuredCell], bool]
) -> float | None:
    """Mean TTFT at x=1 over that at x=0, less 1. Each mean is over its own cells: one lost at x=0 stays in x=1."""
    split, local = (
        [mean_ttft_s(c) for c in cells if c.topology == topology and c.x == x and c.qps in qps and take(c)]
        for x in (0.0, 1.0)
    )
    return (sum(local) / len(local)) / (sum(split) / len(split)) - 1 if split and local else None


def _paired_means(cells: Sequence[MeasuredCell], topology: str, qps: Sequence[float]) -> float | None:
    found = pairs(cells, topology, qps)
    return sum(mean_ttft_s(b) for _, b in found) / sum(mean_ttft_s(a) for a, _ in found) - 1 if found else None


def _mean_of_changes(cells: Sequence[MeasuredCell], topology: str, qps: Sequence[float]) -> float | None:
    changes = [mean_ttft_s(b) / mean_ttft_s(a) - 1 for a, b in pairs(cells, topology, qps)]
    return sum(changes) / len(changes) if changes else None


def _typical(cells: Sequence[MeasuredCell], topology: str, qps: Sequence[float]) -> float | None:
    found = pairs(cells, topology, qps)
    return change([mean_ttft_s(a) for a, _ in found], [mean_ttft_s(b) for _, b in found]).typical if found else None


OWN_WHOLE: Final = GainReading(
    "own means, runs without a failed request", lambda cells, t, qps: own_means(cells, t, qps, is_whole)
)
TYPICAL: Final = GainReading("pairs, geometric mean of ratios", _typical)
GAIN_READINGS: Final = (
    OWN_WHOLE,
    GainReading("own means, any run with a figure", lambda cells, t, qps: own_means(cells, t, qps, is_anything)),
    GainReading("pairs, ratio of means", _paired_means),
    GainReading("pairs, mean of changes", _mean_of_changes),
    TYPICAL,
)


def matches(value: float | None, printed_percent: float) -> bool:
    return value is not None and abs(round(100 * value, 1) - printed_percent) < 0.05


def gain_matches(cells: Sequence[MeasuredCell], reading: GainReading, loads: Sequence[Band]) -> int:
    return sum(
        matches(reading.of(cells, topology, band.qps), figure)
        for topology, figures in PRINTED_GAINS.items()
        for band, figure in zip(loads, figures, strict=True)
    )


def closest_loads(cells: Sequence[MeasuredCell], column: int) -> tuple[tuple[float, ...], float]:
    """The set of loads whose own means are closest to a printed column, and their largest difference in percentage
    points.
    """
    qps = sorted({cell.qps for cell in cells})
    chosen = (np.arange(1, 2 ** len(qps))[:, None] >> np.arange(len(qps)) & 1).astype(float)
    worst = np.zeros(len(chosen))
    for topology, figures in PRINTED_GAINS.items():
        split, local = (_means(cells, topology, x, qps, chosen) for x in (0.0, 1.0))
        worst = np.fmax(worst, np.abs(100 * (local / split - 1) - figures[column]))
    best = int(np.nanargmin(worst))
    return tuple(point for point, taken in zip(qps, chosen[best], strict=True) if taken), float(worst[best])


def _means(
    cells: Sequence[MeasuredCell], topology: str, x: float, qps: Sequence[float], chosen: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Means of whole cells for each set of loads; (sets,)."""
    groups = [
        [mean_ttft_s(c) for c in cells if c.topology == topology and c.x == x and c.qps == point and is_whole(c)]
        for point in qps
    ]
    with np.errstate(invalid="ignore"):
        means: NDArray[np.float64] = (chosen @ [sum(group) for group in groups]) / (chosen @ [len(g) for g in groups])
    return means


def _of_ttft(figure: Callable[[Estimate], float | None]) -> Callable[[MeasuredCell], float | None]:
    return lambda cell: None if cell.later_ttft_s is None else figure(cell.later_ttft_s)


def _ttft(name: str, figure: Callable[[Estimate], float | None]) -> Objective:
    return Objective(name, lambda cell: cell.later_ttft_s, _of_ttft(figure))


WIN_READINGS: Final = (
    WinReading("mean TTFT", winners.TTFT, is_evidence),
    WinReading("mean TTFT, runs without a failed request", winners.TTFT, is_whole),
    WinReading("median TTFT", _ttft("TTFT p50", lambda estimate: estimate.p50), is_evidence),
    WinReading("p99 TTFT", _ttft("TTFT p99", lambda estimate: estimate.p99), is_evidence),
)


def can_be_printed(found: Wins, column: int, modes: Collection[str]) -> bool:
    """Whether the paper's shares can result from this reading, if only these modes are in the rows.

    With fewer competitors each mode can only win more.
    """
    return all(100 * found.share(mode) >= PRINTED_WINS[mode][column] - 0.05 for mode in modes)


def wins_of(cells: Sequence[MeasuredCell], reading: WinReading) -> Wins | None:
    return wins(cells, reading.objective, reading.is_eligible)
