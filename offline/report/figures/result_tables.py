"""The tables of a report: what x=1 gains, which mode wins, what weights buy, what failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ppd.proxy.decision_table.table import DecisionTable

from ...experiment.cells import MeasuredCell
from ..analysis.arms import modes
from ..analysis.failures import FailureRate, failure_rates
from ..analysis.gains import Gain, gains
from ..analysis.tradeoff import by_topology, trade_offs
from ..analysis.winners import OBJECTIVES, Wins, wins
from ..page.document import Table
from ..page.numerals import interval_percent, ms, percent, percent_around, signed_percent
from .decision_figures import KINDS, MARKED

_MOST_ROWS: Final = 40  # more rows are folded


def gains_table(cells: Sequence[MeasuredCell]) -> Table | None:
    found = gains(cells)
    if not found:
        return None
    return Table(
        caption=(
            "Mean figures of follow-up turns at x=1 against x=0 (the paper's table 1). A pair is two cells that differ "
            "in x alone, both of them evidence. The change is the geometric mean of the pairs' ratios, with its 95 % "
            "interval over the pairs; below 0, x=1 is faster."
        ),
        head=(
            "topology",
            "conversations/s",
            "pairs",
            "TTFT x=0, ms",
            "TTFT x=1, ms",
            "TTFT change",
            "95 % interval",
            "median change",
            "TPOT change",
            "95 % interval",
        ),
        rows=[_gain_row(gain) for gain in found],
        labels=2,
    )


def winners_table(cells: Sequence[MeasuredCell]) -> Table | None:
    found = [each for objective in OBJECTIVES if (each := wins(cells, objective)) is not None]
    here = modes(cells)
    if len(here) < 2 or not found:
        return None
    rows = [(mode, *(percent(each.share(mode)) for each in found), _average(found, mode)) for mode in here]
    rows.append(("points", *(str(each.points) for each in found), ""))
    rows.append(("shared by two modes or more", *(str(each.ties) for each in found), ""))
    rows.append(("only one mode is evidence", *(str(each.uncontested) for each in found), ""))
    rows.append(("intervals apart", *("not known" if each.clear is None else str(each.clear) for each in found), ""))
    return Table(
        caption=(
            "Share of the points (workload and load) that each mode wins (the paper's table 2): least mean TTFT and "
            "TPOT of follow-up turns, most tokens/s. A shared point counts in equal parts. A cell with a failed run, "
            "or with more than 5 % of its requests failed, cannot win. In the last row the winner's 95 % interval and "
            "that of every arm of another mode are apart; a win without that may be chance."
        ),
        head=("mode", *(each.objective for each in found), "average"),
        rows=rows,
    )


def trade_off_table(tables: Sequence[DecisionTable]) -> Table:
    rows = [
        (
            topology,
            kind,
            f"{found.w_tpot:g}",
            str(found.cells),
            percent(found.local_share),
            percent_around(found.ttft_saved, found.ttft_half_width),
            percent_around(found.tpot_added, found.tpot_half_width),
        )
        for topology, group in by_topology(tables).items()
        for kind, classes in KINDS.items()
        for found in trade_offs(group, MARKED, classes)
    ]
    return Table(
        caption=(
            "The marks of the figure, relative to x=0, with the 95 % interval of the mean over cells with evidence. "
            "w_ttft is 1."
        ),
        head=("topology", "workloads", "w_tpot", "cells", "LOCAL", "TTFT saved", "TPOT added"),
        rows=rows,
        labels=2,
        folded=len(rows) > _MOST_ROWS,
    )


def failures_table(cells: Sequence[MeasuredCell]) -> Table | None:
    rows = [_failure_row(rate) for rate in failure_rates(cells) if rate.failures or rate.failed_runs]
    if not rows:
        return None
    return Table(
        caption=(
            "By arm and load, where anything failed (the paper's table 4): requests of the runs that finished, with "
            "Wilson's 95 % interval as if requests failed independently; runs that failed; and the workloads that are "
            "no evidence because of it."
        ),
        head=(
            "arm",
            "conversations/s",
            "requests",
            "failed",
            "share",
            "95 % interval",
            "failed runs",
            "lost workloads",
        ),
        rows=rows,
        labels=2,
        folded=len(rows) > _MOST_ROWS,
    )


def _gain_row(gain: Gain) -> tuple[str, ...]:
    return (
        gain.topology,
        gain.band.label,
        str(gain.ttft.pairs),
        ms(gain.split_ttft_s),
        ms(gain.local_ttft_s),
        signed_percent(gain.ttft.typical),
        interval_percent(gain.ttft.low, gain.ttft.high),
        signed_percent(gain.ttft.median),
        signed_percent(gain.tpot.typical),
        interval_percent(gain.tpot.low, gain.tpot.high),
    )


def _average(found: Iterable[Wins], mode: str) -> str:
    shares = [each.share(mode) for each in found]
    return percent(sum(shares) / len(shares))


def _failure_row(rate: FailureRate) -> tuple[str, ...]:
    interval = rate.interval
    return (
        rate.arm.label,
        f"{rate.qps:g}",
        str(rate.requests),
        str(rate.failures),
        percent(rate.failures / rate.requests if rate.requests else None, 2),
        "no interval" if interval is None else f"{interval[0] * 100:.2f} to {interval[1] * 100:.2f} %",
        str(rate.failed_runs),
        f"{rate.lost} of {rate.workloads}",
    )
