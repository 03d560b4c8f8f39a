"""What each mode was measured to serve, for its page: its part of the records of `benchmarks.policies`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

from ppd.offline.goodput.modes import ORACLE

from ..policies import records
from ..policies.cells import FLEETS, Cell
from ..policies.measuring import Method
from ..policies.records import CellRecord
from ..policies.summary import Standing, standings
from ..policies.traces import TRACES

RECORDS: Final = Path(__file__).parents[1] / "results" / "policies"
BEGIN, END = "<!-- goodput, by python -m benchmarks.pages -->\n", "<!-- end of goodput -->\n"
QUESTIONS: Final = {f"{100 * question.share:g} %": question.name for question in Method(data=Path()).questions}
METHOD: Final = (
    "Simulated: sessions a second of which this share of first turns, and of later ones, meet the targets\n"
    "([how](../measuring.md#goodput)). In brackets: over the best other mode that is recorded there\n"
    "([all modes](../../benchmarks/results/policies/policies.md))."
)
NOT_RECORDED: Final = (
    "Its goodput is not recorded: `python -m benchmarks.policies --data DATA --modes {name}` measures it\n"
    "([how](../measuring.md#goodput))."
)

Found = Mapping[str, Mapping[str, CellRecord]]


def with_goodput(page: str, name: str) -> str:
    """The page with what is recorded of this mode between its markers."""
    before, begin, rest = page.partition(BEGIN)
    return f"{before}{begin}\n{as_markdown(name, recorded())}\n{END}{rest.partition(END)[2]}"


@lru_cache(maxsize=1)
def recorded() -> Found:
    cells = [Cell(trace, fleet).name for trace in TRACES for fleet in FLEETS]
    return records.load_all(RECORDS, cells, Method(data=Path()).name)


def as_markdown(name: str, found: Found) -> str:
    fleets = [fleet for fleet in FLEETS if any(_has(found, Cell(trace, fleet), name) for trace in TRACES)]
    if not fleets:
        return NOT_RECORDED.format(name=name) + "\n"
    columns = [(fleet, share, question) for fleet in fleets for share, question in QUESTIONS.items()]
    lines = [METHOD, "", _row("trace", *(f"{fleet}, {share}" for fleet, share, _ in columns))]
    lines.append("|---" + "|---:" * len(columns) + "|")
    for trace in TRACES:
        shown = [_cell(found.get(Cell(trace, fleet).name, {}), question, name) for fleet, _, question in columns]
        if any(shown):
            lines.append(_row(trace, *(text or "–" for text in shown)))
    return "\n".join(lines) + "\n"


def _has(found: Found, cell: Cell, name: str) -> bool:
    return any(_cell(found.get(cell.name, {}), question, name) for question in QUESTIONS.values())


def _cell(outcomes: Mapping[str, CellRecord], question: str, name: str) -> str:
    """Empty where nothing is recorded."""
    known: list[Standing] = standings(outcomes, question)
    own = next((one for one in known if one.mode == name), None)
    if own is None:
        return ""
    best = max((one.mean for one in known if one.mode not in (name, ORACLE)), default=0.0)
    return f"{own.mean:.3g} ({own.mean / best:.2f})" if own.mean and best else f"{own.mean:.3g}"


def _row(*values: str) -> str:
    return f"| {' | '.join(values)} |"
