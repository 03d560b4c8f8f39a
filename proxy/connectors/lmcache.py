"""LMCache: P first, then D, which finds the KV by its content.

With a store that both share nothing is said. Where LMCache moves KV from P to D itself, P is told where D receives it:
known of a D with `receiver_init_port` and `receiver_alloc_port`, of which each tensor-parallel rank has one. P's answer
may come before its KV; D computes what is not there yet. Source: LMCache 0.5 with vLLM; the layout is in
docs/protocols.md.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from types import MappingProxyType

from ..leg_moves import LegOrder
from ..openai.body_members import encoded
from ..openai.request import Endpoint, Fields
from .coordinates import HOST, PORTS
from .leg import Finished, Handoff, LegRequest, NoHandoff, Pair, counts_of, leg, plain_leg
from .nixl import PARAMS
from .prefill import prefill_fields

_PORTS = ("receiver_init_port", "receiver_alloc_port")


def unpaired_ports(coordinates: Mapping[str, str]) -> bool:
    """Whether P could not be told where each rank of this D receives, though some of it is known."""
    counts = {coordinates[name].count("+") if name in coordinates else -1 for name in _PORTS}
    return len(counts) > 1


class LMCache:
    name = "lmcache"
    needs_handoff = False
    order = LegOrder.P_THEN_D
    coordinates = MappingProxyType({"receiver_host": HOST, **dict.fromkeys(_PORTS, PORTS)})  # D's
    decodes_alone = True
    finds_by_content = True
    endpoints = frozenset(Endpoint)
    takes_either_leg = False

    def new_key(self) -> str:
        return str(uuid.uuid4())

    def prefill_leg(self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str) -> LegRequest:
        body = prefill_fields(endpoint, fields, pair.prefill)
        told = pair.decode.coordinates
        if all(name in told for name in _PORTS):
            host = told.get("receiver_host") or pair.decode.host
            receiver = {"req_id": pair.key, "receiver_host": host}
            ports = {name: [int(port) for port in told[name].split("+")] for name in _PORTS}
            body[PARAMS] = encoded({"disagg_spec": receiver | ports})
        return leg(endpoint, body, leg_id, fields)

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | Finished | NoHandoff:
        return counts_of(answer)

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest:
        return plain_leg(endpoint, fields, leg_id)
