"""How cells are compared: an *arm* (a topology with one share of LOCAL turns) competes with others at a *point*."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ...experiment.cells import MeasuredCell
from ...experiment.run import Workload

MODES: Final = ("replica", "x=0", "0<x<1", "x=1", "hybrid")
CLASSES: Final = ("decode-heavy", "balanced", "prefill-heavy")


@dataclass(frozen=True, slots=True)
class Arm:
    topology: str
    x: float | None
    mode: str

    @classmethod
    def of(cls, cell: MeasuredCell) -> Arm:
        return cls(cell.topology, cell.x, cell.mode)

    @property
    def label(self) -> str:
        return self.topology if self.x is None else f"{self.topology} x={share(self.x)}"

    @property
    def rank(self) -> tuple[str, float, int]:
        return (self.topology, -1.0 if self.x is None else self.x, MODES.index(self.mode))


@dataclass(frozen=True, slots=True)
class Point:
    workload: Workload
    qps: float


def share(x: float) -> str:
    """x as the paper writes it: 1/3, 1/2, 2/3."""
    thirds = {"0.333": "1/3", "0.667": "2/3", "0.5": "1/2"}
    return thirds.get(f"{x:.3g}", f"{x:.3g}")


def arms(cells: Iterable[MeasuredCell]) -> list[Arm]:
    return sorted({Arm.of(cell) for cell in cells}, key=lambda arm: arm.rank)


def modes(cells: Iterable[MeasuredCell]) -> list[str]:
    found = {cell.mode for cell in cells}
    return [mode for mode in MODES if mode in found]


def by_point(cells: Iterable[MeasuredCell]) -> dict[Point, dict[Arm, MeasuredCell]]:
    points: dict[Point, dict[Arm, MeasuredCell]] = {}
    for cell in cells:
        points.setdefault(Point(cell.workload, cell.qps), {})[Arm.of(cell)] = cell
    return points


def workload_class(new_tokens: int, output_tokens: int) -> str:
    ratio = new_tokens / output_tokens
    return CLASSES[0] if ratio <= 0.5 else CLASSES[2] if ratio >= 2 else CLASSES[1]
