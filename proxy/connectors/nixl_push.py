"""NIXL, push mode: both legs at once, under one request id; P writes the KV into blocks that D has registered with it.

D's leg names P before P has answered, so the proxy must know what P's answer would say in pull mode: its engine's id,
which its config has to pin, and its side channel. Without one of them D's scheduler fails, and with it the engine: each
has a value here. Source: vLLM's `NixlPushConnector`, 0.24 to 0.33; the layout is in docs/protocols.md.
"""

from __future__ import annotations

import uuid
from types import MappingProxyType

from ..fleet.worker import Role
from ..leg_moves import LegOrder
from ..openai.body_members import decoded, encoded
from ..openai.request import Endpoint, Fields
from .coordinates import COUNT, ENGINE, HOST, PORT
from .leg import Finished, Handoff, LegRequest, NoHandoff, Pair, answering_fields, leg
from .nixl import ASK, PARAMS, push_counts
from .prefill import prefill_fields

SIDE_CHANNEL_PORT = "5600"  # the engine's default
NAME = "request_id"


class NixlPush:
    name = "nixl_push"
    order = LegOrder.TOGETHER
    needs_handoff = False
    coordinates = MappingProxyType(
        {
            "engine_id": ENGINE.of(Role.PREFILL),
            "side_channel_host": HOST,
            "side_channel_port": PORT,
            "tp_size": COUNT,
            "pp_size": COUNT,
        }
    )
    takes_either_leg = False
    decodes_alone = True
    finds_by_content = False
    endpoints = frozenset(Endpoint)

    def new_key(self) -> str:
        """The engines match both legs by it."""
        return str(uuid.uuid4())

    def prefill_leg(self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str) -> LegRequest:
        body = prefill_fields(endpoint, fields, pair.prefill)
        return leg(endpoint, {**_named(endpoint, body, pair.key), PARAMS: ASK}, pair.key, fields)

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | Finished | NoHandoff:
        return push_counts(answer)

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest:
        told = pair.prefill.coordinates
        body = _named(endpoint, answering_fields(endpoint, fields), pair.key)
        body[PARAMS] = encoded(
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_engine_id": told["engine_id"],
                "remote_host": told.get("side_channel_host") or pair.prefill.host,
                "remote_port": int(told.get("side_channel_port", SIDE_CHANNEL_PORT)),
                "tp_size": int(told.get("tp_size", "1")),
                "pp_size": int(told.get("pp_size", "1")),
                "remote_request_id": decoded(body[NAME]) if NAME in body else pair.key,
            }
        )
        return leg(endpoint, body, pair.key, fields)


def _named(endpoint: Endpoint, body: Fields, key: str) -> Fields:
    """With the request's name where vLLM reads it: /v1/responses reads no header, and gives its answer that id.

    A tenant's turn has a name already.
    """
    return {NAME: encoded(f"resp_{key}"), **body} if endpoint is Endpoint.RESPONSES else body
