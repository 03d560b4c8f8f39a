"""Which mode serves the most sessions within the SLO, on which traces and fleets, and by how much?

    python -m benchmarks.policies --data DATA                 # the six traces on three fleets: within an hour
    python -m benchmarks.policies --data DATA --parts all     # says beforehand how long it takes
    python -m benchmarks.policies --data DATA --parts all --ray auto
    python -m benchmarks.policies --data DATA --subject slo --modes slo table always_local

Each cell (a trace, a fleet, a variant) has a file of records in --out, one line a mode. A run measures what these lack,
so one that was stopped goes on where it was, and a new mode is measured alone. At the end, and with --report alone, the
tables and figures of all records in --out are written beside them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ppd.offline.experiment import files
from ppd.offline.goodput.modes import NAMES
from ppd.proxy.config import Mode
from ppd.proxy.errors import ConfigError, PPDError

from . import campaign as campaigns
from .campaign import Campaign
from .cells import PARTS, USUAL_PARTS, Cell, cells_of
from .costs import hours
from .executors import Executor, ProcessPool, RayTasks
from .figures import goodput_figure, variants_figure
from .measuring import Connector, Method, Question
from .records import CellRecord
from .report import Found, page, shown
from .summary import changes, is_alone

SEEDS = {0.9: 3, 0.98: 6}
ALL_TPOTS_MS = (15.0, 25.0, 50.0)
OUT = Path("benchmarks/results/policies")

# What a usual run compares `slo` with, so that it ends within an hour: those that were best of any cell, or second.
USUAL = (Mode.ALWAYS_LOCAL, Mode.REPLICA, Mode.PREFILL_LOAD, Mode.CONDITIONAL, Mode.SLACK, Mode.LEAST_TTFT, Mode.SLO)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _arguments(arguments)
    try:
        campaign, parts = _campaign(args)
        for part in [name for name in PARTS if name not in parts]:
            print(f"left out: part {part}, {len(PARTS[part])} cells (--parts {part})")
        if lesser := [name for name in NAMES if name not in campaign.modes]:
            print(f"left out: modes {', '.join(lesser)} (--modes {' '.join(lesser)})")
        if not args.report:
            _measure(campaign, args)
        if not args.estimate:
            _write(campaign, parts)
    except PPDError as exc:
        print(exc.message, file=sys.stderr)
        return 1
    return 0


def _measure(campaign: Campaign, args: argparse.Namespace) -> None:
    executor: Executor = RayTasks(args.ray) if args.ray else ProcessPool(args.processes, args.nice)
    began_s = time.monotonic()
    try:
        left_s = campaign.seconds_left(executor.places, args.again)
        print(f"about {hours(left_s)} on {executor.places} processors", flush=True)
        if args.estimate:
            return
        if args.again:
            campaign.forget(args.again)

        def told(outcome: CellRecord, running: int) -> None:
            print(f"{time.monotonic() - began_s:6.0f} s  {_line(campaign, outcome)}", flush=True)

        def is_late() -> bool:
            return args.minutes is not None and time.monotonic() - began_s > 60 * args.minutes

        campaigns.run(campaign, executor, told, is_late)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
    finally:
        executor.close()


def _line(campaign: Campaign, outcome: CellRecord) -> str:
    rates = {name: " ".join(f"{rate:.3g}" for rate in found) for name, found in outcome.goodput.items()}
    at = outcome.at_rate
    shares = "" if at is None else f"; at {at.rate:.3g}: {at.first_share:.1%} and {at.later_share:.1%}"
    return f"{outcome.cell} {outcome.mode}: {rates}{shares} ({outcome.windows} windows, {outcome.cpu_s:.0f} s)"


def _write(campaign: Campaign, parts: Sequence[str]) -> None:
    found = campaign.found(dict.fromkeys(one for cell in campaign.cells for one in (cell, cell.usual)))
    missing = [cell.name for cell in campaign.cells if cell.name not in found]
    notes = [f"Not measured: {len(missing)} of {len(campaign.cells)} cells."] if missing else []
    files.write_whole(campaign.folder / "policies.md", page(campaign, parts, found, notes).encode())
    for part in parts:
        if picture := _picture(campaign, [cell for cell in PARTS[part] if cell.name in found], found):
            files.write_whole(campaign.folder / f"policies-{part}.png", picture)
    measured = len(campaign.cells) - len(missing)
    print(f"{campaign.folder / 'policies.md'}: {measured} of {len(campaign.cells)} cells")


def _picture(campaign: Campaign, cells: Sequence[Cell], found: Found) -> bytes | None:
    """None: there is nothing to compare."""
    if not is_alone(campaign.subject, cells, found):
        return goodput_figure(cells, shown(cells, found), found, campaign.question.name) if cells else None
    made = changes(cells, found, campaign.question_names, campaign.subject)
    return variants_figure(made) if made else None


def _campaign(args: argparse.Namespace) -> tuple[Campaign, tuple[str, ...]]:
    parts = tuple(PARTS) if "all" in args.parts else tuple(args.parts)
    cells = tuple(cells_of(parts))
    traces = _named("traces", args.traces, [cell.trace for cell in cells])
    fleets = _named("fleets", args.fleets, [cell.fleet for cell in cells])
    cells = tuple(cell for cell in cells if cell.trace in traces and cell.fleet in fleets)
    tpots_ms = args.tpot_ms or (ALL_TPOTS_MS if "all" in args.parts else (25.0,))
    # The usual limit first: its goodput sets the rate at which modes are compared.
    tpots_ms = sorted(tpots_ms, key=lambda tpot_ms: tpot_ms != 25.0)
    questions = tuple(Question(ms / 1000, share, seeds) for ms in tpots_ms for share, seeds in SEEDS.items())
    method = Method(
        data=args.data.resolve(),
        hardware=args.hardware,
        connector=Connector(args.connector),
        questions=questions,
        precision=args.precision,
    )
    modes = tuple(args.modes or (NAMES if "all" in args.parts else [mode.value for mode in USUAL]))
    _named("again", args.again, modes)  # or records would be forgotten that nothing replaces
    return Campaign(cells=cells, modes=modes, subject=args.subject, method=method, folder=args.out), parts


def _named(what: str, given: Sequence[str] | None, known: Sequence[str]) -> Sequence[str]:
    """All that are known, where none is given. ConfigError for one that is not."""
    for name in given or ():
        if name not in known:
            raise ConfigError(f"{what} = {name!r}: must be one of {', '.join(dict.fromkeys(known))}", param=what)
    return given or known


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description="Modes compared, by goodput.")
    add = parser.add_argument
    add("--data", type=Path, required=True, help="the folder with weka-agentic-coding, mooncake-conversation, ...")
    add("--out", type=Path, default=OUT, help="the folder of the records, tables and figures")
    add("--parts", nargs="+", default=list(USUAL_PARTS), choices=(*PARTS, "all"))
    add("--traces", nargs="+", help="only these")
    add("--fleets", nargs="+", help="only these, as 1P_3D")
    add("--modes", nargs="+", choices=NAMES, help="only these")
    add("--subject", default="slo", help="the mode that is compared with the best of the others")
    add("--tpot-ms", nargs="+", type=float, help="25; with --parts all 15 and 50 too")
    add("--hardware", default="h100-llama-3.1-8b", help="an engine profile, as ppd-build-table --hardware has it")
    add("--connector", default="pull", choices=Connector, help="pull: D reads what it lacks, and P goes on meanwhile")
    add(
        "--again",
        nargs="+",
        choices=NAMES,
        default=(),
        help="measure these anew, in the cells and for the TPOT chosen: a record knows no version of the code",
    )
    add("--precision", type=float, default=0.05, help="between the rates that are tried")
    add("--processes", type=int, default=2, help="of this machine")
    add("--nice", type=int, default=0, help="of the processes that compute")
    add("--ray", metavar="ADDRESS", help="on a Ray cluster: its address, auto or local")
    add("--minutes", type=float, help="begin nothing more after so long")
    add("--estimate", action="store_true", help="say how long it would take, and end")
    add("--report", action="store_true", help="measure nothing: only write the tables and figures")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
