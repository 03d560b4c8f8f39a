"""Peers of vLLM's OffloadingConnector: both legs at once; D asks P's p2p tier for what it lacks, block by block.

P also fetches what D holds of the prompt, where D has told its p2p port. Both find KV by content, and what is not found
is computed. Source: vLLM's tier `p2p`, 0.33; the layout is in docs/protocols.md.
"""

from __future__ import annotations

import uuid
from types import MappingProxyType

from ..fleet.worker import Role, Worker
from ..leg_moves import LegOrder
from ..openai.body_members import encoded
from ..openai.request import Endpoint, Fields
from .coordinates import HOST, PORT
from .leg import Finished, Handoff, LegRequest, NoHandoff, Pair, answering_fields, counts_of, leg
from .nixl import PARAMS
from .prefill import prefill_fields


class OffloadP2p:
    name = "offload_p2p"
    order = LegOrder.TOGETHER
    needs_handoff = False
    coordinates = MappingProxyType({"p2p_host": HOST, "p2p_port": PORT.of(Role.PREFILL)})
    takes_either_leg = False
    decodes_alone = True
    finds_by_content = True
    endpoints = frozenset(Endpoint)

    def new_key(self) -> str:
        return str(uuid.uuid4())

    def prefill_leg(self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str) -> LegRequest:
        body = prefill_fields(endpoint, fields, pair.prefill)
        params: dict[str, object] = {"remote_decoder": {"kv_request_id": pair.key}}
        if "p2p_port" in pair.decode.coordinates:
            params["remote_kv_source"] = _peer(pair.decode, f"{pair.key}-source")
        return leg(endpoint, {**body, PARAMS: encoded(params)}, leg_id, fields)

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | Finished | NoHandoff:
        return counts_of(answer)

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest:
        params = encoded({"remote_prefiller": _peer(pair.prefill, pair.key)})
        return leg(endpoint, {**answering_fields(endpoint, fields), PARAMS: params}, leg_id, fields)


def _peer(worker: Worker, key: str) -> dict[str, object]:
    """key: another one for each thing that is fetched."""
    told = worker.coordinates
    host = told.get("p2p_host") or worker.host
    return {"kv_request_id": key, "remote_host": host, "remote_port": int(told["p2p_port"])}
