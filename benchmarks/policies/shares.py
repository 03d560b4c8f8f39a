"""Does a mode keep its targets at a rate where the best other one is near its limit, and could any?

    python -m benchmarks.policies.shares --data DATA

The rate is 0.9 x the best other mode's goodput at 90 %, by the records in --out, as in the tables of policies.md. The
mode is played at it on each usual cell, there with P that answer, both once more on engines that cap what a step
computes of a long prompt, and on one engine that is as fast as the whole fleet. `shares.md` in --out has the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ppd.offline.experiment import files

from . import records
from .campaign import COMMON_SHARE, common_rate
from .cells import PARTS, Cell
from .executors import Executor, ProcessPool
from .measuring import MeasureJob, Method
from .records import AtRate
from .variants import LONG_PREFILLS, LONG_PREFILLS_ANSWER, POOLED, PREFILLS_ANSWER, USUAL

OUT = Path("benchmarks/results/policies")
COLUMNS = {
    USUAL: "as it is",
    PREFILLS_ANSWER: "P answer",
    LONG_PREFILLS: "capped",
    LONG_PREFILLS_ANSWER: "capped, P answer",
    POOLED: "one engine",
}
HEAD = ("cell", "rate", *(f"{text}: first, later; prefill / needed" for text in COLUMNS.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    args = _arguments(arguments)
    method = Method(data=args.data.resolve())
    executor = ProcessPool(args.processes, args.nice)
    try:
        rows = list(measured(PARTS["traces"], args.mode, method, args.out, executor))
    finally:
        executor.close()
    lines = [f"# `{args.mode}` at {COMMON_SHARE:g} x the best other mode's goodput at 90 %", "", *table(rows), ""]
    files.write_whole(args.out / "shares.md", "\n".join(lines).encode())
    print("\n".join(lines))
    return 0


Row = tuple[Cell, float, Mapping[str, AtRate]]
"""A usual cell, its rate in sessions a second, and the mode's figures there by variant."""


def measured(cells: Sequence[Cell], mode: str, method: Method, folder: Path, executor: Executor) -> Iterator[Row]:
    """Of the cells that have records in `folder`; a variant that its fleet does not have is left out."""
    found = records.load_all(folder, [cell.name for cell in cells], method.name)
    question = method.questions[0].name
    rates = {cell: common_rate(found[cell.name], question, mode) for cell in cells if cell.name in found}
    asked = {
        one: executor.submit(MeasureJob(cell=one, mode=mode, method=method, at_rate=rate))
        for cell, rate in rates.items()
        for one in (_variants(cell) if rate else ())
    }
    for cell, rate in rates.items():
        played = {one.variant: asked[one].result().at_rate for one in _variants(cell) if one in asked}
        if figures := {variant: at for variant, at in played.items() if at is not None}:
            yield cell, rate, figures


def _variants(cell: Cell) -> list[Cell]:
    known = {cell, *PARTS["answering"], *PARTS["long-prefills"], *PARTS["pooled"]}
    return [one for one in (Cell(cell.trace, cell.fleet, variant) for variant in COLUMNS) if one in known]


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| {' | '.join(HEAD)} |"
    yield "|---|---:" + "|---:" * len(COLUMNS) + "|"
    for cell, rate, figures in rows:
        shown = [_shown(figures.get(variant)) for variant in COLUMNS]
        yield f"| {' | '.join((f'{cell.trace}, {cell.fleet}', f'{rate:.3g}', *shown))} |"


def _shown(at: AtRate | None) -> str:
    return "" if at is None else f"{at.first_share:.1%}, {at.later_share:.1%}; {at.prefill_ratio:.2f}"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies.shares", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="as of benchmarks.policies")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of the records")
    parser.add_argument("--mode", default="slo", help="the mode that is played")
    parser.add_argument("--processes", type=int, default=2, help="of this machine")
    parser.add_argument("--nice", type=int, default=0, help="of the processes that compute")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
