"""P that D would take for ones that are gone: another process under an engine's id that D knows.

vLLM's NIXL, in push mode, knows P by the id that D's leg names, and connects to it once. If a P begins anew and keeps
its id, D goes on telling the process that is gone where to write, and both legs wait until their time is up (seen with
vLLM 0.32). D knows it again only if D begins anew too, or if P has another id.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import NamedTuple

from ..connectors import pinned_engine
from ..fleet.registry import Registry
from ..fleet.view import WorkerView
from ..fleet.worker import PairId, Role, WorkerId

log = logging.getLogger(__name__)

KEPT = 100_000  # meetings, those of gone D too: one that was only silent still knows whom it knew


class Meeting(NamedTuple):
    """A P, by its engine's id, and a D: two processes that know each other as long as both live."""

    decode: WorkerId
    incarnation: str  # D's
    engine: str


class Strangers:
    """`pairs` get no turn and no canary. A D is taken to know each P that was up while it was there."""

    def __init__(self, registry: Registry) -> None:
        self.pairs: frozenset[PairId] = frozenset()
        self._registry = registry
        self._met: dict[Meeting, str] = {}  # the incarnation of P that D knows; the newest last

    def joined(self, view: WorkerView) -> None:
        """A worker has joined, or another engine has taken its place."""
        if pinned_engine(view.worker) and not _tells_its_start(view):
            return
        if self.pairs:
            self.pairs = frozenset(pair for pair in self.pairs if view.id not in pair)
        views = self._registry.views()
        if view.role is Role.DECODE:
            strange = self._strange((one for one in views if one.up), (view,))
        else:
            strange = self._strange((view,), views)
        self.pairs |= strange
        for prefill, decode in sorted(strange):
            log.warning(
                "P %s is another engine under the id of one that D %s knows, so no KV gets from one to the other: start"
                " P with another engine_id each time, or D anew",
                *(prefill, decode),
            )

    def met(self) -> list[tuple[Meeting, str]]:
        """For a process that has just started."""
        return list(self._met.items())

    def adopt(self, met: Iterable[tuple[Meeting, str]]) -> None:
        """What another process has seen, to which each worker has joined just now."""
        self._met |= dict(met)
        views = self._registry.views()
        self.pairs = self._strange((view for view in views if view.up), views)

    def _strange(self, prefills: Iterable[WorkerView], decodes: Iterable[WorkerView]) -> frozenset[PairId]:
        """Those of these pairs that have not met, but D another process in P's place. The others have met now."""
        found = set[PairId]()
        for prefill in prefills:
            engine = pinned_engine(prefill.worker)
            if not engine or not _tells_its_start(prefill):
                continue
            for decode in decodes:
                if decode.role is Role.DECODE and decode.worker.connector == prefill.worker.connector:
                    meeting = Meeting(decode.id, decode.incarnation, engine)
                    known = self._met[meeting] = self._met.pop(meeting, prefill.incarnation)
                    if known != prefill.incarnation:
                        found.add((prefill.id, decode.id))
        while len(self._met) > KEPT:
            del self._met[next(iter(self._met))]
        return frozenset(found)


def _tells_its_start(view: WorkerView) -> bool:
    """Whether its incarnation is the engine's start time. Another name may stand for the same process: its agent's."""
    try:
        return math.isfinite(float(view.incarnation))
    except ValueError:
        return False
