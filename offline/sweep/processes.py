"""Executors that are processes of this machine. `ray` has those of a Ray cluster; a sweep drives both alike."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker

from ..experiment.records import RunResult
from ..experiment.run import Run
from .backend import Backend, BackendPlan, Survey


class ProcessExecutor:
    def __init__(self, plan: BackendPlan) -> None:
        self._plan = plan
        self.reopen()

    def is_death(self, exc: BaseException) -> bool:
        return isinstance(exc, BrokenProcessPool)

    def reopen(self) -> None:
        # Not a fork: this process has threads, and a forked child would keep their locks for ever.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, _open_backend, (self._plan,))
        with interrupts_held():
            self._pid = self._pool.submit(os.getpid)

    def survey(self, samples: tuple[Run, ...]) -> Future[Survey]:
        return self._pool.submit(_survey, samples)

    def measure(self, run: Run) -> Future[RunResult]:
        return self._pool.submit(_measure, run)

    def abandon(self) -> None:
        # At once, or as soon as the pid is known: the process may start its work before this one has read the pid.
        self._pid.add_done_callback(_end)

    def close(self) -> None:
        with contextlib.suppress(BrokenProcessPool):  # it died
            self._pool.submit(_close)
        self._pool.shutdown()


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """A process that is started within never hears Ctrl-C: it would end with a traceback while it still imports."""
    resource_tracker.ensure_running()  # whose start lets signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(pid: Future[int]) -> None:
    if not pid.cancelled() and not pid.exception():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid.result(), signal.SIGTERM)


_opened: list[Backend] = []  # in the executor's process: its one backend; calls to a pool share only globals


def _open_backend(plan: BackendPlan) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep handles Ctrl-C and ends its executors
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the current call, not the process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _opened.append(plan.open())


def _end_with_parent() -> None:
    # Without this the process would outlive a killed parent and keep its fleet for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in an executor's process only"
    parent.join()
    os._exit(1)


def _survey(samples: tuple[Run, ...]) -> Survey:
    return _opened[0].survey(samples)


def _measure(run: Run) -> RunResult:
    return _opened[0].measure(run)


def _close() -> None:
    _opened.pop().close()
