"""A study as a document: one section a question, each only where there is data for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from .analysis.study import Study, cell_cautions
from .analysis.winners import TPOT, TTFT, disagreement
from .figures import decision_figures, frontier_figure, latency, numbers
from .figures.result_tables import failures_table, gains_table, trade_off_table, winners_table
from .page.document import Block, Caution, Document, Section, Terms, Text
from .page.numerals import count, percent

_MOST_MAPS: Final = 12


def document(study: Study, further: Iterable[Section] = ()) -> Document:
    """`further`: sections that come before the numbers."""
    found = [section for make in _SECTIONS if (section := make(study)) is not None]
    return Document(study.title, study.lead, (*found, *further, _numbers(study)))


def overview(study: Study) -> Section:
    cautions = (*study.cautions, *cell_cautions(study.cells))
    blocks: list[Block] = [Caution(cautions)] if cautions else []
    return Section("overview", "What was measured", (*blocks, Terms(study.facts)))


def _frontier(study: Study) -> Section | None:
    pictures = frontier_figure.pictures(study.cells)
    return Section("frontier", "p99 TTFT against tokens/s", tuple(pictures)) if pictures else None


def _by_load(study: Study) -> Section | None:
    pictures = latency.against_load(study.cells)
    return Section("load", "Follow-up turns against load", tuple(pictures)) if pictures else None


def _gains(study: Study) -> Section | None:
    table = gains_table(study.cells)
    return None if table is None else Section("gains", "What x=1 gains over x=0, by load", (table,))


def _winners(study: Study) -> Section | None:
    table = winners_table(study.cells)
    if table is None:
        return None
    differ, points = disagreement(study.cells, TTFT, TPOT)
    words = (
        f"At {differ:,} of {count(points, 'point')} ({percent(differ / points)}) the arm that is best for TTFT is not "
        "best for TPOT."
    )
    return Section("winners", "Which mode wins", (table, Text(words)))


def _decisions(study: Study) -> Section | None:
    if not study.tables:
        return None
    drawn, left = study.tables[:_MOST_MAPS], len(study.tables[_MOST_MAPS:])
    words = (
        "Algorithm 1 of the paper, by the proxy's own code: score = w_ttft × share of TTFT saved − w_tpot × share of "
        "TPOT added, from the means of a cell's two arms; LOCAL where it is above 0."
    )
    further = f" {count(left, 'more table')}, of other conversations, are not drawn." if left else ""
    maps = [decision_figures.heat_map(table) for table in drawn]
    return Section("decisions", "What the tables decide", (Text(words + further), *maps))


def _trade_off(study: Study) -> Section | None:
    picture = decision_figures.trade_off_picture(study.tables)
    if picture is None:
        return None
    return Section("trade-off", "TTFT saved for TPOT paid", (picture, trade_off_table(study.tables)))


def _turns(study: Study) -> Section | None:
    picture = latency.against_turns(study.cells)
    return None if picture is None else Section("turns", "Longer conversations", (picture,))


def _failures(study: Study) -> Section:
    requests = sum(cell.requests for cell in study.cells)
    block = failures_table(study.cells) or Text(f"None of {requests:,} requests failed, and no run did.")
    return Section("failures", "Failures", (block,))


def _numbers(study: Study) -> Section:
    words = "Unrounded, in seconds, they are in cells.csv beside this page."
    return Section("numbers", "Every number", (numbers.table(study.cells), Text(words)))


_SECTIONS: Final[tuple[Callable[[Study], Section | None], ...]] = (
    overview,
    _frontier,
    _by_load,
    _gains,
    _winners,
    _decisions,
    _trade_off,
    _turns,
    _failures,
)
