"""No transfer parameters: P and D share a KV store, or their connector finds KV by content. P runs first, then D."""

from __future__ import annotations

from ..leg_moves import LegOrder
from ..openai.request import Endpoint, Fields
from .coordinates import NO_COORDINATES
from .leg import Finished, Handoff, LegRequest, NoHandoff, Pair, counts_of, leg, plain_leg, taken_fields
from .prefill import prefill_fields


class NoConnector:
    name = "none"
    needs_handoff = False
    order = LegOrder.P_THEN_D
    coordinates = NO_COORDINATES
    decodes_alone = True
    finds_by_content = True
    endpoints = frozenset(Endpoint)
    takes_either_leg = False  # an R may have no part in the store

    def new_key(self) -> str:
        return ""

    def prefill_leg(self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str) -> LegRequest:
        kept = taken_fields(endpoint, prefill_fields(endpoint, fields, pair.prefill), pair.prefill.engine)
        return leg(endpoint, kept, leg_id, fields)

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | Finished | NoHandoff:
        return counts_of(answer)

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest:
        return plain_leg(endpoint, fields, leg_id, pair.decode.engine)
