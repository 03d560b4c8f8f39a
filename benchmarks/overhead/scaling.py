"""The processes of one proxy, compared with as many proxies of one process each, which share nothing.

Each process has a core to itself and the same load, from a load generator of its own. The ratio is the throughput of
one proxy's processes together over that of one separate proxy. Where fewer than two cores are left for the mock backend
and the load generators, they run on the proxies' cores, in both cases alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median

import msgspec

from .backend import LoadGenerator, TrialError, await_line, finished, running_backend
from .peers import PeerError
from .processes import Cores
from .records import LoadResult, OverheadRun, RowRecord
from .report import about, problems
from .rows import Row, cpu_us, request_rate
from .subjects import FleetKind, several
from .trials import MeasuredEndpoint, OverheadBench, opened
from .usage import children

_CONNECTIONS = 32  # for each process
_MILLIONS = 1000  # of conversation numbers for each load generator, so that no two share one
SEPARATE, SHARED = "proxies of 1 process", "processes of 1 proxy"


def measure(count: int, repetitions: int, args: Sequence[str], bench: OverheadBench) -> Iterator[RowRecord]:
    """Separate proxies and one shared proxy in turn, `count` processes each; args: more flags of `serve`."""
    for repetition in range(repetitions):
        for row in (SEPARATE, SHARED):
            bench.progress(f"repetition {repetition + 1}: {count} {row}")
            record = RowRecord(row=row, subject=several(count if row == SHARED else 1).name, repetition=repetition)
            try:
                yield _trial(record, count, args, replace(bench, cores=_assign_cores(count)))
            except (TrialError, PeerError) as exc:
                yield msgspec.structs.replace(record, problem=exc.message)


def markdown(run: OverheadRun, count: int) -> str:
    separate, shared = ([record for record in run.records if record.row == row] for row in (SEPARATE, SHARED))
    table = ["|  | requests/s | CPU us a request |", "| --- | ---: | ---: |"]
    for row, records in ((SEPARATE, separate), (SHARED, shared)):
        rates, costs = _values(records, request_rate), _values(records, cpu_us)
        table.append(f"| {count} {row} | {_spread(rates, 0)} | {_spread(costs, 0)} |")
    more = [count * many / one for one, many in _pairs(separate, shared, request_rate)]
    room = [count * one / many for one, many in _pairs(separate, shared, cpu_us)]
    table.append(f"| {count} {SHARED}, to one process | {_spread(more, 2)} x | {_spread(room, 2)} x by CPU time |")
    return "\n".join([about(run, "each process with a core"), "", *table, problems(run)])


Value = Callable[[RowRecord], float | None]


def _values(records: Iterable[RowRecord], value: Value) -> list[float]:
    return [found for record in records if (found := value(record))]


def _pairs(one: Iterable[RowRecord], many: Iterable[RowRecord], value: Value) -> list[tuple[float, float]]:
    by_repetition = {record.repetition: found for record in many if (found := value(record))}
    return [
        (found, by_repetition[record.repetition])
        for record in one
        if (found := value(record)) and record.repetition in by_repetition
    ]


def _trial(record: RowRecord, count: int, args: Sequence[str], bench: OverheadBench) -> RowRecord:
    with running_backend(bench.tools, bench.cores.mock, bench.folder) as backend, ExitStack() as stack:
        if record.row == SHARED:
            endpoint = stack.enter_context(opened(several(count, args), FleetKind.PLAIN, backend, bench))
            _pin(endpoint, bench.cores.proxy)
            endpoints = [endpoint] * count
        else:
            alone = [replace(bench, cores=replace(bench.cores, proxy=frozenset({core}))) for core in bench.cores.proxy]
            endpoints = [stack.enter_context(opened(several(1, args), FleetKind.PLAIN, backend, one)) for one in alone]
        clients = [
            LoadGenerator(bench.tools, bench.cores, bench.folder, name=f"-{number}", millions=_MILLIONS * number)
            for number in range(count)
        ]
        _asked(record, endpoints, clients, bench.seconds)  # not counted: the first round is slower
        return _asked(record, endpoints, clients, bench.seconds)


def _asked(
    record: RowRecord, endpoints: Sequence[MeasuredEndpoint], clients: Sequence[LoadGenerator], seconds: float
) -> RowRecord:
    row = Row(name=record.row, connections=_CONNECTIONS)
    pairs = list(zip(endpoints, clients, strict=True))
    firsts = [each.new_conversations() for each in clients]
    for (endpoint, each), first in zip(pairs, firsts, strict=True):
        each.ask_first_turns(row, endpoint.port, first)
    with ExitStack() as stack:
        programs = [
            stack.enter_context(each.asking(row, endpoint.port, first, seconds))
            for (endpoint, each), first in zip(pairs, firsts, strict=True)
        ]
        for program in programs:
            await_line(program, "begin")
        begun_s, begun = time.monotonic(), _cpu_s(endpoints)
        for program in programs:
            await_line(program, "end")
        took_s, ended = time.monotonic() - begun_s, _cpu_s(endpoints)
        loads = [finished(program) for program in programs]
    load = LoadResult(seconds=round(took_s, 4), **{name: sum(getattr(one, name) for one in loads) for name in _COUNTS})
    return msgspec.structs.replace(record, load=load, cpu_s=round(ended - begun, 4))


_COUNTS = ("asked", "right", "refused", "broken", "refusals", "wrong", "unanswered")


def _cpu_s(endpoints: Sequence[MeasuredEndpoint]) -> float:
    usages = {endpoint.port: endpoint.usage() for endpoint in endpoints}  # one proxy may be listed several times
    return sum(one.cpu_s for one in usages.values() if one is not None)


def _pin(endpoint: MeasuredEndpoint, cores: Iterable[int]) -> None:
    assert endpoint.pid is not None, "a proxy"
    serving, cores = children(endpoint.pid), list(cores)
    if len(serving) != len(cores):
        raise TrialError(f"{len(serving)} of {len(cores)} processes serve")
    for pid, core in zip(serving, cores, strict=True):
        os.sched_setaffinity(pid, {core})


def _assign_cores(count: int) -> Cores:
    """A core for each process; for the other programs the rest if that is two or more, else all cores."""
    ordered = sorted(os.sched_getaffinity(0), reverse=True)
    ours, left = frozenset(ordered[:count]), frozenset(ordered[count:])
    others = left if len(left) > 1 else frozenset(ordered)
    return Cores(ours, others, others)


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    low, middle, high = (f"{value:,.{digits}f}" for value in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})"
