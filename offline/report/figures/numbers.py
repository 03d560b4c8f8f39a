"""Every number of every cell with its n and its 95 % interval: a table for the page, and the same as CSV."""

from __future__ import annotations

from collections.abc import Sequence

from ...experiment.cells import MeasuredCell, why_no_evidence
from ...experiment.statistics import Estimate
from ..analysis.arms import Arm, share
from ..analysis.study import FEW, is_late, is_other_share
from ..page.document import Table
from ..page.numerals import NONE, mean_ms, ms, percent

_HEAD = (
    "topology",
    "x",
    "workload",
    "conversations/s",
    "runs",
    "requests",
    "failed",
    "LOCAL",
    "n",
    "TTFT mean, ms",
    "TTFT p50",
    "TTFT p99",
    "TPOT mean, ms",
    "TPOT p99",
    "first turn's TTFT mean",
    "all turns' TTFT mean",
    "tokens/s",
    "remarks",
)


def table(cells: Sequence[MeasuredCell]) -> Table:
    return Table(
        caption=(
            "One row a cell. n counts the follow-up turns that finished, LOCAL is the share of them that was; TTFT and "
            "TPOT are theirs where nothing else is said, in ms; ± is half the 95 % interval of the mean, from the "
            "runs' means where there are several."
        ),
        head=_HEAD,
        rows=[_row(cell) for cell in ordered(cells)],
        labels=4,
        words=(len(_HEAD) - 1,),
        folded=True,
    )


def ordered(cells: Sequence[MeasuredCell]) -> list[MeasuredCell]:
    return sorted(cells, key=lambda cell: (Arm.of(cell).rank, cell.workload.name, cell.qps))


def csv(cells: Sequence[MeasuredCell]) -> bytes:
    """Unrounded, times in s."""
    import pandas as pd  # takes longer than all else a report imports

    return pd.DataFrame([_record(cell) for cell in ordered(cells)]).to_csv(index=False, lineterminator="\n").encode()


def remarks(cell: MeasuredCell) -> list[str]:
    why = why_no_evidence(cell)
    found = [f"no evidence: {why}"] if why else []
    if is_other_share(cell):
        found.append("LOCAL share is not x")
    if is_late(cell):
        found.append("sent late")
    if cell.later_ttft_s is not None and cell.later_ttft_s.n < FEW:
        found.append(f"n below {FEW}")
    if len(cell.seeds) == 1:
        found.append("one run")
    return found


def _row(cell: MeasuredCell) -> tuple[str, ...]:
    ttft, tpot = cell.later_ttft_s, cell.later_tpot_s
    return (
        cell.topology,
        NONE if cell.x is None else share(cell.x),
        cell.workload.name,
        f"{cell.qps:g}",
        str(len(cell.seeds)),
        str(cell.requests),
        str(cell.failures),
        percent(cell.local_share),
        str(ttft.n if ttft else 0),
        mean_ms(ttft),
        ms(ttft.p50 if ttft else None),
        ms(ttft.p99 if ttft else None),
        mean_ms(tpot),
        ms(tpot.p99 if tpot else None),
        mean_ms(cell.first_ttft_s),
        mean_ms(cell.ttft_s),
        NONE if cell.tokens_per_s is None else f"{cell.tokens_per_s:,.0f}",
        ", ".join(remarks(cell)),
    )


def _record(cell: MeasuredCell) -> dict[str, object]:
    return {
        "topology": cell.topology,
        "x": cell.x,
        "mode": cell.mode,
        "workload": cell.workload.name,
        "qps": cell.qps,
        "seeds": " ".join(map(str, cell.seeds)),
        "requests": cell.requests,
        "failures": cell.failures,
        "later_requests": cell.later_requests,
        "later_failures": cell.later_failures,
        "local_share": cell.local_share,
        "lateness_p99_s": cell.lateness_p99_s,
        **_estimate("later_ttft_s", cell.later_ttft_s),
        **_estimate("later_tpot_s", cell.later_tpot_s),
        **_estimate("first_ttft_s", cell.first_ttft_s),
        **_estimate("ttft_s", cell.ttft_s),
        **_estimate("tpot_s", cell.tpot_s),
        "tokens_per_s": cell.tokens_per_s,
        "remarks": "; ".join(remarks(cell)),
    }


def _estimate(name: str, estimate: Estimate | None) -> dict[str, object]:
    parts = ("n", "mean", "p50", "p99", "std", "half_width")
    return {f"{name}_{part}": None if estimate is None else getattr(estimate, part) for part in parts}
