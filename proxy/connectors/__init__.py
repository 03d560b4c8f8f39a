"""The rules of each KV transfer protocol: what the legs of a SPLIT carry, one file a protocol, by name in `CONNECTORS`.

A connector is pure. The caller runs the prefill leg, passes its answer to `handoff`, and runs the decode leg with the
result, or with None if the answer was refused. LOCAL and REPLICA need no connector: see `plain_leg`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Protocol

from ..fleet.worker import PairingKind, Role, Worker
from ..openai.request import Endpoint, Fields
from .leg import Handoff, LegRequest, NoHandoff, Pair, plain_leg
from .nixl import Nixl
from .none import NoConnector
from .p2p_nccl import P2pNccl

__all__ = ["CONNECTORS", "Connector", "can_pair", "plain_leg", "takes_either_leg", "usual_connector"]


class Connector(Protocol):
    """`leg_id` is new for every leg and attempt, and becomes its X-Request-Id."""

    @property
    def name(self) -> str: ...

    @property
    def needs_handoff(self) -> bool:
        """Whether D needs parameters from P's answer to use what P computed."""

    @property
    def coordinates(self) -> frozenset[str]:
        """What it must know of a worker besides its HTTP address, by the names that a config gives it."""

    @property
    def shares_request_id(self) -> bool:
        """Whether both legs carry one id: the decode leg's `leg_id` is then the prefill leg's X-Request-Id."""

    @property
    def takes_either_leg(self) -> bool:
        """Whether an engine with it can take the prefill leg and the decode leg, whatever its role."""

    def prefill_leg(self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str) -> LegRequest: ...

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | NoHandoff:
        """Checks the body of P's 200; never raises."""

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest: ...


CONNECTORS: MappingProxyType[str, Connector] = MappingProxyType(
    {connector.name: connector for connector in (Nixl(), P2pNccl(), NoConnector())}
)


def usual_connector(role: str) -> str:
    """Of an engine that names none: an R is one that stands alone."""
    return "none" if role == Role.REPLICA else "nixl"


def takes_either_leg(worker: Worker) -> bool:
    connector = CONNECTORS.get(worker.connector)
    return connector is not None and connector.takes_either_leg


def can_pair(prefill: Worker | PairingKind, decode: Worker | PairingKind) -> bool:
    """KV moves only between engines with one connector and, where both are known, one version and a shared model."""
    if prefill.connector not in CONNECTORS or prefill.connector != decode.connector or prefill.engine != decode.engine:
        return False
    if prefill.engine_version != decode.engine_version and prefill.engine_version and decode.engine_version:
        return False
    theirs, ours = prefill.models, decode.models
    return theirs == ours or not theirs or not ours or not set(theirs).isdisjoint(ours)
