"""The laws of all workers: each one's profile, corrected by what turns have measured there."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

import msgspec

from ..fleet.view import WorkerView
from ..fleet.worker import Worker
from ..runtime.replicated import Replicated
from .accuracy import Accuracy, Basis, ErrorRow, Errors, Judged
from .corrections import TPOT, TTFT, WORKERS_KEPT, CorrectionRow, Corrections, Figure, Measured
from .prediction import EngineLaws
from .profiles import Profiles

AGED_S = 60.0  # from which on silence counts
WORKER_TURNS = 21  # whose median error is shown for each worker

_BY_PROFILE, _BY_TABLE = Basis.PROFILE, Basis.TABLE  # quicker to look up


class TurnTimes(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="times"):
    """What one turn has measured."""

    resets: int  # before it was decided
    by_profile: Sequence[Measured] = ()
    by_table: Sequence[TableTime] = ()
    is_guess: bool = False  # beyond the profile's reach: it teaches nothing


class TableTime(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A figure of one turn beside that of the table's cell that stands for it."""

    table: str
    figure: Figure
    expected_s: float
    measured_s: float


class LawsReset(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="reset"):
    """Nothing from before it counts."""

    resets: int


LawsNews = TurnTimes | LawsReset


class LawsLessons(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All that turns have taught, for another process."""

    resets: int
    turns: int
    guesses: dict[str, int]
    corrections: list[CorrectionRow]
    errors: list[ErrorRow]
    errors_of_workers: list[tuple[str, Figure, list[float]]]


class FactorShown(msgspec.Struct, frozen=True, kw_only=True):
    """One factor of one worker, as operators see it."""

    factor: float
    turns: float  # that still count
    median_error: float | None  # of its newest turns; None: there were none


class WorkerLaws:
    """See the protocol `Laws`. Corrections are the same in all processes of a proxy."""

    def __init__(self, profiles: Profiles | None = None) -> None:
        self.profiles = profiles or Profiles()
        self._configs = 0  # read since the start
        self._now_s = 0.0
        self.resets = 0
        self._forget()
        self.replicated: Replicated[LawsNews] | None = None

    def _forget(self) -> None:
        self._corrections, self._accuracy = Corrections(), Accuracy()
        self._errors: OrderedDict[tuple[str, Figure], Errors] = OrderedDict()  # by worker
        self.guesses: Counter[str] = Counter()  # turns by profile
        self._clear()

    def _clear(self) -> None:
        # By address: of which worker and which life of it. A worker that announces itself anew is looked up anew.
        self._known: dict[str, tuple[Worker, str, EngineLaws | None]] = {}
        self._likes_seen, self._looked_s = self._corrections.likes_changed, self._now_s

    @property
    def version(self) -> str:
        return f"{self._configs}.{self.resets}.{self._corrections.turns}"

    def use(self, profiles: Profiles) -> None:
        """From a config that was read again."""
        if profiles.is_in(self.profiles):
            return
        self.profiles = profiles
        self._configs += 1
        self._clear()

    def of(self, view: WorkerView) -> EngineLaws | None:
        worker = view.worker
        if (known := self._known.get(worker.address)) is not None:
            owner, incarnation, laws = known
            if owner is worker and incarnation == view.incarnation:
                return laws
        return self._look_up(view)

    def _look_up(self, view: WorkerView) -> EngineLaws | None:
        worker, laws = view.worker, None
        if (profile := self.profiles.of(worker)) is not None:
            likes, engine = likes_of(profile.name, worker), (worker.address, view.incarnation)
            laws = EngineLaws(
                profile=profile.name,
                costs=profile.costs,
                reach=profile.reach,
                ttft_factor=self._corrections.factor(*engine, likes, TTFT, self._now_s),
                tpot_factor=self._corrections.factor(*engine, likes, TPOT, self._now_s),
                ttft_spread=self._corrections.ttft_spread(*engine, likes, self._now_s),
            )
        if len(self._known) >= WORKERS_KEPT:
            self._known.clear()
        self._known[worker.address] = (worker, view.incarnation, laws)
        return laws

    def advance(self, now_s: float) -> None:
        """Silence makes corrections count for less."""
        self._now_s = max(self._now_s, now_s)
        if self._now_s - self._looked_s >= AGED_S:
            self._clear()

    # -- what turns teach

    def learn(self, times: TurnTimes, now_s: float) -> None:
        self.take(times, now_s)
        if self.replicated is not None:
            self.replicated.changed(times)

    def reset(self) -> None:
        """Forgets all corrections and errors, in all processes."""
        self.take(LawsReset(self.resets + 1), self._now_s)
        if self.replicated is not None:
            self.replicated.changed(LawsReset(self.resets))

    def take(self, news: LawsNews, now_s: float) -> None:
        """What a turn or an operator told this process or another one."""
        if news.resets > self.resets:
            self.resets = news.resets
            self._forget()
        if isinstance(news, LawsReset) or news.resets < self.resets:
            return
        self.advance(now_s)
        for one in news.by_table:
            if one.expected_s > 0.0:
                self._accuracy.note((_BY_TABLE, one.table, one.figure), one.measured_s / one.expected_s - 1.0)
        if news.is_guess:
            self.guesses.update({one.profile for one in news.by_profile})
            return
        for measured in news.by_profile:
            self._take(measured)
        if self._corrections.likes_changed != self._likes_seen:
            self._clear()

    def _take(self, measured: Measured) -> None:
        if not self._corrections.learn(measured, self._now_s):
            return
        self._known.pop(measured.worker, None)
        key, error = (measured.worker, measured.figure), measured.error
        self._accuracy.note((_BY_PROFILE, measured.profile, measured.figure), error)
        errors = self._errors.get(key)
        if errors is None:
            errors = self._errors[key] = Errors(WORKER_TURNS)
        errors.add(error)
        self._errors.move_to_end(key)
        if len(self._errors) > WORKERS_KEPT:
            self._errors.popitem(last=False)

    # -- what operators and other processes are told

    def judged(self) -> Iterator[Judged]:
        return self._accuracy.judged()

    def shown(self, view: WorkerView) -> dict[Figure, FactorShown]:
        laws = self.of(view)
        if laws is None:
            return {}
        factors = {TTFT: laws.ttft_factor, TPOT: laws.tpot_factor}
        return {figure: self._shown(view, figure, factor) for figure, factor in factors.items()}

    def _shown(self, view: WorkerView, figure: Figure, factor: float) -> FactorShown:
        turns = self._corrections.count(view.worker.address, view.incarnation, figure, self._now_s)
        errors = self._errors.get((view.worker.address, figure))
        return FactorShown(factor=factor, turns=turns, median_error=None if errors is None else errors.median)

    def lessons(self) -> LawsLessons:
        corrections, errors = self._corrections, self._accuracy
        return LawsLessons(
            self.resets,
            corrections.turns,
            dict(self.guesses),
            list(corrections.rows()),
            list(errors.rows()),
            [(worker, figure, list(newest)) for (worker, figure), newest in self._errors.items()],
        )

    def adopt(self, lessons: LawsLessons, now_s: float) -> None:
        """What another process has learned; what this one has is in it."""
        if lessons.resets < self.resets:
            return
        self._now_s = max(self._now_s, now_s)
        self.resets = lessons.resets
        self._forget()
        self.guesses.update(lessons.guesses)
        self._corrections.adopt(lessons.corrections)
        self._corrections.turns = lessons.turns
        self._accuracy.adopt(lessons.errors)
        for worker, figure, newest in lessons.errors_of_workers[-WORKERS_KEPT:]:
            self._errors[worker, figure] = Errors(WORKER_TURNS, newest)
        self._clear()


def likes_of(profile: str, worker: Worker) -> str:
    """What workers have in common whose corrections are alike. No profile's name has a slash."""
    return f"{profile}/{worker.role}/{worker.models[0] if worker.models else ''}"
