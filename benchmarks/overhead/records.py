"""The records of a measurement, from which the table is made."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ppd.proxy.errors import FormatError

VERSION = 1


class Durations(msgspec.Struct, frozen=True):
    count: int
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float


class LoadResult(msgspec.Struct, frozen=True):
    """The load generator's result. Latencies are of requests that began in the measured span."""

    seconds: float
    asked: int  # also before and after the measured span
    right: int  # answers, in the measured span
    refused: int = 0  # connections
    broken: int = 0  # connections that ended before their answer did
    refusals: int = 0  # a status other than 200
    wrong: int = 0  # incomplete, or of another conversation
    unanswered: int = 0  # when it ended; not a fault for a stream without an end
    holding: int = 0  # streams open, with their first chunk
    chunks: int = 0
    whole: Durations | None = None  # from the request to the answer's end
    first: Durations | None = None  # to its first chunk
    late: int = 0  # requests of an open loop that found no connection free
    statuses: Mapping[int, int] = {}  # of the refusals, how many of which; 0: none that HTTP knows

    @property
    def faults(self) -> dict[str, int]:
        """What came in place of right answers, and how often."""
        ends = {"connection refused": self.refused, "broken off": self.broken, "wrong answer": self.wrong}
        return {str(status): count for status, count in self.statuses.items()} | {
            end: count for end, count in ends.items() if count
        }


class Stats(msgspec.Struct, frozen=True):
    """The mock backend's counters."""

    requests: int = 0
    answers: int = 0
    streams: int = 0
    chunks: int = 0
    prefills: int = 0
    handovers: int = 0  # decode legs with a prefill's parameters
    aborted: int = 0
    unknown: int = 0  # paths that it does not have
    open: int = 0

    def since(self, before: Stats) -> Stats:
        return Stats(**{name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__})


class RowRecord(msgspec.Struct, frozen=True):
    """One row of one subject in one repetition; `problem` says why there are no figures."""

    row: str
    subject: str
    repetition: int
    problem: str = ""
    load: LoadResult | None = None
    backend: Stats | None = None
    cpu_s: float | None = None  # of the proxy, in the measured span; None for a direct connection
    rss_kib_before: int | None = None
    rss_kib: int | None = None  # at the end of the measured span

    @property
    def faults(self) -> int:
        load = self.load
        return load.refused + load.broken + load.refusals + load.wrong if load else 0


class Machine(msgspec.Struct, frozen=True):
    cpu: str
    cores: int
    memory_gib: int
    kernel: str
    python: str


class OverheadRun(msgspec.Struct, frozen=True):
    date: str
    seconds: float
    repetitions: int
    machine: Machine
    versions: Mapping[str, str]
    ppd_args: tuple[str, ...]
    took_s: float
    records: tuple[RowRecord, ...]
    version: int = VERSION


def encode(run: OverheadRun) -> bytes:
    """One record per line, so that two files can be compared line by line."""
    head, _, records = msgspec.json.encode(run).partition(b'"records":[')
    listed, _, tail = records.rpartition(b"]")
    return head + b'"records":[\n' + listed.replace(b'},{"row"', b'},\n{"row"') + b"\n]" + tail + b"\n"


def decode(data: bytes) -> OverheadRun:
    try:
        run = msgspec.json.decode(data, type=OverheadRun)
    except msgspec.DecodeError as exc:
        raise FormatError(f"records of a proxy's overhead: {exc}") from exc
    if run.version != VERSION:
        raise FormatError(f"records of a proxy's overhead: version {run.version}, known is {VERSION}")
    return run


def this_machine() -> Machine:
    """Without a host name or anything else that identifies it."""
    return Machine(
        cpu=cpu_model(Path("/proc/cpuinfo").read_text()),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        kernel=platform.release().partition("-")[0],
        python=platform.python_version(),
    )


def cpu_model(cpuinfo: str) -> str:
    named = (line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name"))
    return next(named, platform.machine())
