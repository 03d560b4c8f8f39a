"""The sweep's loop: hands waiting runs to idle executors, saves each result at once, goes on where a fleet is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from ppd.proxy.errors import ConfigError, PPDError

from ..experiment.records import Origin, Outcome, Record, RunResult, in_order
from ..experiment.run import Run
from .backend import Executor, FleetLost, Survey
from .folder import SweepFolder
from .schedule import Schedule

log = logging.getLogger(__name__)

LOOK_S = 0.25  # how long Ctrl-C may wait
DEATHS = 2  # of its process, after which a run is recorded as failed
MISTAKES = 3  # of the harness itself in a row, after which the sweep ends


class Watcher(Protocol):
    def started(self, run: Run, place: str) -> None: ...

    def put_back(self, run: Run) -> None: ...

    def finished(self, result: RunResult) -> None: ...

    def note(self, line: str) -> None: ...

    def refresh(self) -> None: ...


@dataclass(slots=True)
class SurveyedExecutor:
    executor: Executor
    survey: Survey
    topologies: set[str]  # that it can measure


@dataclass(slots=True)
class Loop:
    """One pass through a schedule. `stopped`: the user wants it to end."""

    schedule: Schedule
    folder: SweepFolder
    watcher: Watcher
    stopped: Callable[[], bool]
    _busy: dict[Future[RunResult], tuple[SurveyedExecutor, Run]] = field(default_factory=dict)
    _deaths: dict[str, int] = field(default_factory=dict)
    _mistakes: int = 0

    def drive(self, executors: Sequence[SurveyedExecutor]) -> bool:
        """Until these executors can measure nothing more; False if `stopped` ended it, current runs abandoned."""
        try:
            while not self.stopped():
                self._hand_out(executors)
                if not self._busy:
                    return True
                done, _ = wait(self._busy, timeout=LOOK_S, return_when=FIRST_COMPLETED)
                for future in done:
                    self._take_in(future, *self._busy.pop(future))
                self.watcher.refresh()
            return False
        finally:
            for surveyed, run in self._busy.values():
                surveyed.executor.abandon()
                self.schedule.put_back(run)

    def _hand_out(self, executors: Sequence[SurveyedExecutor]) -> None:
        busy = [id(surveyed) for surveyed, _ in self._busy.values()]
        for surveyed in executors:
            if id(surveyed) not in busy and (run := self.schedule.take(surveyed.topologies)) is not None:
                self._busy[self._begun(surveyed, run)] = (surveyed, run)
                self.watcher.started(run, surveyed.survey.place)

    def _begun(self, surveyed: SurveyedExecutor, run: Run) -> Future[RunResult]:
        # The process may have died while it was idle: then a new one takes the run.
        try:
            try:
                return surveyed.executor.measure(run)
            except Exception as exc:
                if not surveyed.executor.is_death(exc):
                    raise
                surveyed.executor.reopen()
                self.watcher.note(f"{surveyed.survey.place}: its process died; a new one is started")
                return surveyed.executor.measure(run)
        except Exception:
            self.schedule.put_back(run)
            raise

    def _take_in(self, future: Future[RunResult], surveyed: SurveyedExecutor, run: Run) -> None:
        try:
            self._keep(future.result())
            self._mistakes = 0
        except FleetLost as exc:
            self.schedule.put_back(run)
            surveyed.topologies.discard(run.topology)
            self.watcher.put_back(run)
            self.watcher.note(f"{surveyed.survey.place}: no more runs of {run.topology} here: {exc.message}")
        except PPDError:  # nothing can be measured like this, as where the disk is full
            raise
        except Exception as exc:
            if surveyed.executor.is_death(exc):
                surveyed.executor.reopen()
                self._died(surveyed, run)
            else:
                self._mistaken(surveyed, run, exc)

    def _mistaken(self, surveyed: SurveyedExecutor, run: Run, exc: Exception) -> None:
        # One run that the harness fails at must not end a sweep of days; MISTAKES in a row must.
        self._mistakes += 1
        if self._mistakes == MISTAKES:
            self.schedule.put_back(run)
            raise exc
        log.error("the harness failed at %s", run.id, exc_info=exc)
        self._keep(failure(run, surveyed.survey.origin, f"the harness failed: {type(exc).__name__}: {exc}"))

    def _died(self, surveyed: SurveyedExecutor, run: Run) -> None:
        # The run may not be what killed its process, so it gets another try.
        self._deaths[run.id] = self._deaths.get(run.id, 0) + 1
        if self._deaths[run.id] == DEATHS:
            self._keep(failure(run, surveyed.survey.origin, "the process that measured it died"))
            return
        self.schedule.put_back(run)
        self.watcher.put_back(run)
        self.watcher.note(f"{surveyed.survey.place}: the process that measured {run.id} died; it is measured once more")

    def _keep(self, result: RunResult) -> None:
        self.folder.save(result)
        self.schedule.done(result)
        self.watcher.finished(result)


def failure(run: Run, origin: Origin, reason: str, records: Iterable[Record] = ()) -> RunResult:
    return RunResult(
        run=run,
        outcome=Outcome.FAILED,
        origin=origin,
        started=utc_now(),
        wall_s=0.0,
        records=in_order(records),
        reason=reason,
    )


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def survey(
    executors: Sequence[Executor], waiting: Sequence[Run], stopped: Callable[[], bool], note: Callable[[str], None]
) -> list[SurveyedExecutor]:
    """The executors with what each can measure. `note` gets a line for each topology that none of them can measure.

    PPDError where nothing can be measured. Empty where `stopped` ended it: an engine may have to be installed first.
    """
    samples: dict[str, Run] = {}
    for run in waiting:
        samples.setdefault(run.topology, run)
    asked = [executor.survey(tuple(samples.values())) for executor in executors]
    while wait(asked, timeout=LOOK_S).not_done:
        if stopped():
            for executor in executors:
                executor.abandon()
            return []
    found = [_surveyed(executor, future, samples) for executor, future in zip(executors, asked, strict=True)]
    for reason in _unfit(found, samples):
        note(f"skipped: {reason}")
    return found


def _unfit(executors: Sequence[SurveyedExecutor], topologies: Collection[str]) -> list[str]:
    reasons = []
    for topology in topologies:
        if not any(topology in surveyed.topologies for surveyed in executors):
            why = dict.fromkeys(dict(surveyed.survey.unfit)[topology] for surveyed in executors)
            reasons.append(f"{topology}: {'; '.join(why)}")
    if len(reasons) == len(topologies):
        raise ConfigError(f"nothing can be measured: {', '.join(reasons)}")
    return reasons


def _surveyed(executor: Executor, asked: Future[Survey], topologies: Iterable[str]) -> SurveyedExecutor:
    try:
        found = asked.result()
    except Exception as exc:
        if not executor.is_death(exc):
            raise
        told = str(exc).strip().splitlines() or [type(exc).__name__]
        raise ConfigError(f"a process to measure in did not start: {told[-1]}") from exc
    return SurveyedExecutor(executor, found, set(topologies) - dict(found.unfit).keys())
