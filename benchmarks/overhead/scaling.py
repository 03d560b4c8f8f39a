"""What the processes of one proxy cost beside as many proxies of one process each, which share nothing.

Each process has a core to itself and the same load, from a load generator of its own. A proxy alone answers what one of
several strangers does, so the ratio says how many times that the processes of one proxy answer. Where no two cores are
left for the mock backend and the load generators, they run on the same ones, beside strangers and siblings alike.
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
from .trials import Door, OverheadBench, opened
from .usage import children

_CONNECTIONS = 32  # for each process
_MILLIONS = 1000  # of conversations, for each load generator: no two of them have one in common
STRANGERS, SIBLINGS = "proxies of 1 process", "processes of 1 proxy"


def measure(count: int, repetitions: int, args: Sequence[str], bench: OverheadBench) -> Iterator[RowRecord]:
    """Strangers and siblings in turn, `count` of each; args: more flags of `serve`."""
    for repetition in range(repetitions):
        for row in (STRANGERS, SIBLINGS):
            bench.progress(f"repetition {repetition + 1}: {count} {row}")
            record = RowRecord(row=row, subject=several(count if row == SIBLINGS else 1).name, repetition=repetition)
            try:
                yield _trial(record, count, args, replace(bench, cores=_share_out(count)))
            except (TrialError, PeerError) as exc:
                yield msgspec.structs.replace(record, problem=exc.message)


def markdown(run: OverheadRun, count: int) -> str:
    """Medians over the repetitions, with the least and the most; ratios are of trials beside one another."""
    strangers, siblings = ([record for record in run.records if record.row == row] for row in (STRANGERS, SIBLINGS))
    table = ["|  | requests/s | CPU us a request |", "| --- | ---: | ---: |"]
    for row, records in ((STRANGERS, strangers), (SIBLINGS, siblings)):
        rates, costs = _values(records, request_rate), _values(records, cpu_us)
        table.append(f"| {count} {row} | {_spread(rates, 0)} | {_spread(costs, 0)} |")
    more = [count * many / one for one, many in _pairs(strangers, siblings, request_rate)]
    room = [count * one / many for one, many in _pairs(strangers, siblings, cpu_us)]
    table.append(f"| {count} {SIBLINGS}, to one process | {_spread(more, 2)} x | {_spread(room, 2)} x by CPU time |")
    return "\n".join([about(run, "each process with a core"), "", *table, problems(run)])


Value = Callable[[RowRecord], float | None]


def _values(records: Iterable[RowRecord], value: Value) -> list[float]:
    return [found for record in records if (found := value(record))]


def _pairs(one: Iterable[RowRecord], many: Iterable[RowRecord], value: Value) -> list[tuple[float, float]]:
    """Of the repetitions in which both were measured."""
    by_repetition = {record.repetition: found for record in many if (found := value(record))}
    return [
        (found, by_repetition[record.repetition])
        for record in one
        if (found := value(record)) and record.repetition in by_repetition
    ]


def _trial(record: RowRecord, count: int, args: Sequence[str], bench: OverheadBench) -> RowRecord:
    with running_backend(bench.tools, bench.cores.mock, bench.folder) as backend, ExitStack() as stack:
        if record.row == SIBLINGS:
            door = stack.enter_context(opened(several(count, args), FleetKind.PLAIN, backend, bench))
            _pin(door, bench.cores.proxy)
            doors = [door] * count
        else:
            alone = [replace(bench, cores=replace(bench.cores, proxy=frozenset({core}))) for core in bench.cores.proxy]
            doors = [stack.enter_context(opened(several(1, args), FleetKind.PLAIN, backend, one)) for one in alone]
        clients = [
            LoadGenerator(bench.tools, bench.cores, bench.folder, name=f"-{number}", millions=_MILLIONS * number)
            for number in range(count)
        ]
        _asked(record, doors, clients, bench.seconds)  # what is slower at first is no part of it
        return _asked(record, doors, clients, bench.seconds)


def _asked(record: RowRecord, doors: Sequence[Door], clients: Sequence[LoadGenerator], seconds: float) -> RowRecord:
    row = Row(name=record.row, connections=_CONNECTIONS)
    pairs = list(zip(doors, clients, strict=True))
    firsts = [each.new_conversations() for each in clients]
    for (door, each), first in zip(pairs, firsts, strict=True):
        each.greet(row, door.port, first)
    with ExitStack() as stack:
        programs = [
            stack.enter_context(each.asking(row, door.port, first, seconds))
            for (door, each), first in zip(pairs, firsts, strict=True)
        ]
        for program in programs:
            await_line(program, "begin")
        begun_s, begun = time.monotonic(), _cpu_s(doors)
        for program in programs:
            await_line(program, "end")
        took_s, ended = time.monotonic() - begun_s, _cpu_s(doors)
        loads = [finished(program) for program in programs]
    load = LoadResult(seconds=round(took_s, 4), **{name: sum(getattr(one, name) for one in loads) for name in _COUNTS})
    return msgspec.structs.replace(record, load=load, cpu_s=round(ended - begun, 4))


_COUNTS = ("asked", "right", "refused", "broken", "refusals", "wrong", "unanswered")


def _cpu_s(doors: Sequence[Door]) -> float:
    usages = {door.port: door.usage() for door in doors}  # one proxy has one door, however many go in by it
    return sum(one.cpu_s for one in usages.values() if one is not None)


def _pin(door: Door, cores: Iterable[int]) -> None:
    assert door.pid is not None, "a proxy"
    serving, cores = children(door.pid), list(cores)
    if len(serving) != len(cores):
        raise TrialError(f"{len(serving)} of {len(cores)} processes serve")
    for pid, core in zip(serving, cores, strict=True):
        os.sched_setaffinity(pid, {core})


def _share_out(count: int) -> Cores:
    """A core for each process, and the rest for the others if that is two or more, else all."""
    ordered = sorted(os.sched_getaffinity(0), reverse=True)
    ours, left = frozenset(ordered[:count]), frozenset(ordered[count:])
    others = left if len(left) > 1 else frozenset(ordered)
    return Cores(ours, others, others)


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    low, middle, high = (f"{value:,.{digits}f}" for value in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})"
