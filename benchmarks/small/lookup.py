"""The errors of both table lookups against measured cells, and the time that a lookup takes.

    python -m benchmarks.small.lookup                    # the bundled tables; or names and paths of others

One point of an axis is left out of the table and then looked up. This is done for every QPS and every workload type
that lies between others. An error is |ln(looked up / measured)| of an arm's mean TTFT or TPOT. Both lookups are asked
for the same arms: those of cells that have both arms and whose neighbours have both too.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from statistics import fmean, quantiles

import msgspec
from rich.console import Console

from ppd.proxy.cli.table_view import columns
from ppd.proxy.config import Lookup
from ppd.proxy.decision_table.format import Arm, Axes, Cell
from ppd.proxy.decision_table.interpolation import Mix
from ppd.proxy.decision_table.nearest import Around, Nearest, TableQuery
from ppd.proxy.decision_table.score import Weights
from ppd.proxy.decision_table.table import DecisionTable, bundled, find

LOOKUPS = 20_000
Error = tuple[float, float]  # of TTFT, of TPOT
LeftOut = Iterator[tuple[Axes, list[Cell]]]  # axes without one of their points, and the cells at that point


def without_each_qps(table: DecisionTable) -> LeftOut:
    for qps in table.axes.qps:
        rest = tuple(other for other in table.axes.qps if other != qps)
        yield msgspec.structs.replace(table.axes, qps=rest), [cell for cell in table.cells if cell.qps == qps]


def without_each_type(table: DecisionTable) -> LeftOut:
    for kind in table.axes.workloads:
        rest = tuple(other for other in table.axes.workloads if other != kind)
        yield (
            msgspec.structs.replace(table.axes, workloads=rest),
            [cell for cell in table.cells if cell.workload == kind.name],
        )


def errors(table: DecisionTable, left_out: LeftOut) -> dict[Lookup, list[Error]]:
    by_key = {(cell.context, cell.workload, cell.qps): cell for cell in table.cells}
    found: dict[Lookup, list[Error]] = {rule: [] for rule in Lookup}
    for axes, hidden in left_out:
        cells = [by_key.get((c.name, w.name, q)) for c in axes.contexts for w in axes.workloads for q in axes.qps]
        rules = {Lookup.NEAREST: one_cell(axes), Lookup.INTERPOLATED: Around(axes).mix}
        for cell in hidden:
            mixes = {rule: mix(query_of(cell, table.axes)) for rule, mix in rules.items()}
            used = [cell, *(cells[number] for mix in mixes.values() for number, _ in mix.shares)]
            if not mixes[Lookup.INTERPOLATED].is_inside or not all(map(has_both_arms, used)):
                continue
            for rule, mix in mixes.items():
                shares = [(other, share) for number, share in mix.shares if (other := cells[number]) is not None]
                found[rule].append(error(cell.split, [(other.split, share) for other, share in shares]))
                found[rule].append(error(cell.local, [(other.local, share) for other, share in shares]))
    return found


def one_cell(axes: Axes) -> Callable[[TableQuery], Mix]:
    nearest = Nearest(axes)
    return lambda workload: Mix(((nearest.cell(workload), 1.0),), nearest.covers(workload))


def query_of(cell: Cell, axes: Axes) -> TableQuery:
    context = next(context for context in axes.contexts if context.name == cell.context)
    kind = next(workload for workload in axes.workloads if workload.name == cell.workload)
    return TableQuery(kind.new_tokens, context.measured_tokens, kind.output_tokens, cell.qps)


def has_both_arms(cell: Cell | None) -> bool:
    return cell is not None and cell.split is not None and cell.local is not None


def error(measured: Arm | None, others: Sequence[tuple[Arm | None, float]]) -> Error:
    ttft = tpot = 0.0
    for arm, share in (*others, (measured, -1.0)):
        assert arm is not None, "the caller has checked for both arms"
        ttft += share * math.log(arm.ttft_s.mean)
        tpot += share * math.log(arm.tpot_s.mean)
    return abs(ttft), abs(tpot)


def microseconds(table: DecisionTable, rule: Lookup) -> list[float]:
    """Times of lookups of random turns, log-uniform over a range beyond the bundled tables' axes on all sides."""
    random = Random(0)
    scored, times = table.scored(Weights(), rule), []
    for _ in range(LOOKUPS):
        new, cached, output = (int(2 ** random.uniform(3, top)) for top in (11, 14, 11))
        workload = TableQuery(new, cached, output, 2 ** random.uniform(-2, 5))
        started_s = time.perf_counter()
        scored.lookup(workload)
        times.append((time.perf_counter() - started_s) * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.small.lookup",
        description="Errors of both lookups where a point is left out, and their cost.",
    )
    parser.add_argument("tables", nargs="*", help="names or paths; the tables that ship if not given")
    names = parser.parse_args().tables
    tables = [DecisionTable.load(find(name)) for name in names or bundled()]
    rows: list[tuple[str, ...]] = [("left out", "lookup", "arms", "TTFT mean", "p90", "TPOT mean", "p90")]
    for label, leave_out in (("one QPS", without_each_qps), ("one workload type", without_each_type)):
        for rule in Lookup:
            found = [pair for table in tables for pair in errors(table, leave_out(table))[rule]]
            figures = [f"{of(column):.3f}" for column in zip(*found, strict=True) for of in (fmean, p90)]
            rows.append((label, str(rule), str(len(found)), *(figures or "----")))
    console = Console()
    console.print(columns(rows, right=range(2, 7)), soft_wrap=True)
    for rule in Lookup:
        cuts = quantiles(microseconds(tables[0], rule), n=100)
        console.print(f"{rule}: a lookup takes {cuts[49]:.1f} us (p50), {cuts[98]:.1f} us (p99)", highlight=False)


def p90(values: Sequence[float]) -> float:
    return quantiles(values, n=10)[8]


if __name__ == "__main__":
    main()
