"""Where jobs are done: processes of this machine, or tasks on a Ray cluster."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, Protocol

from ppd.offline.sweep.ray import Ray

from .measuring import MeasureJob, measure
from .records import CellRecord


class Executor(Protocol):
    @property
    def places(self) -> int:
        """Jobs at once."""
        ...

    def submit(self, job: MeasureJob) -> Future[CellRecord]: ...
    def close(self) -> None: ...


class ProcessPool:
    def __init__(self, places: int, niceness: int) -> None:
        self.places = places
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(places, context, _begin, (niceness,))

    def submit(self, job: MeasureJob) -> Future[CellRecord]:
        return self._pool.submit(measure, job)

    def close(self) -> None:
        """What has not begun is dropped; what runs ends first."""
        self._pool.shutdown(cancel_futures=True)


def _begin(niceness: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program handles Ctrl-C
    os.nice(niceness)
    logging.disable(logging.WARNING)


class RayTasks:
    """One CPU each; the data has to lie at the same path on every machine."""

    def __init__(self, address: str) -> None:
        self._cluster = Ray(address)
        import ray

        self._ask: Any = ray.remote(num_cpus=1, max_retries=3)(measure)
        self.places = self._cluster.cpus

    def submit(self, job: MeasureJob) -> Future[CellRecord]:
        asked: Future[CellRecord] = self._ask.remote(job).future()
        return asked

    def close(self) -> None:
        self._cluster.close()
