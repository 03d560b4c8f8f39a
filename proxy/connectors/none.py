"""No transfer parameters: P and D share a KV store, or their connector finds KV by content. P runs first, then D."""

from __future__ import annotations

from ..openai.answer_shapes import body_usage
from ..openai.request import Endpoint, Fields
from .leg import Handoff, LegRequest, NoHandoff, Pair, leg, plain_leg
from .prefill import engine_version, prefill_fields


class NoConnector:
    name = "none"
    needs_handoff = False
    coordinates = frozenset[str]()
    shares_request_id = False
    takes_either_leg = False  # an R may have no part in the store

    def prefill_leg(self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str) -> LegRequest:
        kept = prefill_fields(endpoint, fields, engine_version(pair.prefill.engine_version))
        return leg(endpoint, kept, leg_id, fields)

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | NoHandoff:
        usage = body_usage(answer)
        return Handoff({}, usage.prompt_tokens or 0, usage.cached_tokens)

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest:
        return plain_leg(endpoint, fields, leg_id)
