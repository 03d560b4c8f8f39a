"""Filters: which of the workers a profile may pick from. Order counts, and what one leaves out stays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from ...fleet.view import WorkerView
from ...fleet.worker import Role
from .scene import Scene

ROLE_LABEL = "llm-d.ai/role"
DECODES = frozenset({"decode", "prefill-decode", "encode-decode", "encode-prefill-decode", "both"})
PREFILLS = frozenset({"prefill", "prefill-decode", "encode-prefill", "encode-prefill-decode", "both"})
OF_ROLES: Mapping[Role, str] = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.REPLICA: "prefill-decode"}
"""What a worker without the label is, by the role that it has here."""


class Filter(Protocol):
    def keep(self, scene: Scene, views: Sequence[WorkerView]) -> Sequence[WorkerView]: ...


class ByLabel(msgspec.Struct, frozen=True):
    """Those whose label has one of these values."""

    label: str
    values: frozenset[str]
    allows_none: bool = False  # a worker without the label stays too

    def keep(self, scene: Scene, views: Sequence[WorkerView]) -> Sequence[WorkerView]:
        label, values, allows_none = self.label, self.values, self.allows_none
        kept = []
        for view in views:
            value = view.worker.labels.get(label)
            if allows_none if value is None else value in values:
                kept.append(view)
        return kept


class ByPhase(msgspec.Struct, frozen=True):
    """Those whose role, by label or else by the proxy's own word, takes part in a phase."""

    roles: frozenset[str]

    def keep(self, scene: Scene, views: Sequence[WorkerView]) -> Sequence[WorkerView]:
        return [view for view in views if phase_role(view) in self.roles]


def phase_role(view: WorkerView) -> str:
    return view.worker.labels.get(ROLE_LABEL) or OF_ROLES[view.worker.role]


class LabelTest(msgspec.Struct, frozen=True):
    """One of a selector's conditions."""

    label: str
    operator: str  # In, NotIn, Exists or DoesNotExist
    values: frozenset[str] = frozenset()

    def holds(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.label)
        if self.operator == "In":
            return value is not None and value in self.values
        if self.operator == "NotIn":
            return value is None or value not in self.values
        return (value is not None) == (self.operator == "Exists")


class BySelector(msgspec.Struct, frozen=True):
    """Those of which all conditions hold."""

    tests: tuple[LabelTest, ...]

    def keep(self, scene: Scene, views: Sequence[WorkerView]) -> Sequence[WorkerView]:
        return [view for view in views if all(test.holds(view.worker.labels) for test in self.tests)]


class SessionOnly(msgspec.Struct, frozen=True):
    """The session's worker alone, where it is among them."""

    def keep(self, scene: Scene, views: Sequence[WorkerView]) -> Sequence[WorkerView]:
        pinned = scene.pinned(views)
        return views if pinned is None else [pinned]
