"""The rules of each KV transfer protocol: what the legs of a SPLIT carry, one file a protocol, by name in `CONNECTORS`.

A connector is pure, but for `new_key`. In order `P_THEN_D` the caller runs the prefill leg, passes its answer to
`handoff`, and runs the decode leg with the result, or with None if the answer was refused; a `Finished` one is the
client's. In the joint orders it runs both legs at once, and `handoff` only reads P's counts. LOCAL and REPLICA need no
connector: see `plain_leg`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from ..fleet.worker import PairingKind, Role, Worker
from ..leg_moves import LegOrder
from ..openai.request import Endpoint, Fields
from .coordinates import Coordinate
from .leg import Finished, Handoff, LegRequest, NoHandoff, Pair, plain_leg
from .lmcache import LMCache
from .mooncake import Mooncake
from .moriio import MoRIIO, MoRIIORead
from .nixl import Nixl, reads_back
from .nixl_push import NixlPush
from .none import NoConnector
from .offload_p2p import OffloadP2p
from .p2p_nccl import P2pNccl
from .sglang import SGLang
from .trtllm import TrtLlm, TrtLlmGenerationFirst

__all__ = [
    "CONNECTORS",
    "UNSPLIT",
    "Connector",
    "answers_alone",
    "can_pair",
    "is_of_sidecars",
    "missing_coordinates",
    "plain_leg",
    "reads_back",
    "splits",
    "stops_at_plain",
    "takes_either_leg",
    "usual_connector",
    "usual_engine",
    "writes_into_decode",
]


class Connector(Protocol):
    """`leg_id` is new for every leg and attempt, and becomes its X-Request-Id."""

    @property
    def name(self) -> str: ...

    @property
    def order(self) -> LegOrder: ...

    @property
    def needs_handoff(self) -> bool:
        """Whether D needs parameters from P's answer to use what P computed."""

    @property
    def coordinates(self) -> Mapping[str, Coordinate]:
        """What it knows of a worker besides its HTTP address, by the names that heartbeats and a config give it."""

    @property
    def takes_either_leg(self) -> bool:
        """Whether an engine with it can take the prefill leg and the decode leg, whatever its role."""

    @property
    def decodes_alone(self) -> bool:
        """Whether a D with it can compute a prompt itself, so that it takes LOCAL turns; else see `takes_plain`."""

    @property
    def finds_by_content(self) -> bool:
        """Whether D looks for the prompt's KV by content, and computes what it does not find."""

    @property
    def endpoints(self) -> frozenset[Endpoint]:
        """Those whose turns its legs can carry."""

    def new_key(self) -> str:
        """What both legs of an attempt carry, never the same twice; empty where they need nothing in common."""

    def prefill_leg(self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str) -> LegRequest: ...

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | Finished | NoHandoff:
        """Checks the body of P's 200; never raises."""

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest: ...


CONNECTORS: MappingProxyType[str, Connector] = MappingProxyType(
    {
        connector.name: connector
        for connector in (
            Nixl(),
            NixlPush(),
            Mooncake(),
            P2pNccl(),
            MoRIIO(),
            MoRIIORead(),
            OffloadP2p(),
            LMCache(),
            SGLang(),
            TrtLlm(),
            TrtLlmGenerationFirst(),
            NoConnector(),
        )
    }
)

UNSPLIT: Mapping[Endpoint, frozenset[str]] = {
    endpoint: frozenset(name for name, connector in CONNECTORS.items() if endpoint not in connector.endpoints)
    for endpoint in Endpoint
}
"""The connectors that cannot split a turn of an endpoint."""

_ENGINES = {SGLang.name: "sglang", TrtLlm.name: "trtllm", TrtLlmGenerationFirst.name: "trtllm"}  # others: vllm
_USUAL = {"sglang": SGLang.name, "trtllm": TrtLlm.name}

_NEEDED: Mapping[tuple[str, Role], frozenset[str]] = {
    (connector.name, role): frozenset(
        name for name, coordinate in connector.coordinates.items() if role in coordinate.needed_of
    )
    for connector in CONNECTORS.values()
    for role in (Role.PREFILL, Role.DECODE)
}
_ASKING_NOTHING = frozenset(CONNECTORS) - {name for (name, _), needed in _NEEDED.items() if needed}
"""Connectors that need to know nothing of either worker."""


def usual_connector(role: str, engine: str = "vllm") -> str:
    """Of an engine that names none: an R stands alone, and an E moves no KV."""
    if role in (Role.REPLICA, Role.ENCODE):
        return NoConnector.name
    return _USUAL.get(engine, Nixl.name)


def usual_engine(connector: str) -> str:
    """Of a worker that names none."""
    return _ENGINES.get(connector, "vllm")


def knows_engines_for_good(connector: str) -> bool:
    """Whether its D connects once to the process that has P's engine id, and keeps to it."""
    return connector == NixlPush.name


def pinned_engine(worker: Worker) -> str:
    """The engine's id, of a P that D knows for good by it and that may keep it when it begins anew; empty of others."""
    is_known_by_it = knows_engines_for_good(worker.connector) and worker.role is Role.PREFILL
    return worker.coordinates.get("engine_id", "") if is_known_by_it else ""


def writes_into_decode(connector: Connector) -> bool:
    """Whether D sets blocks aside for P to write into. vLLM's D keeps them until P has, even if the client has left."""
    return connector.order is LegOrder.TOGETHER and not connector.finds_by_content


def takes_either_leg(worker: Worker) -> bool:
    connector = CONNECTORS.get(worker.connector)
    return connector is not None and connector.takes_either_leg


def answers_alone(worker: Worker) -> bool:
    """Whether this P or D takes plain requests, as a LOCAL turn is one. So does one of an unknown connector."""
    connector = CONNECTORS.get(worker.connector)
    return connector is None or connector.decodes_alone or worker.takes_plain


def stops_at_plain(worker: Worker) -> bool:
    """Whether a plain request would stop this P or D, which refuses none: it waits for KV, or ends."""
    return worker.connector == P2pNccl.name and not worker.takes_plain


def missing_coordinates(worker: Worker) -> tuple[str, ...]:
    """What its connector must know of it and does not: without that the worker takes no part in a SPLIT."""
    needed = _NEEDED.get((worker.connector, worker.role), frozenset())
    return tuple(sorted(needed.difference(worker.coordinates)))


def splits(worker: Worker | PairingKind, endpoint: Endpoint) -> bool:
    """Whether its connector can split a turn of this endpoint. An unknown one is not judged: it pairs with nobody."""
    return worker.connector not in UNSPLIT[endpoint]


def is_of_sidecars(name: str) -> bool:
    """Whether a sidecar can run its legs: it is told what the connector must know of P, and asks nobody."""
    return name not in (Mooncake.name, TrtLlmGenerationFirst.name)


def can_pair(prefill: Worker | PairingKind, decode: Worker | PairingKind) -> bool:
    """KV moves only between engines with one connector and, where both are known, one version and a shared model.

    And where they have told what the connector must know of them.
    """
    connector = prefill.connector
    if connector != decode.connector or prefill.engine != decode.engine:
        return False
    if connector not in _ASKING_NOTHING and not (
        connector in CONNECTORS
        and _NEEDED[connector, Role.PREFILL].issubset(prefill.coordinates)
        and _NEEDED[connector, Role.DECODE].issubset(decode.coordinates)
    ):
        return False
    if prefill.engine_version != decode.engine_version and prefill.engine_version and decode.engine_version:
        return False
    theirs, ours = prefill.models, decode.models
    return theirs == ours or not theirs or not ours or not set(theirs).isdisjoint(ours)
