"""What several processes of one proxy bring: requests a second, and CPU time a request, beside those of one.

Each process has a core to itself, and its own share of the load. Where the machine has no two cores beyond these, the
mock backend and the load generator share them in the same way: one process has them on its one core too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from .backend import Clients, running_backend
from .processes import Cores
from .records import Record, Run
from .report import about, problems
from .rows import Row, cpu_us, request_rate
from .subjects import Fleet, several
from .trials import Bench, opened, timed
from .usage import children

_CONNECTIONS = 32  # for each process


def measure(count: int, repetitions: int, args: Sequence[str], bench: Bench) -> Iterator[Record]:
    """One process and `count` of them in turn; args: more flags of `serve`."""
    for repetition in range(repetitions):
        for processes in (1, count):
            bench.progress(f"repetition {repetition + 1}: {title(processes)}")
            yield _trial(processes, repetition, args, replace(bench, cores=_share_out(processes)))


def title(count: int) -> str:
    return f"{count} processes" if count > 1 else "1 process"


def markdown(run: Run, count: int) -> str:
    """Medians over the repetitions, with the least and the most."""
    table = ["|  | requests/s | CPU us a request |", "| --- | ---: | ---: |"]
    rates, costs = list[list[float]](), list[list[float]]()
    for name in (title(1), title(count)):
        records = [record for record in run.records if record.row == name]
        rates.append([value for record in records if (value := request_rate(record)) is not None])
        costs.append([value for record in records if (value := cpu_us(record)) is not None])
        table.append(f"| {name} | {_spread(rates[-1], 0)} | {_spread(costs[-1], 0)} |")
    more = [many / one for one, many in zip(*rates, strict=True)]
    room = [count * one / many for one, many in zip(*costs, strict=True)]
    table.append(f"| ratio | {_spread(more, 2)} | {count} cores have CPU time for {_spread(room, 2)} |")
    return "\n".join([about(run, "each process with a core"), "", *table, problems(run)])


def _trial(processes: int, repetition: int, args: Sequence[str], bench: Bench) -> Record:
    row = Row(name=title(processes), connections=processes * _CONNECTIONS)
    subject = several(processes, args)
    record = Record(row=row.name, subject=subject.name, repetition=repetition)
    with (
        running_backend(bench.tools, bench.cores.mock, bench.folder) as backend,
        opened(subject, Fleet.PLAIN, backend, bench) as door,
    ):
        assert door.pid is not None, "a proxy"
        for pid, core in zip(children(door.pid), bench.cores.proxy, strict=processes > 1):
            os.sched_setaffinity(pid, {core})
        clients = Clients(bench.tools, bench.cores, bench.folder)
        timed(record, door, row, clients, bench.seconds)  # what is slower at first is no part of it
        return timed(record, door, row, clients, bench.seconds)


def _share_out(processes: int) -> Cores:
    """A core for each; the rest of them for the others if that is two or more, else all."""
    ordered = sorted(os.sched_getaffinity(0), reverse=True)
    ours, rest = frozenset(ordered[:processes]), frozenset(ordered[processes:])
    others = rest if len(rest) > 1 else frozenset(ordered)
    return Cores(ours, others, others)


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    low, middle, high = (f"{value:,.{digits}f}" for value in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})"
