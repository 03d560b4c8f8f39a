"""What a turn's head comes to: which E and which P are asked before the engine, and why not, where a P is named."""

from __future__ import annotations

from dataclasses import dataclass

from ppd.proxy.connectors import missing_coordinates, splits, stops_at_plain
from ppd.proxy.errors import NoWorkerError
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.openai.request import Request
from ppd.proxy.policy import Decision, Route, route_alone

from .encoders import Encoders
from .prefills import Prefills
from .records import NOT_NAMED


@dataclass(frozen=True, slots=True)
class Decisions:
    """engine: the one behind this sidecar; own: its address, and the sidecar's."""

    prefills: Prefills
    encoders: Encoders
    engine: WorkerView
    own: frozenset[str]

    def of(self, request: Request, prefill: WorkerView | None) -> Decision:
        """prefill: the P that is named."""
        reason = self._alone(request, prefill)
        if prefill is None or reason:
            return self.alone(reason or NOT_NAMED)
        return Decision(
            route=Route.SPLIT, reason="prefill_named", decode=self.engine, prefill=prefill, wanted=Route.SPLIT
        )

    def alone(self, reason: str) -> Decision:
        """The engine computes the prompt, whatever P is named; NoWorkerError if it cannot."""
        if stops_at_plain(self.engine.worker):
            raise NoWorkerError(f"the engine cannot compute a prompt without a P ({reason})")
        route = route_alone(self.engine)
        return Decision(route=route, reason=reason, decode=self.engine, wanted=route)

    def _alone(self, request: Request, prefill: WorkerView | None) -> str:
        """Why the engine computes the prompt even where a P is named: what a picker may not know."""
        if prefill is not None and prefill.id in self.own:
            return "prefill_is_own"  # its KV is there already
        if prefill is not None and not splits(prefill.worker, request.endpoint):
            return "endpoint_not_split"
        if request.prompt.previous_response_id is not None:
            return "stored_response"  # the history is in the engine
        if prefill is not None and missing_coordinates(prefill.worker):
            return "missing_coordinates"
        return "" if request.single_engine is None else "single_engine"
