"""MoRIIO: KV over AMD's MoRI-IO; both legs carry one transfer id, and where the other engine is.

In WRITE mode both legs run at once, and P writes into D. In READ mode P answers which blocks hold the prompt, and D
reads them. Which one it is the engines' config says, so each has a name here, and they do not pair. Engines tell their
ports and sizes by pings. The addresses could also be in the `X-Request-Id`, but clients would see that as the answer's
id. P hands over only after a token that ends for its length, which `prefill_fields` sees to where the API lets it.
Source: vLLM's `MoRIIOConnector`, 0.14 to 0.33; the layout is in docs/protocols.md.
"""

from __future__ import annotations

import re
import secrets
from types import MappingProxyType
from typing import Any

import msgspec

from ..errors import UNREADABLE
from ..fleet.worker import Worker
from ..leg_moves import LegOrder
from ..openai.answer_shapes import usage_of
from ..openai.body_members import answer_as, encoded
from ..openai.request import Endpoint, Fields
from .coordinates import COUNT, HOST, PORT
from .leg import (
    CHOICES_NOT_ONE,
    Finished,
    Handoff,
    LegRequest,
    NoHandoff,
    Pair,
    answering_fields,
    counts_at_length,
    leg,
    plain_leg,
)
from .mooncake import RANK
from .nixl import PARAMS, TransferAnswer
from .prefill import prefill_fields

HANDSHAKE_PORT, NOTIFY_PORT = "6301", "61005"  # the engine's defaults
_ADDRESS = re.compile(r"host:([^,]+),handshake:([0-9]+),notify:([0-9]+)")
_TOLD = ("side_channel_host", "handshake_port", "notify_port")


class MoRIIO:
    """WRITE mode."""

    name = "moriio"
    order = LegOrder.TOGETHER
    needs_handoff = False
    coordinates = MappingProxyType(
        {"side_channel_host": HOST, "handshake_port": PORT, "notify_port": PORT, "dp_size": COUNT, "tp_size": COUNT}
    )
    takes_either_leg = False
    decodes_alone = True
    finds_by_content = False
    endpoints = frozenset(Endpoint)

    def new_key(self) -> str:
        return secrets.token_hex(16)

    def prefill_leg(self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str) -> LegRequest:
        body = prefill_fields(endpoint, fields, pair.prefill)
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"tx-{pair.key}"}
        body[PARAMS] = encoded(params | _peer(pair.decode))
        made = leg(endpoint, body, leg_id, fields)
        made.headers[RANK] = str(_rank(pair.prefill, pair.key))
        return made

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | Finished | NoHandoff:
        return counts_at_length(answer)

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest:
        return _reading_leg(endpoint, fields, pair.prefill, leg_id, pair.key, {})


class _Blocks(msgspec.Struct):
    """Of P's answer what D is given: without one of them D's engine could fail."""

    transfer_id: str
    remote_engine_id: str
    remote_block_ids: list[int | list[int]]
    tp_size: int


class MoRIIORead(MoRIIO):
    name = "moriio_read"
    order = LegOrder.P_THEN_D
    needs_handoff = True

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | Finished | NoHandoff:
        body = answer_as(answer, TransferAnswer)
        if body is None:
            return NoHandoff("answer_undecodable")
        if body.choices and len(body.choices) > 1:
            return NoHandoff(CHOICES_NOT_ONE)
        if bytes(body.kv_transfer_params) in (b"null", b"{}"):
            return NoHandoff("params_missing")
        try:
            blocks = msgspec.json.decode(body.kv_transfer_params, type=_Blocks)
        except UNREADABLE:
            return NoHandoff("params_incomplete")
        if blocks.transfer_id != f"tx-{pair.key}":
            return NoHandoff("another_request")
        if not any(isinstance(group, int) or group for group in blocks.remote_block_ids):
            return NoHandoff("remote_block_ids_empty")
        if not blocks.remote_engine_id:
            return NoHandoff("remote_engine_id_missing")
        usage = usage_of(body.usage)
        params = {name: encoded(value) for name, value in msgspec.structs.asdict(blocks).items()}
        return Handoff(params, usage.prompt_tokens or 0, usage.cached_tokens)

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest:
        if handoff is None:
            return plain_leg(endpoint, fields, leg_id)
        key = msgspec.json.decode(handoff.params["transfer_id"], type=str).removeprefix("tx-")
        return _reading_leg(endpoint, fields, pair.prefill, leg_id, key, handoff.params)


def told_by_ping(zmq_address: str) -> dict[str, str] | None:
    """The coordinates in a ping's address; None for one that is none."""
    found = _ADDRESS.fullmatch(zmq_address)
    return None if found is None else dict(zip(_TOLD, found.groups(), strict=True))


def _reading_leg(
    endpoint: Endpoint, fields: Fields, prefill: Worker, leg_id: str, key: str, blocks: dict[str, Any]
) -> LegRequest:
    body = answering_fields(endpoint, fields)
    params: dict[str, Any] = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": f"tx-{key}"}
    body[PARAMS] = encoded(params | _peer(prefill) | {"remote_dp_rank": _rank(prefill, key)} | blocks)
    return leg(endpoint, body, leg_id, fields)


def _peer(worker: Worker) -> dict[str, Any]:
    told = worker.coordinates
    return {
        "remote_host": told.get("side_channel_host") or worker.host,
        "remote_handshake_port": int(told.get("handshake_port", HANDSHAKE_PORT)),
        "remote_notify_port": int(told.get("notify_port", NOTIFY_PORT)),
        "remote_dp_size": int(told.get("dp_size", "1")),
        "remote_tp_size": int(told.get("tp_size", "1")),
    }


def _rank(prefill: Worker, key: str) -> int:
    """P's data-parallel rank of this attempt: by the key, so that both legs name the same."""
    return int(key[-8:], 16) % int(prefill.coordinates.get("dp_size", "1"))
