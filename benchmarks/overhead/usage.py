"""CPU time, resident memory and open files of a process and all its descendants, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """One line of /proc/*/stat. `cpu_s` includes children that have ended and were waited for."""

    pid: int
    parent: int
    cpu_s: float
    rss_kib: int


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    cpu_s: float
    rss_kib: int


def parse_stat(text: str) -> ProcessUsage:
    """Fields are counted from the last bracket, as a process's name may hold blanks and brackets."""
    pid, _, rest = text.partition(" (")
    fields = rest.rpartition(") ")[2].split()
    ticks = sum(int(fields[at]) for at in (11, 12, 13, 14))
    return ProcessUsage(int(pid), int(fields[1]), ticks / _TICKS_PER_S, int(fields[21]) * _PAGE_KIB)


def family(root: int, processes: Mapping[int, ProcessUsage]) -> list[ProcessUsage]:
    found, pids = [], [root]
    while pids:
        pid = pids.pop()
        if pid in processes:
            found.append(processes[pid])
        pids += [process.pid for process in processes.values() if process.parent == pid]
    return found


def total(processes: Iterable[ProcessUsage]) -> ResourceUsage:
    processes = list(processes)
    return ResourceUsage(sum(one.cpu_s for one in processes), sum(one.rss_kib for one in processes))


def usage(pid: int) -> ResourceUsage:
    return total(family(pid, _all()))


def open_files(pid: int) -> int:
    """How many descriptors the process and all its descendants have open."""
    return sum(_descriptors(one.pid) for one in family(pid, _all()))


def children(pid: int) -> list[int]:
    return sorted(process.pid for process in _all().values() if process.parent == pid)


def _descriptors(pid: int) -> int:
    with suppress(OSError):  # it has ended
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return 0


def _all() -> dict[int, ProcessUsage]:
    processes = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            process = parse_stat(path.read_text())
            processes[process.pid] = process
    return processes
