"""The cells of the comparison, in parts: a part is one question, with a table and a figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from ppd.servers.fleet.topology import Topology

from .traces import SHAPES, TRACES
from .variants import CONTEXT_COST, LONG_PREFILLS, LONG_PREFILLS_ANSWER, POOLED, PREFILLS_ANSWER, USUAL

FLEETS = ("1P_3D", "2P_2D", "4R")
BY_SIZE = ("2P_6D", "4P_4D", "8R", "4P_12D", "8P_8D", "16R")
SCARCE = ("1P_7D", "3P_1D", "7P_1D")
LINKS = tuple(f"link-{speed}" for speed in (10, 25, 50, 100, 200, 400))
TROUBLE = (
    *("kv-0.5", "kv-0.35", "events-0.1s", "events-1s", "events-10s", "worker-lost"),
    *("laws-x2", "laws-x0.5", "estimates-0.7", "estimates-1.3", "queues"),
)
ABLATIONS = ("no-ledger", "no-elsewhere", "no-returns", "no-tpot")


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """On each of them the modes are compared."""

    trace: str
    fleet: str
    variant: str = USUAL

    @property
    def name(self) -> str:
        return f"{self.trace}.{self.fleet}.{self.variant}"

    @property
    def usual(self) -> Cell:
        """With nothing changed: what a variant is worth shows beside that."""
        return Cell(self.trace, self.fleet)

    @property
    def topology(self) -> Topology:
        return Topology.parse(self.fleet)


def _cells(traces: tuple[str, ...], fleets: tuple[str, ...], variants: tuple[str, ...] = (USUAL,)) -> tuple[Cell, ...]:
    return tuple(Cell(*one) for one in product(traces, fleets, variants))


PARTS: Mapping[str, tuple[Cell, ...]] = {
    "traces": _cells(TRACES, FLEETS),  # the targets are over these
    "sizes": _cells(("weka-64k", "mooncake"), (*BY_SIZE, *SCARCE)),
    "shapes": _cells(SHAPES, FLEETS),
    "links": _cells(("weka-64k", "mooncake"), FLEETS, LINKS),
    "ablations": (  # what of it makes the subject better
        *_cells(("weka-32k", "mooncake"), FLEETS, ABLATIONS),
        *_cells(("weka-32k", "mooncake"), ("1P_3D", "2P_2D"), ("first-split",)),
    ),
    "contexts": _cells(("weka-64k", "weka-128k"), FLEETS, (CONTEXT_COST,)),
    "trouble": _cells(("weka-64k", "mooncake"), FLEETS, TROUBLE),
    "answering": _cells(TRACES, ("1P_3D", "2P_2D"), (PREFILLS_ANSWER,)),
    "long-prefills": (
        *_cells(TRACES, FLEETS, (LONG_PREFILLS,)),
        *_cells(TRACES, ("1P_3D", "2P_2D"), (LONG_PREFILLS_ANSWER,)),
    ),
    "pooled": _cells(TRACES, FLEETS, (POOLED,)),
    "moves": _cells(("weka-64k", "mooncake"), FLEETS, ("moves-kv", "reads-back", "fetches-kv")),
}
USUAL_PARTS = ("traces",)  # of a run that ends within an hour on two cores


def cells_of(parts: tuple[str, ...]) -> Iterator[Cell]:
    """Each once, in order."""
    yield from dict.fromkeys(cell for part in parts for cell in PARTS[part])
