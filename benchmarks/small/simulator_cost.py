"""What a simulated run costs as load grows: wall time and requests by QPS, from the records of a simulated sweep.

ppd-build-table --simulate --grid paper --out DIR
python -m benchmarks.small.simulator_cost DIR
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from ppd.offline.experiment.records import RunResult
from ppd.offline.experiment.statistics import percentile
from ppd.offline.sweep.folder import SweepFolder
from ppd.proxy.errors import PPDError


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


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
def main(folder: Path) -> None:
    """Print the cost of the simulated runs in DIR as a Markdown table."""
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
