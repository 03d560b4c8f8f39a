"""How long a run takes, by what windows have cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean

from .cells import Cell
from .records import CellRecord

WORKERS = 4  # of the fleets on which SEARCH_S was measured

ANSWERS = 9  # goodputs, one for each seed of each question, in SEARCH_S

# Processor seconds of one mode, its search and its figures at a rate, on one core of a server.
SEARCH_S: Mapping[str, float] = {
    "weka-32k": 20.0,
    "weka-64k": 55.0,
    "weka-128k": 130.0,
    "mooncake": 21.0,
    "chats": 75.0,
    "mix": 15.0,
}
SHAPED_S = 15.0
LARGER = 0.6  # how the cost grows with the workers: their power


class Costs:
    """Of searches by trace: as measured in this run or one before it, else by the table."""

    def __init__(self, known: Iterable[tuple[Cell, CellRecord]], answers: int = ANSWERS) -> None:
        """answers: that a search has to give."""
        self._answers = answers
        seen = defaultdict[str, list[float]](list)
        for cell, outcome in known:
            if outcome.cpu_s:
                given = sum(len(rates) for rates in outcome.goodput.values()) or ANSWERS
                seen[cell.trace].append(outcome.cpu_s / _size(cell) / given)
        self._seen = {trace: fmean(costs_s) for trace, costs_s in seen.items()}

    def of(self, cell: Cell) -> float:
        """Processor seconds of one mode."""
        usual_s = SEARCH_S.get(cell.trace, SHAPED_S) / ANSWERS
        return self._seen.get(cell.trace, usual_s) * self._answers * _size(cell)


def _size(cell: Cell) -> float:
    return float((cell.topology.workers / WORKERS) ** LARGER)


def hours(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{seconds / 3600:.1f} h"
