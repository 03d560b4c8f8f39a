"""What x=1 gains over x=0 by load: the paper's table 1, over pairs of cells that differ in x alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from ...experiment.cells import MeasuredCell, is_evidence
from ...experiment.statistics import half_width
from .arms import by_point

PAPER_QPS: Final = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0)
_NAMES: Final = ("low", "medium", "high")
_PAPER_BANDS: Final = (PAPER_QPS[:3], PAPER_QPS[3:6], PAPER_QPS[7:])  # 10 is in none


@dataclass(frozen=True, slots=True)
class Band:
    name: str
    qps: tuple[float, ...]

    @property
    def label(self) -> str:
        low, high = self.qps[0], self.qps[-1]
        return f"{self.name} ({low:g})" if low == high else f"{self.name} ({low:g}–{high:g})"


@dataclass(frozen=True, slots=True)
class Change:
    """Relative changes over pairs, x=1 against x=0; -0.5 is half."""

    pairs: int
    typical: float  # geometric mean of the ratios, less 1
    low: float | None  # its 95 % interval, by Student's t over the pairs' logarithms
    high: float | None
    median: float


@dataclass(frozen=True, slots=True)
class Gain:
    topology: str
    band: Band
    split_ttft_s: float  # mean over the pairs' cells
    local_ttft_s: float
    ttft: Change
    tpot: Change


def bands(qps: Iterable[float]) -> list[Band]:
    """The paper's three bands where all points are the paper's, else thirds of the points; without empty ones."""
    points = sorted(set(qps))
    if set(points) <= set(PAPER_QPS):
        parts = [tuple(point for point in band if point in points) for band in _PAPER_BANDS]
    else:
        parts = [tuple(float(point) for point in part) for part in np.array_split(np.asarray(points), len(_NAMES))]
    return [Band(name, part) for name, part in zip(_NAMES, parts, strict=True) if part]


def pairs(
    cells: Iterable[MeasuredCell], topology: str, qps: Sequence[float]
) -> list[tuple[MeasuredCell, MeasuredCell]]:
    """(x=0, x=1) of one topology, at each point where both are evidence."""
    chosen = [cell for cell in cells if cell.topology == topology and cell.qps in qps and is_evidence(cell)]
    found = []
    for competitors in by_point(chosen).values():
        by_x = {arm.x: cell for arm, cell in competitors.items()}
        if 0.0 in by_x and 1.0 in by_x:
            found.append((by_x[0.0], by_x[1.0]))
    return found


def change(before: Sequence[float], after: Sequence[float]) -> Change:
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    logs = [math.log(ratio) for ratio in ratios]
    middle, half = sum(logs) / len(logs), half_width(logs)
    return Change(
        pairs=len(ratios),
        typical=math.expm1(middle),
        low=None if half is None else math.expm1(middle - half),
        high=None if half is None else math.expm1(middle + half),
        median=median(ratios) - 1,
    )


def gains(cells: Sequence[MeasuredCell]) -> list[Gain]:
    topologies = sorted({cell.topology for cell in cells})
    loads = bands(cell.qps for cell in cells)
    found = (_gain(topology, band, pairs(cells, topology, band.qps)) for topology in topologies for band in loads)
    return [gain for gain in found if gain is not None]


def _gain(topology: str, band: Band, paired: Sequence[tuple[MeasuredCell, MeasuredCell]]) -> Gain | None:
    if not paired:
        return None
    split = [mean_ttft_s(cell) for cell, _ in paired]
    local = [mean_ttft_s(cell) for _, cell in paired]
    return Gain(
        topology=topology,
        band=band,
        split_ttft_s=sum(split) / len(split),
        local_ttft_s=sum(local) / len(local),
        ttft=change(split, local),
        tpot=change([mean_tpot_s(cell) for cell, _ in paired], [mean_tpot_s(cell) for _, cell in paired]),
    )


def mean_ttft_s(cell: MeasuredCell) -> float:
    """Of follow-up turns; the cell must be evidence."""
    assert cell.later_ttft_s is not None
    return cell.later_ttft_s.mean


def mean_tpot_s(cell: MeasuredCell) -> float:
    assert cell.later_tpot_s is not None
    return cell.later_tpot_s.mean
