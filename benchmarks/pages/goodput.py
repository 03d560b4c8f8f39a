"""What each mode was measured to serve, for its page: its part of the records of `benchmarks.policies`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Final

from ppd.offline.goodput.modes import ORACLE

from ..policies import records
from ..policies.cells import FLEETS, Cell
from ..policies.measuring import Method
from ..policies.records import CellRecord
from ..policies.summary import Standing, standings
from ..policies.traces import TRACES
from ..policies.variants import LONG_PREFILLS, LONG_PREFILLS_ANSWER, PREFILLS_ANSWER, USUAL

RECORDS: Final = Path(__file__).parents[1] / "results" / "policies"
BEGIN, END = "<!-- goodput, by python -m benchmarks.pages -->\n", "<!-- end of goodput -->\n"
QUESTIONS: Final = {f"{100 * question.share:g} %": question.name for question in Method(data=Path()).questions}
METHOD: Final = (
    "Simulated: sessions a second of which this share of first turns, and of later ones, meet the targets\n"
    "([how](../measuring.md#goodput)). In brackets: over the best other mode that is recorded there\n"
    "([all modes](../../benchmarks/results/policies/policies.md))."
)
ANSWERING: Final = (
    "With [`prefills_answer`](../modes.md#p-that-answer), in brackets over the best other mode with it or without:"
)
CAPPED: Final = (
    "On engines that compute at most 2,048 tokens of one prompt in a step while they have other requests\n"
    "([long prompts](../laws.md#long-prompts)), in brackets over the best other mode on such engines:"
)
CAPPED_ANSWERING: Final = "On such engines and with `prefills_answer`, in brackets over the best other mode on them:"
TABLES: Final = (
    (METHOD, USUAL, ()),
    (ANSWERING, PREFILLS_ANSWER, (USUAL,)),
    (CAPPED, LONG_PREFILLS, ()),
    (CAPPED_ANSWERING, LONG_PREFILLS_ANSWER, (LONG_PREFILLS,)),
)
"""Each with its variant, and the variants whose other modes it is compared with too."""
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
    cells = [Cell(*one).name for one in product(TRACES, FLEETS, [variant for _, variant, _ in TABLES])]
    return records.load_all(RECORDS, cells, Method(data=Path()).name)


def as_markdown(name: str, found: Found) -> str:
    tables = [(text, _table(name, found, variant, beside)) for text, variant, beside in TABLES]
    shown = [f"{text}\n\n{table}" for text, table in tables if table]
    return "\n".join(shown) or NOT_RECORDED.format(name=name) + "\n"


def _table(name: str, found: Found, variant: str, beside: Sequence[str]) -> str:
    """Empty where nothing is recorded."""
    others = (variant, *beside)

    def cell(trace: str, fleet: str, question: str) -> str:
        own, *rest = [standings(found.get(Cell(trace, fleet, one).name, {}), question) for one in others]
        return _cell(own, [*own, *(one for usual in rest for one in usual)], name)

    fleets = [one for one in FLEETS if any(cell(trace, one, which) for trace in TRACES for which in QUESTIONS.values())]
    if not fleets:
        return ""
    columns = [(fleet, share, question) for fleet in fleets for share, question in QUESTIONS.items()]
    lines = [
        _row("trace", *(f"{fleet}, {share}" for fleet, share, _ in columns)),
        "|---" + "|---:" * len(columns) + "|",
    ]
    for trace in TRACES:
        shown = [cell(trace, fleet, question) for fleet, _, question in columns]
        if any(shown):
            lines.append(_row(trace, *(text or "–" for text in shown)))
    return "\n".join(lines) + "\n"


def _cell(its: Sequence[Standing], known: Sequence[Standing], name: str) -> str:
    """Empty where nothing is recorded. its: the goodput of modes in this cell; known: all that it stands beside."""
    own = next((one for one in its if one.mode == name), None)
    if own is None:
        return ""
    best = max((one.mean for one in known if one.mode not in (name, ORACLE)), default=0.0)
    return f"{own.mean:.3g} ({own.mean / best:.2f})" if own.mean and best else f"{own.mean:.3g}"


def _row(*values: str) -> str:
    return f"| {' | '.join(values)} |"
