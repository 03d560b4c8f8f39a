"""P that D would take for ones that are gone: another process under an engine's id that D knows.

vLLM's NIXL, in push mode, knows P by the id that D's leg names, and connects to it once. If a P begins anew and keeps
its id, D goes on telling the process that is gone where to write, and both legs wait until their time is up (seen with
vLLM 0.32). D knows it again only if D begins anew too, or if P has another id.
"""

from __future__ import annotations

import logging

from ..connectors import pinned_engine
from ..fleet.registry import JOINED, Registry
from ..fleet.view import WorkerView
from ..fleet.worker import PairId, Role, WorkerId

log = logging.getLogger(__name__)


KEPT = 4096  # D, the gone ones too: one that was only silent still knows whom it knew


class Strangers:
    """`pairs` get no turn and no canary. A D is taken to know each P that was up while it was there."""

    def __init__(self, registry: Registry) -> None:
        self.pairs: frozenset[PairId] = frozenset()
        self._registry = registry
        # By D and its incarnation: that of each P, by the engine's id. The one that joined last comes last.
        self._known: dict[tuple[WorkerId, str], dict[str, str]] = {}

    def joined(self, view: WorkerView) -> None:
        """A worker has joined, or another engine has taken its place."""
        if self.pairs:
            self.pairs = frozenset(pair for pair in self.pairs if view.id not in pair)
        views = self._registry.views()
        if view.role is Role.DECODE:
            key = (view.id, view.incarnation)
            self._known[key] = self._known.pop(key, {})
            if len(self._known) > KEPT:
                del self._known[next(iter(self._known))]
            met = [(one, view) for one in views if one.up and _is_known_by_id(one)]
        else:
            met = [(view, one) for one in views if one.role is Role.DECODE] if _is_known_by_id(view) else []
        strange = frozenset((p.id, d.id) for p, d in met if self._is_strange(p, d))
        self.pairs |= strange
        for prefill, decode in sorted(strange):
            log.warning(
                "P %s is another engine under the id of one that D %s knows, so no KV gets from one to the other: start"
                " P with another engine_id each time, or D anew",
                *(prefill, decode),
            )

    def known(self) -> list[tuple[WorkerId, str, dict[str, str]]]:
        """For a process that has just started: D, its incarnation, and by engine's id that of each P which it knows."""
        return [(*key, dict(known)) for key, known in self._known.items()]

    def adopt(self, known: list[tuple[WorkerId, str, dict[str, str]]]) -> None:
        """What another process has seen, to which each worker has joined just now."""
        self._known |= {(decode, incarnation): dict(engines) for decode, incarnation, engines in known}
        views = self._registry.views()
        prefills = [view for view in views if view.up and _is_known_by_id(view)]
        decodes = [view for view in views if view.role is Role.DECODE]
        self.pairs = frozenset((p.id, d.id) for p in prefills for d in decodes if self._is_strange(p, d))

    def _is_strange(self, prefill: WorkerView, decode: WorkerView) -> bool:
        if prefill.worker.connector != decode.worker.connector:
            return False
        known = self._known.setdefault((decode.id, decode.incarnation), {})
        return known.setdefault(pinned_engine(prefill.worker), prefill.incarnation) != prefill.incarnation


def _is_known_by_id(view: WorkerView) -> bool:
    """It is a P that has said which process it is."""
    return bool(pinned_engine(view.worker)) and not view.incarnation.startswith(JOINED)
