"""The laws of all workers: each one's profile."""

from __future__ import annotations

from ..fleet.view import WorkerView
from ..fleet.worker import Worker
from .prediction import EngineLaws
from .profiles import Profiles

WORKERS_KEPT = 4096  # beyond it all are looked up again


class WorkerLaws:
    """See the protocol `Laws`."""

    def __init__(self, profiles: Profiles | None = None) -> None:
        self._profiles = profiles or Profiles()
        self._configs = 0  # read since the start
        # By address: of which worker and which life of it. A worker that announces itself anew is looked up anew.
        self._known: dict[str, tuple[Worker, str, EngineLaws | None]] = {}

    @property
    def version(self) -> str:
        return f"{self._configs}"

    @property
    def profiles(self) -> Profiles:
        return self._profiles

    def use(self, profiles: Profiles) -> None:
        """From a config that was read again."""
        if profiles.is_in(self._profiles):
            return
        self._profiles = profiles
        self._configs += 1
        self._known.clear()

    def of(self, view: WorkerView) -> EngineLaws | None:
        known = self._known.get(view.worker.address)
        if known is not None and known[0] is view.worker and known[1] == view.incarnation:
            return known[2]
        return self._look_up(view)

    def _look_up(self, view: WorkerView) -> EngineLaws | None:
        worker, laws = view.worker, None
        if (profile := self._profiles.of(worker)) is not None:
            fitted = profile.fit.range if profile.fit is not None else None
            laws = EngineLaws(profile=profile.name, costs=profile.costs, fitted=fitted)
        if len(self._known) >= WORKERS_KEPT:
            self._known.clear()
        self._known[worker.address] = (worker, view.incarnation, laws)
        return laws
