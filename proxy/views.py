"""Workers as a decision sees them: frozen pictures, and what the fleet they make up can do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .workers import Load, Role, Worker, WorkerId


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as a decision sees it."""

    worker: Worker
    name: str  # "D2": what clients and metrics see in place of the address
    incarnation: str
    load: Load = field(default_factory=Load)
    inflight: int = 0  # legs of this proxy that run there now
    queued_prefill_tokens: int = 0  # prompt tokens that this proxy's legs still have to compute there
    written_tokens: int = 0  # tokens of KV that this proxy had written there so far
    heard_s: float = 0.0
    up: bool = True  # False: a static worker whose probe fails
    draining: bool = False
    suspect_until_s: float = 0.0

    @property
    def id(self) -> WorkerId:
        return self.worker.id

    @property
    def role(self) -> Role:
        return self.worker.role

    @property
    def state(self) -> str:
        return "down" if not self.up else "draining" if self.draining else "up"

    @property
    def requests(self) -> int:
        """Requests on the engine: its own count where it is the larger, as other proxies may use it too."""
        return max(self.inflight, self.load.running + self.load.waiting)

    def takes_turns(self, model: str) -> bool:
        return self.up and not self.draining and (not self.worker.models or model in self.worker.models)


def ways_to_serve(views: Iterable[WorkerView]) -> dict[str, bool]:
    """Which routes the fleet could take now: what `/ready` answers."""
    able = [view for view in views if view.up and not view.draining]
    decodes = [view for view in able if view.role is Role.DECODE]
    prefills = [view for view in able if view.role is Role.PREFILL]
    return {
        "split": any(can_pair(p.worker, d.worker) for p in prefills for d in decodes),
        "local": bool(decodes),
        "replica": any(view.role is Role.REPLICA for view in able),
    }


def can_pair(prefill: Worker, decode: Worker) -> bool:
    """KV moves only between engines with one connector and, where both are known, one version and a shared model."""
    versions = {prefill.engine_version, decode.engine_version} - {""}
    models = not prefill.models or not decode.models or bool(set(prefill.models) & set(decode.models))
    return prefill.connector == decode.connector and prefill.engine == decode.engine and len(versions) < 2 and models
