"""The programs of a measurement, each on its own cores and in a process group of its own."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
_ENDS_S = 5.0


@dataclass(frozen=True, slots=True)
class Cores:
    proxy: frozenset[int]
    mock: frozenset[int]
    load: frozenset[int]


def assign_cores(cores: Collection[int]) -> Cores:
    """With two cores, the mock backend and the load generator share the other one; with one, all share it."""
    ordered = sorted(cores)
    proxy, others = ordered[-1], ordered[:-1] or ordered
    mock, load = (others[0], others[1]) if len(others) > 1 else (others[0], others[0])
    return Cores(frozenset({proxy}), frozenset({mock}), frozenset({load}))


@contextmanager
def running_on(cores: Collection[int]) -> Iterator[None]:
    """This process is on these cores, and so is a program started inside: it counts its cores as it starts."""
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, ours)


class Program:
    """A running program, with its output in `log`."""

    def __init__(self, argv: Sequence[str], cores: Collection[int], log: Path, *, pipes: bool = False) -> None:
        self.argv = argv
        self.log = log
        with log.open("wb") as output, running_on(cores):
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is ours to pass on, and a group can be ended as one
                cwd=log.parent,
            )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def line(self) -> str:
        """The next line of its output; empty at the end. Needs `pipes`."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def stop(self) -> None:
        """Ends it and all that it started: SIGTERM, then SIGKILL, also if this is interrupted meanwhile."""
        try:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_ENDS_S)
        finally:
            self._signal(signal.SIGKILL)
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # all of the group have ended
            os.killpg(self.pid, number)


def raise_descriptor_limit() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
