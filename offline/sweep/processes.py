"""Where stations live: in slots, each of which measures one run at a time. Here: processes of this machine.

`ray_pool` has those of a Ray cluster. A sweep drives both kinds by the same code, and they bring the same results.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol

from ..experiment.records import RunResult
from ..experiment.run import Run
from .backend import Station, StationPlan, Survey


class Slot(Protocol):
    def survey(self, samples: tuple[Run, ...]) -> Future[Survey]: ...

    def measure(self, run: Run) -> Future[RunResult]: ...

    def is_death(self, exc: BaseException) -> bool:
        """Whether a call ended so because its process died, as against an error of its own."""

    def reopen(self) -> None:
        """A new process in place of one that died."""

    def abandon(self) -> None:
        """Ends the run at hand, unfinished. `close` still has to be called."""

    def close(self) -> None:
        """Waits until the station, and a fleet that it started, are gone."""


class Process:
    """A slot that is a process of this machine."""

    def __init__(self, plan: StationPlan) -> None:
        self._plan = plan
        self.reopen()

    def is_death(self, exc: BaseException) -> bool:
        return isinstance(exc, BrokenProcessPool)

    def reopen(self) -> None:
        # Not a fork: this process has threads, and a fork would keep their locks for ever.
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(1, context, _open_station, (self._plan,))
        self._pid = self._executor.submit(os.getpid)

    def survey(self, samples: tuple[Run, ...]) -> Future[Survey]:
        return self._executor.submit(_survey, samples)

    def measure(self, run: Run) -> Future[RunResult]:
        return self._executor.submit(_measure, run)

    def abandon(self) -> None:
        # At once, or as soon as its number is here: the process may be at work before this one has read that.
        self._pid.add_done_callback(_end)

    def close(self) -> None:
        with contextlib.suppress(BrokenProcessPool):  # it died
            self._executor.submit(_close)
        self._executor.shutdown()


def _end(pid: Future[int]) -> None:
    if not pid.cancelled() and not pid.exception():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid.result(), signal.SIGTERM)


_opened: list[Station] = []  # in a slot's process: its one station, as an executor's calls share nothing else


def _open_station(plan: StationPlan) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the sweep's business; it says what to do
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the call at hand, not the process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _opened.append(plan.open())


def _end_with_parent() -> None:
    """An executor's process does not notice that its parent was killed, and would keep its fleet for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a slot's process only"
    parent.join()
    os._exit(1)


def _survey(samples: tuple[Run, ...]) -> Survey:
    return _opened[0].survey(samples)


def _measure(run: Run) -> RunResult:
    return _opened[0].measure(run)


def _close() -> None:
    _opened.pop().close()
