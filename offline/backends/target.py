"""Runs on a fleet that was started by someone else, through its proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ppd.proxy.errors import ConfigError

from ..experiment.records import Origin, RunResult
from ..experiment.run import Run
from ..load.target import Target
from ..sweep.backend import Survey
from .fleet_view import FleetView, is_same
from .live import LiveFleet, RunLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """`target.model`: empty for the model that all workers serve. `gpu`, `gpu_count`: the proxy cannot know them."""

    target: Target
    gpu: str = ""
    gpu_count: int = 0
    note: str = ""
    limits: RunLimits = field(default_factory=RunLimits)
    trace: Sequence[float] | None = None

    def open(self) -> TargetBackend:
        return TargetBackend(self)


class TargetBackend:
    def __init__(self, plan: TargetPlan) -> None:
        self._plan = plan

    def survey(self, samples: tuple[Run, ...]) -> Survey:
        """PPDError unless the proxy answers, accepts the admin key, and all workers serve the model."""
        return asyncio.run(self._survey(samples))

    async def topology(self) -> str:
        """Empty if no worker is up."""
        return (await self._fleet("").look()).topology

    def measure(self, run: Run) -> RunResult:
        return asyncio.run(self._measure(run))

    def close(self) -> None: ...

    async def _survey(self, samples: tuple[Run, ...]) -> Survey:
        view = await self._fleet("").look()
        topology, url = view.topology, self._plan.target.url
        reason = f"{url} is {topology or 'without workers'}"
        unfit = [(run.topology, reason) for run in samples if not is_same(topology, run.topology)]
        fleet = self._fleet(served_model(view, self._plan.target))
        await fleet.check_forcing()
        return Survey(url, fleet.seen(view), tuple(unfit))

    async def _measure(self, run: Run) -> RunResult:
        model = self._plan.target.model
        if not model:
            model = served_model(await self._fleet("").healthy(run.topology), self._plan.target)
        return await self._fleet(model).measure(run)

    def _fleet(self, model: str) -> LiveFleet:
        plan = self._plan
        return LiveFleet(
            target=replace(plan.target, model=model),
            origin=Origin(backend="target", engine="", gpu=plan.gpu, gpu_count=plan.gpu_count, note=plan.note),
            limits=plan.limits,
            trace=plan.trace,
        )


def served_model(view: FleetView, target: Target) -> str:
    """The model asked for, else the only one; ConfigError where not all workers serve it."""
    served, wanted = view.models, target.model
    if wanted in served or (not wanted and len(served) == 1):
        return wanted or served[0]
    what = f"one that all workers of {target.url} serve: {', '.join(served) or 'there is none'}"
    raise ConfigError(f"model = {wanted!r}: must be {what}", param="model")
