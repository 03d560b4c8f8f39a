"""What the simulated proxy knows of engines otherwise than they are: wrong laws, wrong estimates, no load ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from random import Random

from msgspec.structs import replace as replace_struct

from ppd.proxy.fleet.places import UNKNOWN
from ppd.proxy.fleet.view import Fleet, WorkerView
from ppd.proxy.fleet.worker import Role, Worker, WorkerId
from ppd.proxy.laws.profile_file import ProfileFile
from ppd.proxy.laws.profiles import Profiles
from ppd.proxy.laws.step_time import EngineProfile
from ppd.proxy.laws.worker_laws import WorkerLaws

from .setup import Setup

LEDGER = {
    "decoding": 0,
    "context_tokens": 0,
    "prefills": 0,
    "queued_prefill_s": 0.0,
    "prefills_since_s": 0.0,
    "unseen_prefill_until_s": 0.0,
    "reserved_tokens": 0,
    "sends_free_s": 0.0,
    "receives_free_s": 0.0,
}
"""The fields of a view that the load ledger fills, of a worker without any turn."""


class RoleProfiles(Profiles):
    """Engines of one role have one profile."""

    def __init__(self, of_roles: Mapping[Role, ProfileFile]) -> None:
        super().__init__()
        self._of_roles = of_roles

    def of(self, worker: Worker) -> ProfileFile:
        return self._of_roles[worker.role]


def laws_of(setup: Setup, factor: float = 1.0) -> WorkerLaws:
    """As engines are, but for one that is slow in a measured fleet. factor: by which all times are believed longer."""
    # Whatever it was fitted to: here it is how engines are.
    profile = replace_struct(setup.profile, fit=None)
    known = {role: replace_struct(profile, costs=slower(setup.costs(role), factor)) for role in Role}
    return WorkerLaws(RoleProfiles(known))


def slower(costs: EngineProfile, factor: float) -> EngineProfile:
    """All that takes time takes so many times as long."""
    times = {one.name: getattr(costs, one.name) * factor for one in fields(costs) if one.name.endswith("_s")}
    times["transfer_bytes_per_s"] = costs.transfer_bytes_per_s / factor
    return replace(costs, **times)


def without_ledger(fleet: Fleet) -> Fleet:
    """What engines report, and what was counted of turns before there was a ledger: requests, and tokens that queue."""
    return _with(fleet, {worker: replace_struct(view, **LEDGER) for worker, view in fleet.views.items()})


def with_room(fleet: Fleet) -> Fleet:
    """No worker's places are known, so that none is full."""
    full = {worker: view for worker, view in fleet.views.items() if view.places != UNKNOWN}
    return _with(
        fleet, {**fleet.views, **{worker: replace_struct(view, places=UNKNOWN) for worker, view in full.items()}}
    )


def _with(fleet: Fleet, views: Mapping[WorkerId, WorkerView]) -> Fleet:
    prefills, decodes, replicas, down = (
        [views[view.id] for view in each] for each in (fleet.prefills, fleet.decodes, fleet.replicas, fleet.down)
    )
    return replace_struct(fleet, views=views, prefills=prefills, decodes=decodes, replicas=replicas, down=down)


def drawn_factor(spread: float, session: int) -> float:
    """Of a session's token estimates: between 1 / (1 + spread) and 1 + spread, the same for all its turns."""
    return float((1.0 + spread) ** Random(session).uniform(-1.0, 1.0))
