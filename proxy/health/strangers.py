"""P that D would take for ones that are gone: another process under an engine's id that D knows.

vLLM's NIXL, in push mode, knows P by the id that D's leg names, and connects to it once. If a P begins anew and keeps
its id, D goes on telling the process that is gone where to write, and both legs wait until their time is up (seen with
vLLM 0.32). D knows it again only if D begins anew too, or if P has another id.

What was before this proxy began it cannot have seen. So a D that had begun long before P is not believed to know that P
until KV has moved from it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..connectors import knows_engines_for_good, pinned_engine
from ..fleet.registry import Registry
from ..fleet.view import WorkerView
from ..fleet.worker import PairId, Role, WorkerId

log = logging.getLogger(__name__)

STARTS_S = 10.0  # no engine starts, meets a P and outlives it in less; machines' clocks may differ by as much
KEPT = 100_000  # meetings, those of gone D too: one that was only silent still knows whom it knew


class Meeting(NamedTuple):
    """A P, by its engine's id, and a D: two processes that know each other as long as both live."""

    decode: WorkerId
    decode_incarnation: str
    engine: str


class Strangers:
    """`pairs` get no turn and no canary. A D is taken to know each P that was up while it was.

    `unproven` get a canary before any turn.
    """

    def __init__(self, registry: Registry) -> None:
        self.pairs: frozenset[PairId] = frozenset()
        self.unproven: frozenset[PairId] = frozenset()
        self._registry = registry
        self._met: dict[Meeting, str] = {}  # the incarnation of P that D knows; the newest last

    def came(self, view: WorkerView, begins: bool) -> None:
        """A worker begins, as it is new there or up again; or only its description has changed.

        Nobody says whether that is of the engine that is there or of the next one, so no D meets it by that.
        """
        if pinned_engine(view.worker) and not _tells_its_start(view):
            return
        if self.pairs:
            is_there = self._registry.engine
            self.pairs = frozenset(pair for pair in self.pairs if view.id not in pair and all(map(is_there, pair)))
        if not knows_engines_for_good(view.worker.connector):
            return
        views = self._registry.views()
        decodes, prefills = ((view,), views) if view.role is Role.DECODE else (views, (view,))
        if begins:
            self._introduce(decodes, prefills)
        strange = self._strange(decodes, prefills)
        self.pairs |= strange
        for prefill, decode in sorted(strange):
            log.warning(
                "P %s has restarted under an engine_id by which D %s still knows the process before it: no KV moves"
                " between them. Give P a new engine_id at each start, or restart D",
                *(prefill, decode),
            )

    def proven(self, pair: PairId) -> None:
        """KV has moved, or nothing tells whether it does."""
        if pair in self.unproven:
            self.unproven -= {pair}

    def met(self) -> list[tuple[Meeting, str]]:
        """For a process that has just started."""
        return list(self._met.items())

    def adopt(self, met: Iterable[tuple[Meeting, str]]) -> None:
        """What another process has seen, to which each worker has come just now."""
        self._met |= dict(met)
        views = self._registry.views()
        self.pairs = self._strange(views, views)

    def _introduce(self, decodes: Iterable[WorkerView], prefills: Iterable[WorkerView]) -> None:
        """Those of these who are up know each other from now on, unless D knows another process in P's place."""
        for meeting, prefill, decode in _meetings(decodes, prefills):
            if prefill.up and decode.up:
                if meeting not in self._met:
                    pair = frozenset(((prefill.id, decode.id),))
                    self.unproven -= pair
                    if _began_long_before(decode, prefill):
                        self.unproven |= pair
                self._met[meeting] = self._met.pop(meeting, prefill.incarnation)
        while len(self._met) > KEPT:
            del self._met[next(iter(self._met))]

    def _strange(self, decodes: Iterable[WorkerView], prefills: Iterable[WorkerView]) -> frozenset[PairId]:
        return frozenset(
            (prefill.id, decode.id)
            for meeting, prefill, decode in _meetings(decodes, prefills)
            if self._met.get(meeting, prefill.incarnation) != prefill.incarnation
        )


def _meetings(
    decodes: Iterable[WorkerView], prefills: Iterable[WorkerView]
) -> Iterator[tuple[Meeting, WorkerView, WorkerView]]:
    """The pairs of them whose D would know P by its engine's id: with P, then D."""
    for prefill in prefills:
        engine = pinned_engine(prefill.worker)
        if engine and _tells_its_start(prefill):
            for decode in decodes:
                if decode.role is Role.DECODE and decode.worker.connector == prefill.worker.connector:
                    yield Meeting(decode.id, decode.incarnation, engine), prefill, decode


def _began_long_before(decode: WorkerView, prefill: WorkerView) -> bool:
    return _tells_its_start(decode) and float(prefill.incarnation) - float(decode.incarnation) > STARTS_S


def _tells_its_start(view: WorkerView) -> bool:
    """Whether its incarnation is the engine's start time. Another name may stand for the same process: its agent's."""
    try:
        return math.isfinite(float(view.incarnation))
    except ValueError:
        return False
