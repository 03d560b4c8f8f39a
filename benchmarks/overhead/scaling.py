"""What several processes of one proxy bring: requests a second, and CPU time a request, beside those of one.

Each process has a core to itself, and as much load as any other. Where they leave the mock backend and the load
generator no two cores, these run on the same cores as the processes: one process then has them on its one core too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median

import msgspec

from .backend import Clients, TrialError, running_backend
from .peers import PeerError
from .processes import Cores
from .records import Record, Run
from .report import about, problems
from .rows import Row, cpu_us, request_rate
from .subjects import Fleet, Subject, several
from .trials import Bench, opened, timed
from .usage import children

_CONNECTIONS = 32  # for each process


def measure(count: int, repetitions: int, args: Sequence[str], bench: Bench) -> Iterator[Record]:
    """One process and `count` of them in turn; args: more flags of `serve`."""
    for repetition in range(repetitions):
        for processes in (1, count):
            bench.progress(f"repetition {repetition + 1}: {title(processes)}")
            subject = several(processes, args)
            record = Record(row=title(processes), subject=subject.name, repetition=repetition)
            try:
                yield _trial(record, subject, processes, replace(bench, cores=_share_out(processes, count)))
            except (TrialError, PeerError) as exc:
                yield msgspec.structs.replace(record, problem=exc.message)


def title(count: int) -> str:
    return f"{count} processes" if count > 1 else "1 process"


def markdown(run: Run, count: int) -> str:
    """Medians over the repetitions, with the least and the most; ratios are of trials beside one another."""
    one, many = ([record for record in run.records if record.row == title(processes)] for processes in (1, count))
    table = ["|  | requests/s | CPU us a request |", "| --- | ---: | ---: |"]
    for processes, records in ((1, one), (count, many)):
        rates, costs = _values(records, request_rate), _values(records, cpu_us)
        table.append(f"| {title(processes)} | {_spread(rates, 0)} | {_spread(costs, 0)} |")
    more = [b / a for a, b in _pairs(one, many, request_rate)]
    room = [count * a / b for a, b in _pairs(one, many, cpu_us)]
    table.append(f"| ratio | {_spread(more, 2)} | {count} cores have CPU time for {_spread(room, 2)} |")
    return "\n".join([about(run, "each process with a core"), "", *table, problems(run)])


Value = Callable[[Record], float | None]


def _values(records: Iterable[Record], value: Value) -> list[float]:
    return [found for record in records if (found := value(record))]


def _pairs(one: Iterable[Record], many: Iterable[Record], value: Value) -> list[tuple[float, float]]:
    """Of the repetitions in which both were measured."""
    by_repetition = {record.repetition: found for record in many if (found := value(record))}
    return [
        (found, by_repetition[record.repetition])
        for record in one
        if (found := value(record)) and record.repetition in by_repetition
    ]


def _trial(record: Record, subject: Subject, processes: int, bench: Bench) -> Record:
    row = Row(name=record.row, connections=processes * _CONNECTIONS)
    with (
        running_backend(bench.tools, bench.cores.mock, bench.folder) as backend,
        opened(subject, Fleet.PLAIN, backend, bench) as door,
    ):
        assert door.pid is not None, "a proxy"
        if processes > 1:
            serving = children(door.pid)
            if len(serving) != processes:
                raise TrialError(f"{len(serving)} of {processes} processes serve")
            for pid, core in zip(serving, bench.cores.proxy, strict=True):
                os.sched_setaffinity(pid, {core})
        clients = Clients(bench.tools, bench.cores, bench.folder)
        timed(record, door, row, clients, bench.seconds)  # what is slower at first is no part of it
        return timed(record, door, row, clients, bench.seconds)


def _share_out(processes: int, most: int) -> Cores:
    """A core for each. The mock backend and the load generator have those that `most` processes leave them, if that is
    two or more; else they are on the same cores as the processes, however many these are."""
    ordered = sorted(os.sched_getaffinity(0), reverse=True)
    ours, left = frozenset(ordered[:processes]), frozenset(ordered[most:])
    others = left if len(left) > 1 else ours
    return Cores(ours, others, others)


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    low, middle, high = (f"{value:,.{digits}f}" for value in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})"
