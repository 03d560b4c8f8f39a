"""A live fleet as the proxy's admin API tells it: which topology it is, and what has happened to it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from ppd.proxy.errors import FormatError
from ppd.servers.fleet.topology import Topology

from ..experiment.files import UNREADABLE


class ListedWorker(msgspec.Struct, frozen=True):
    """One entry of `GET /admin/workers`, as far as it is needed here."""

    name: str
    role: str
    state: str
    models: tuple[str, ...]
    engine: str
    engine_version: str
    connector: str
    incarnation: str  # differs after a restart; empty where the engine has none
    inflight: int
    x: float | None = None


class _Listing(msgspec.Struct):
    workers: tuple[ListedWorker, ...]


@dataclass(frozen=True, slots=True)
class FleetView:
    workers: tuple[ListedWorker, ...]

    @classmethod
    def decode(cls, body: bytes) -> FleetView:
        try:
            return cls(msgspec.json.decode(body, type=_Listing).workers)
        except UNREADABLE as exc:
            raise FormatError(f"/admin/workers: {exc}") from exc

    @property
    def topology(self) -> str:
        """Of the workers that are up, as in `1P_3D` or `1P_1D_2pD`; empty if there are none."""
        up = [worker for worker in self.workers if worker.state == "up"]
        counts = Counter("pD" if worker.role == "D" and worker.x == 1.0 else worker.role for worker in up)
        return "_".join(f"{counts[kind]}{kind}" for kind in ("R", "P", "D", "pD") if counts[kind])

    @property
    def models(self) -> tuple[str, ...]:
        served = [set(worker.models) for worker in self.workers]
        return tuple(sorted(set.intersection(*served))) if served else ()

    @property
    def engine(self) -> str:
        """`vllm 0.32.0`; joined by commas where workers differ."""
        return _joined(f"{worker.engine} {worker.engine_version}".strip() for worker in self.workers)

    @property
    def connector(self) -> str:
        # Replicas move no KV.
        return _joined(worker.connector for worker in self.workers if worker.role in "PD")

    @property
    def is_idle(self) -> bool:
        return not any(worker.inflight for worker in self.workers)

    @property
    def is_ready(self) -> bool:
        return bool(self.topology) and self.is_idle and all(worker.state == "up" for worker in self.workers)

    def damage(self, before: FleetView) -> str:
        """What has changed since: a worker is gone, down, restarted or new. Empty if nothing has."""
        now = {worker.name: worker for worker in self.workers}
        for was in before.workers:
            worker = now.pop(was.name, None)
            if worker is None:
                return f"{was.name} is gone"
            if worker.incarnation != was.incarnation and worker.incarnation and was.incarnation:
                return f"{was.name} was restarted"
            if worker.state != was.state:
                return f"{was.name} is {worker.state}"
        return f"{next(iter(now))} is new" if now else ""


def is_same(one: str, other: str) -> bool:
    """Whether two names mean one topology, whatever the order of their parts. An empty name equals nothing."""
    if not one or not other:
        return False
    return Topology.parse(one).is_same(Topology.parse(other))


def _joined(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))
