"""Trials on several processors."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from os import _exit

from ..sweep.processes import interrupts_held
from .trying import Conditions, Job, Trying, TryOutcome


class TryingProcesses:
    """Outcomes come in the jobs' order."""

    def __init__(self, conditions: Conditions, processes: int) -> None:
        # Not a fork: this process may have threads.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, context, _begin, (conditions,))

    def __call__(self, jobs: Sequence[Job]) -> list[TryOutcome]:
        with interrupts_held():
            outcomes = self._pool.map(_try, jobs)
        return [*outcomes]

    def close(self) -> None:
        """What has not begun is dropped."""
        for process in [*(self._pool._processes or {}).values()]:
            process.terminate()
        self._pool.shutdown(cancel_futures=True)


_trying: list[Trying] = []  # of a process: calls to a pool share only globals


def _begin(conditions: Conditions) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program handles Ctrl-C
    logging.disable(logging.WARNING)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _trying.append(Trying(conditions))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a pool's process only"
    parent.join()
    _exit(1)


def _try(job: Job) -> TryOutcome:
    return _trying[0](job)
