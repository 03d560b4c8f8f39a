"""The sweep's loop: hands waiting runs to idle slots, saves every result at once, and goes on where a fleet is lost."""

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
from .backend import FleetLost, Survey
from .folder import SweepFolder
from .processes import Slot
from .schedule import Schedule

log = logging.getLogger(__name__)

LOOK_S = 0.25  # how long Ctrl-C may wait
DEATHS = 2  # of its process, until a run is recorded as failed
MISTAKES = 3  # of the harness itself, one run after the other, until it is given up


class Watcher(Protocol):
    """What is shown while a sweep runs."""

    def started(self, run: Run, place: str) -> None: ...

    def put_back(self, run: Run) -> None: ...

    def finished(self, result: RunResult) -> None: ...

    def note(self, line: str) -> None: ...

    def refresh(self) -> None: ...


@dataclass(slots=True)
class Place:
    """A slot, and what it can measure."""

    slot: Slot
    survey: Survey
    topologies: set[str]


@dataclass(slots=True)
class Loop:
    """One going through of a schedule. `stopped` says that the user has had enough."""

    schedule: Schedule
    folder: SweepFolder
    watcher: Watcher
    stopped: Callable[[], bool]
    _busy: dict[Future[RunResult], tuple[Place, Run]] = field(default_factory=dict)
    _deaths: dict[str, int] = field(default_factory=dict)
    _mistakes: int = 0

    def drive(self, places: Sequence[Place]) -> bool:
        """Until nothing is left that these places can measure; False if `stopped` ended it, runs at hand abandoned."""
        try:
            while not self.stopped():
                self._hand_out(places)
                if not self._busy:
                    return True
                done, _ = wait(self._busy, timeout=LOOK_S, return_when=FIRST_COMPLETED)
                for future in done:
                    self._take_in(future, *self._busy.pop(future))
                self.watcher.refresh()
            return False
        finally:
            for place, run in self._busy.values():
                place.slot.abandon()
                self.schedule.put_back(run)

    def _hand_out(self, places: Sequence[Place]) -> None:
        busy = [id(place) for place, _ in self._busy.values()]
        for place in places:
            if id(place) not in busy and (run := self.schedule.take(place.topologies)) is not None:
                self._busy[self._begun(place, run)] = (place, run)
                self.watcher.started(run, place.survey.place)

    def _begun(self, place: Place, run: Run) -> Future[RunResult]:
        """A process may have died while it had nothing to do; a new one takes the run."""
        try:
            try:
                return place.slot.measure(run)
            except Exception as exc:
                if not place.slot.is_death(exc):
                    raise
                place.slot.reopen()
                self.watcher.note(f"{place.survey.place}: its process died; a new one is started")
                return place.slot.measure(run)
        except Exception:
            self.schedule.put_back(run)
            raise

    def _take_in(self, future: Future[RunResult], place: Place, run: Run) -> None:
        try:
            self._keep(future.result())
            self._mistakes = 0
        except FleetLost as exc:
            self.schedule.put_back(run)
            place.topologies.discard(run.topology)
            self.watcher.put_back(run)
            self.watcher.note(f"{place.survey.place}: no more runs of {run.topology} here: {exc.message}")
        except PPDError:  # nothing can be measured so, as where the disk is full
            raise
        except Exception as exc:
            if place.slot.is_death(exc):
                place.slot.reopen()
                self._died(place, run)
            else:
                self._mistaken(place, run, exc)

    def _mistaken(self, place: Place, run: Run, exc: Exception) -> None:
        """One cell that the harness cannot do must not end a sweep of days; one run after the other must."""
        self._mistakes += 1
        if self._mistakes == MISTAKES:
            self.schedule.put_back(run)
            raise exc
        log.error("the harness failed at %s", run.id, exc_info=exc)
        self._keep(failure(run, place.survey.origin, f"the harness failed: {type(exc).__name__}: {exc}"))

    def _died(self, place: Place, run: Run) -> None:
        """A process may die of something else than its run, which gets another try."""
        self._deaths[run.id] = self._deaths.get(run.id, 0) + 1
        if self._deaths[run.id] == DEATHS:
            self._keep(failure(run, place.survey.origin, "the process that measured it died"))
            return
        self.schedule.put_back(run)
        self.watcher.put_back(run)
        self.watcher.note(f"{place.survey.place}: the process that measured {run.id} died; once more")

    def _keep(self, result: RunResult) -> None:
        self.folder.save(result)
        self.schedule.done(result)
        self.watcher.finished(result)


def failure(run: Run, origin: Origin, reason: str, records: Iterable[Record] = ()) -> RunResult:
    """`records`: what there was before it failed."""
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
    slots: Sequence[Slot], waiting: Sequence[Run], stopped: Callable[[], bool], note: Callable[[str], None]
) -> list[Place]:
    """The slots with what each can measure; a line for every topology that none can. PPDError if that is all.

    Empty where `stopped` ended it: what an engine needs may have to be installed first.
    """
    samples: dict[str, Run] = {}
    for run in waiting:
        samples.setdefault(run.topology, run)
    asked = [slot.survey(tuple(samples.values())) for slot in slots]
    while wait(asked, timeout=LOOK_S).not_done:
        if stopped():
            for slot in slots:
                slot.abandon()
            return []
    places = [_place(slot, future, samples) for slot, future in zip(slots, asked, strict=True)]
    for reason in _unfit(places, samples):
        note(f"skipped: {reason}")
    return places


def _unfit(places: Sequence[Place], topologies: Collection[str]) -> list[str]:
    """A line for each topology that no place can measure; ConfigError if that is all of them."""
    reasons = []
    for topology in topologies:
        if not any(topology in place.topologies for place in places):
            why = dict.fromkeys(dict(place.survey.unfit)[topology] for place in places)
            reasons.append(f"{topology}: {'; '.join(why)}")
    if len(reasons) == len(topologies):
        raise ConfigError(f"nothing can be measured: {', '.join(reasons)}")
    return reasons


def _place(slot: Slot, asked: Future[Survey], topologies: Iterable[str]) -> Place:
    try:
        found = asked.result()
    except Exception as exc:
        if not slot.is_death(exc):
            raise
        told = str(exc).strip().splitlines() or [type(exc).__name__]
        raise ConfigError(f"a process to measure in did not start: {told[-1]}") from exc
    return Place(slot, found, set(topologies) - dict(found.unfit).keys())
