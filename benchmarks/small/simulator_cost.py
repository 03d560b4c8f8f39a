"""What a simulated request costs: processor time by the number of workers, or wall time by the load of a sweep.

    python -m benchmarks.small.simulator_cost

plays conversations of four turns, one a second for each worker, on fleets of 4 to 1,000 workers, and compares with the
limits. Of a sweep that was simulated it prints what each load took:

    ppd-build-table --simulate --grid paper --out DIR
    python -m benchmarks.small.simulator_cost DIR
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from ppd.offline.experiment.records import RunResult
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.experiment.statistics import percentile
from ppd.offline.simulation.routing import ProxySetup
from ppd.offline.simulation.setup import Setup, setup_for
from ppd.offline.simulation.simulate import simulate
from ppd.offline.sweep.folder import SweepFolder
from ppd.proxy.config import Mode
from ppd.proxy.errors import PPDError
from ppd.proxy.policy import Rules

LIMITS_S = {"1P_3D": 4e-4, "4R": 4e-4, "4P_12D": 4e-4, "16P_48D": 4e-4, "250P_750D": 1e-3}  # a request
HARDWARE = "h100-llama-3.1-8b"
LOCAL = ProxySetup(rules=Rules(mode=Mode.ALWAYS_LOCAL))
CHATS = Workload(
    first=Profile(name="first", new_tokens=1024, output_tokens=256),
    later=Profile(name="later", new_tokens=128, output_tokens=128),
    turns=4,
    think_s=2.0,
)


@dataclass(frozen=True, slots=True)
class RunCost:
    """Of the runs with the same QPS and the same length of the first turn."""

    context: str
    qps: float
    runs: int
    median_s: float
    longest_s: float
    requests: float  # per run, on average
    request_s: float  # wall time per request


def costs(results: Iterable[RunResult]) -> list[RunCost]:
    groups: dict[tuple[int, str, float], list[RunResult]] = defaultdict(list)
    for result in results:
        first = result.run.workload.first
        groups[first.new_tokens, first.name, result.run.qps].append(result)
    found = []
    for (_, context, qps), group in sorted(groups.items()):
        walls, requests = [one.wall_s for one in group], sum(len(one.records) for one in group)
        found.append(
            RunCost(
                context=context,
                qps=qps,
                runs=len(group),
                median_s=percentile(walls, 0.5),
                longest_s=max(walls),
                requests=requests / len(group),
                request_s=sum(walls) / max(requests, 1),
            )
        )
    return found


def request_s(topology: str, workers: int, setup: Setup, *, conversations: int, repeats: int) -> float:
    """Processor time a request; the least of the repeats, as other programs only ever add to it."""
    x = None if topology.endswith("R") else 1.0
    run = Run(topology=topology, workload=CHATS, qps=float(workers), x=x, seconds=1.0, conversations=conversations)
    took_s = []
    for _ in range(repeats):
        began_s = time.process_time()
        requests = len(simulate(run, setup, proxy=LOCAL))
        took_s.append((time.process_time() - began_s) / requests)
    return min(took_s)


def print_fleets(repeats: int) -> None:
    setup = setup_for(HARDWARE)
    click.echo("| fleet | workers | a request | limit |\n|---|---|---|---|")
    for topology, limit_s in LIMITS_S.items():
        workers = sum(int(part[:-1]) for part in topology.split("_"))
        found_s = request_s(topology, workers, setup, conversations=200, repeats=repeats)
        verdict = "" if found_s <= limit_s else ", missed"
        click.echo(f"| {topology} | {workers} | {found_s * 1e6:.0f} us | {limit_s * 1e6:.0f} us{verdict} |")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="[DIR]", required=False)
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1), help="Runs of each fleet.")
def main(folder: Path | None, repeats: int) -> None:
    """Print the cost of a request by the size of the fleet, or of the simulated runs in DIR, as a Markdown table."""
    if folder is None:
        print_fleets(repeats)
        return
    try:
        found = costs(SweepFolder(folder).results())
    except PPDError as exc:
        raise click.ClickException(exc.message) from exc
    click.echo(
        "| first turn | QPS | runs | median | longest | requests a run | a request |\n|---|---|---|---|---|---|---|"
    )
    for cost in found:
        click.echo(
            f"| {cost.context} | {cost.qps:g} | {cost.runs} | {cost.median_s * 1e3:.0f} ms | "
            f"{cost.longest_s * 1e3:.0f} ms | {cost.requests:.0f} | {cost.request_s * 1e6:.0f} us |"
        )
    click.echo(f"\n{sum(cost.runs for cost in found)} runs")


if __name__ == "__main__":
    main()
