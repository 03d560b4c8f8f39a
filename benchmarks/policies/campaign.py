"""A run: which jobs are left, in which order they are done, and what each learns from those before it.

In each cell every mode is searched, one after the other, so that each search begins where the one before it ended. Then
every mode is played at one rate, which the best of them sets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ppd.offline.goodput.modes import ORACLE, modes_on

from . import records
from .cells import Cell
from .costs import Costs
from .executors import Executor
from .measuring import MeasureJob, Method, Question
from .records import CellRecord

COMMON_SHARE = 0.9  # of the best other mode's goodput: the rate at which all modes are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    cells: tuple[Cell, ...]
    modes: tuple[str, ...]
    subject: str  # against which "the others" are all the other modes
    method: Method
    folder: Path  # of the records

    @property
    def question(self) -> Question:
        """Whose goodput sets the common rate."""
        return self.method.questions[0]

    @property
    def question_names(self) -> list[str]:
        return [question.name for question in self.method.questions]

    def modes_in(self, cell: Cell) -> tuple[str, ...]:
        return modes_on(cell.topology, self.modes)

    def found(self, cells: Iterable[Cell]) -> dict[str, dict[str, CellRecord]]:
        return records.load_all(self.folder, [cell.name for cell in cells], self.method.name)

    def forget(self, modes: Collection[str]) -> None:
        """What the run is to measure anew of these modes."""
        for cell in self.cells:
            records.forget(self.folder, cell.name, modes, self.method.name, self.question_names)

    def seconds_left(self, places: int, again: Collection[str] = ()) -> float:
        """By the costs of what is measured already. again: modes that are to be measured anew."""
        known = self.found(self.cells)
        by_name = {cell.name: cell for cell in self.cells}
        measured = ((by_name[name], one) for name, found in known.items() for one in found.values())
        costs = Costs(measured, sum(question.seeds for question in self.method.questions))
        each_s = []
        for cell in self.cells:
            done = [mode for mode in self.modes_in(cell) if self._is_done(known.get(cell.name, {}), mode)]
            open_modes = [mode for mode in self.modes_in(cell) if mode in again or mode not in done]
            each_s.append(costs.of(cell) * len(open_modes))
        return max(sum(each_s) / places, max(each_s, default=0.0))  # a cell's jobs follow one another

    def _is_done(self, found: Mapping[str, CellRecord], mode: str) -> bool:
        outcome = found.get(mode)
        return outcome is not None and outcome.played(self.question.tpot_s) is not None and self._answers(outcome)

    def _answers(self, outcome: CellRecord) -> bool:
        return all(len(outcome.goodput.get(one.name, ())) >= one.seeds for one in self.method.questions)

    def next_job(self, cell: Cell, found: Mapping[str, CellRecord]) -> MeasureJob | None:
        """None: the cell is done."""
        job = MeasureJob(cell=cell, mode="", method=self.method)
        for mode in self.modes_in(cell):
            if mode not in found or not self._answers(found[mode]):
                return replace(job, mode=mode, near=self._near(found))
        rate = common_rate(found, self.question.name, self.subject)
        for mode in self.modes_in(cell):
            at = found[mode].played(self.question.tpot_s)
            if rate and (at is None or abs(at.rate / rate - 1) > 1e-9):
                return replace(job, mode=mode, at_rate=rate)
        return None

    def _near(self, found: Mapping[str, CellRecord]) -> dict[str, tuple[float, ...]]:
        """The rates of the mode that is in the middle so far: the next one is likely to be near it."""
        name = self.question.name
        known = [one for one in found.values() if one.mean(name)]
        if not known:
            return {}
        middle = sorted(known, key=lambda one: one.mean(name) or 0.0)[len(known) // 2]
        return dict(middle.goodput)


def common_rate(found: Mapping[str, CellRecord], question: str, subject: str) -> float:
    """0 where no other mode meets the SLO at any rate."""
    others = [one.mean(question) or 0.0 for mode, one in found.items() if mode not in (subject, ORACLE)]
    return COMMON_SHARE * max(others, default=0.0)


Told = Callable[[CellRecord, int], None]
"""Of each outcome, and how many jobs run."""


def run(campaign: Campaign, executor: Executor, told: Told, until: Callable[[], bool] = lambda: False) -> None:
    """Appends each outcome to its cell's file. until: begins nothing more where that is so."""
    waiting = list(_longest_first(campaign))
    running: dict[Future[CellRecord], Cell] = {}
    found: dict[Cell, dict[str, CellRecord]] = {}

    def go_on(cell: Cell) -> bool:
        known = found.setdefault(cell, records.load(campaign.folder, cell.name, campaign.method.name))
        job = None if until() else campaign.next_job(cell, known)
        if job is not None:
            running[executor.submit(job)] = cell
        return job is not None

    while waiting or running:
        while waiting and len(running) < executor.places:
            go_on(waiting.pop(0))
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            cell = running.pop(future)
            outcome = _joined(found[cell], future.result())
            found[cell][outcome.mode] = outcome
            records.append(campaign.folder, outcome)
            told(outcome, len(running))
            go_on(cell)


def _joined(found: Mapping[str, CellRecord], new: CellRecord) -> CellRecord:
    """With what is known of the mode already: a search and the figures at a rate are two jobs."""
    old = found.get(new.mode)
    if old is None:
        return new
    return msgspec.structs.replace(
        old,
        goodput={**old.goodput, **new.goodput},
        at_rate=new.at_rate or old.at_rate,
        windows=old.windows + new.windows,
        cpu_s=old.cpu_s + new.cpu_s,
    )


def _longest_first(campaign: Campaign) -> Sequence[Cell]:
    costs = Costs(())
    return sorted(campaign.cells, key=lambda cell: -costs.of(cell) * len(campaign.modes_in(cell)))
