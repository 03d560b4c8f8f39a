"""Measures a subject row by row. It is restarted in every repetition."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ppd.servers.fleet.ports import free_ports

from .backend import Backend, LoadGenerator, TrialError, ask_once, await_line, finished, running_backend
from .native import Tools
from .peers import PeerError, last_lines
from .processes import Cores, Program
from .records import RowRecord
from .rows import ROWS, LoadMode, Row
from .subjects import DIRECT, FleetKind, Subject, SubjectPorts
from .usage import ResourceUsage, usage

_STARTS_S = 40.0
_SETTLES_S = 1.0  # between opening streams and reading the memory
_STRAY_LEGS = 0.02  # tolerated share of all requests: canaries, or sessions that were just evicted

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadBench:
    tools: Tools
    cores: Cores
    folder: Path
    seconds: float
    progress: Progress


@dataclass(frozen=True, slots=True)
class MeasuredEndpoint:
    """A proxy, or the backend itself for a direct connection, which has no `pid` and no log."""

    subject: str
    port: int
    backend: Backend
    pid: int | None = None
    log: Path | None = None

    def usage(self) -> ResourceUsage | None:
        if self.pid is None:
            return None
        now = usage(self.pid)
        if not now.rss_kib:
            raise TrialError(f"{self.subject} ended")
        return now


def select(names: Sequence[str]) -> tuple[Row, ...]:
    """Rows by name, in the order of ROWS, with the rows that they come after."""
    wanted = set(names) | {row.after for row in ROWS if row.name in names}
    return tuple(row for row in ROWS if not names or row.name in wanted)


def measure(subject: Subject | None, rows: Sequence[Row], bench: OverheadBench, repetition: int) -> Iterator[RowRecord]:
    """One repetition of one subject; None is a direct connection."""
    name = subject.name if subject else DIRECT
    for fleet in FleetKind:
        its = [row for row in rows if row.fleet is fleet and (subject or row.has_direct)]
        if not its:
            continue
        bench.progress(f"repetition {repetition + 1}: {name}, {fleet}")
        with running_backend(bench.tools, bench.cores.mock, bench.folder) as backend:
            try:
                with opened(subject, fleet, backend, bench) as endpoint:
                    yield from _rows(endpoint, its, bench, repetition)
            except PeerError as exc:
                for row in its:
                    yield RowRecord(row=row.name, subject=name, repetition=repetition, problem=exc.message)


@contextmanager
def opened(
    subject: Subject | None, fleet: FleetKind, backend: Backend, bench: OverheadBench
) -> Iterator[MeasuredEndpoint]:
    """Starts the subject in front of the backend; PeerError says why it cannot."""
    if subject is None:
        yield MeasuredEndpoint(DIRECT, backend.decode, backend)
        return
    command = subject.command(fleet)
    if command is None:
        raise PeerError(subject.why_not)
    port, metrics = free_ports(2)
    ports = SubjectPorts(port, metrics, backend.prefill, backend.decode)
    try:
        program = Program(command(ports), bench.cores.proxy, bench.folder / f"{subject.name}-{fleet}.log")
    except OSError as exc:
        hint = "`python -m benchmarks.overhead install` installs the peers"
        raise PeerError(f"can't be started: {exc.strerror}; {hint}") from exc
    with program:
        _wait_ready(program, ports, fleet, backend)
        yield MeasuredEndpoint(subject.name, ports.port, backend, program.pid, program.log)


def _wait_ready(program: Program, ports: SubjectPorts, fleet: FleetKind, backend: Backend) -> None:
    """Until a request is answered, through P where the fleet is a pair: workers may come up one by one."""
    ends_s = time.monotonic() + _STARTS_S
    while time.monotonic() < ends_s and not program.has_ended:
        before = backend.stats().handovers
        if ask_once(ports.port) and (fleet is FleetKind.PLAIN or backend.stats().handovers > before):
            return
        time.sleep(0.1)
    why = "ended" if program.has_ended else f"did not answer within {_STARTS_S:g} s"
    raise PeerError(f"{why}: {last_lines(program.log.read_text(errors='replace'))}")


def _rows(
    endpoint: MeasuredEndpoint, rows: Sequence[Row], bench: OverheadBench, repetition: int
) -> Iterator[RowRecord]:
    clients = LoadGenerator(bench.tools, bench.cores, bench.folder)
    held = [row for row in rows if row.load is LoadMode.HOLD]
    if held:
        yield from _hold(endpoint, held, clients, repetition)
    for row in rows:
        if row.load is LoadMode.HOLD:
            continue
        record = RowRecord(row=row.name, subject=endpoint.subject, repetition=repetition)
        try:
            yield timed(record, endpoint, row, clients, bench.seconds)
        except TrialError as exc:
            yield msgspec.structs.replace(record, problem=exc.message)
        endpoint.backend.wait_quiet()


def timed(record: RowRecord, endpoint: MeasuredEndpoint, row: Row, clients: LoadGenerator, seconds: float) -> RowRecord:
    first = clients.new_conversations()
    if not row.fresh:
        clients.ask_first_turns(row, endpoint.port, first)
    before = endpoint.backend.stats()
    with clients.asking(row, endpoint.port, first, seconds) as program:
        await_line(program, "begin")
        begun = endpoint.usage()
        await_line(program, "end")
        ended = endpoint.usage()
        load = finished(program)
    backend = endpoint.backend.stats().since(before)
    record = msgspec.structs.replace(record, load=load, backend=backend)
    if begun and ended:
        record = msgspec.structs.replace(
            record,
            cpu_s=round(ended.cpu_s - begun.cpu_s, 4),
            rss_kib_before=begun.rss_kib,
            rss_kib=ended.rss_kib,
        )
    return msgspec.structs.replace(record, problem=stray_legs(row, record))


def stray_legs(row: Row, record: RowRecord) -> str:
    """Why too many requests had other legs than the row is about; empty if they did not."""
    load, backend = record.load, record.backend
    if load is None or backend is None or record.subject == DIRECT:
        return ""
    legs = backend.handovers if row.fleet is FleetKind.PAIR else load.asked - backend.prefills
    if legs >= load.asked * (1 - _STRAY_LEGS):
        return ""
    wanted = "P and then D" if row.fleet is FleetKind.PAIR else "one leg"
    return f"{load.asked - legs} of {load.asked} requests were not {wanted}"


def _hold(
    endpoint: MeasuredEndpoint, rows: Sequence[Row], clients: LoadGenerator, repetition: int
) -> Iterator[RowRecord]:
    records = [RowRecord(row=row.name, subject=endpoint.subject, repetition=repetition) for row in rows]
    try:
        yield from _open_and_hold(endpoint, rows, clients, records)
    except TrialError as exc:
        yield from (msgspec.structs.replace(record, problem=exc.message) for record in records)
    endpoint.backend.wait_quiet()


def _open_and_hold(
    endpoint: MeasuredEndpoint, rows: Sequence[Row], clients: LoadGenerator, records: Sequence[RowRecord]
) -> list[RowRecord]:
    """Each row's streams are added to those already open; all rows share the memory before the first."""
    firsts = [clients.new_conversations() for _ in rows]
    for row, first in zip(rows, firsts, strict=True):
        clients.ask_first_turns(row, endpoint.port, first)
    time.sleep(_SETTLES_S)
    before, found, programs = endpoint.usage(), [], []
    with ExitStack() as stack:
        for row, first in zip(rows, firsts, strict=True):
            programs.append(stack.enter_context(clients.asking(row, endpoint.port, first, 0.0)))
            await_line(programs[-1], "begin")
            time.sleep(_SETTLES_S)
            found.append(endpoint.usage())
        for program in programs:
            program.close_stdin()
        loads = [finished(program) for program in programs]
    holding, done = 0, []
    for record, load, now in zip(records, loads, found, strict=True):
        holding += load.holding
        done.append(
            msgspec.structs.replace(
                record,
                load=msgspec.structs.replace(load, holding=holding),
                rss_kib_before=before.rss_kib if before else None,
                rss_kib=now.rss_kib if now else None,
                problem=f"{load.unanswered} streams did not begin" if load.unanswered else "",
            )
        )
    return done
