"""Mooncake: both legs at once, under one transfer id; D asks P's bootstrap server where P is, and P writes the KV.

D's leg names P's engine, whose id is new at each start: `GET /query` of the bootstrap server tells it, for each
data-parallel rank. P writes only after a token that ends for its length, which `prefill_fields` sees to where the API
lets it. A P that fails, or whose first token ends the answer all the same, leaves D waiting. Source: vLLM's
`MooncakeConnector`, 0.13 to 0.33; the layout is in docs/protocols.md.
"""

from __future__ import annotations

import re
import uuid
from itertools import count, takewhile
from types import MappingProxyType

import msgspec

from ..errors import UNREADABLE
from ..fleet.worker import Role, Worker
from ..leg_moves import LegOrder
from ..openai.body_members import encoded
from ..openai.request import Endpoint, Fields
from .coordinates import ENGINE, HOST, PORT
from .leg import Finished, Handoff, LegRequest, NoHandoff, Pair, answering_fields, counts_at_length, leg
from .nixl import PARAMS
from .prefill import prefill_fields

BOOTSTRAP_PORT = "8998"  # the engine's default
RANKS_LIMIT = 16  # whose ids are kept
RANK = "X-data-parallel-rank"
_ENGINE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,256}")


class Mooncake:
    name = "mooncake"
    order = LegOrder.TOGETHER
    needs_handoff = False
    coordinates = MappingProxyType(
        {"engine_id": ENGINE.of(Role.PREFILL), "bootstrap_host": HOST, "bootstrap_port": PORT}
    )
    takes_either_leg = False
    decodes_alone = True
    finds_by_content = False
    endpoints = frozenset(Endpoint)

    def new_key(self) -> str:
        return f"xfer-{uuid.uuid4()}"

    def prefill_leg(self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str) -> LegRequest:
        body = prefill_fields(endpoint, fields, pair.prefill)
        body[PARAMS] = encoded({"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": pair.key})
        made = leg(endpoint, body, leg_id, fields)
        made.headers[RANK] = str(_rank(pair))
        return made

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | Finished | NoHandoff:
        return counts_at_length(answer)

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest:
        body = answering_fields(endpoint, fields)
        body[PARAMS] = encoded(
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_bootstrap_addr": _bootstrap_url(pair.prefill),
                "remote_engine_id": pair.prefill.coordinates[_name(_rank(pair))],
                "transfer_id": pair.key,
            }
        )
        return leg(endpoint, body, leg_id, fields)


def query_url(worker: Worker) -> str:
    """Where the ids of its engine are asked for; empty if they need not be."""
    if worker.connector != Mooncake.name or worker.role is not Role.PREFILL or "engine_id" in worker.coordinates:
        return ""
    return f"{_bootstrap_url(worker)}/query"


class _Rank(msgspec.Struct):
    engine_id: str


def engine_ids(answer: bytes) -> dict[str, str]:
    """The coordinates in an answer to `query_url`: of rank 0 `engine_id`, of rank 1 `engine_id.1`, and so on.

    Empty for an answer that is none; ranks after a missing one are left out.
    """
    try:
        ranks = msgspec.json.decode(answer, type=dict[str, _Rank])
    except UNREADABLE:
        return {}
    known = takewhile(lambda rank: str(rank) in ranks and rank < RANKS_LIMIT, count())
    found = {_name(rank): ranks[str(rank)].engine_id for rank in known}
    return found if all(map(_ENGINE_ID.fullmatch, found.values())) else {}


def _bootstrap_url(prefill: Worker) -> str:
    told = prefill.coordinates
    host = told.get("bootstrap_host") or prefill.address.rpartition(":")[0]
    return f"http://{host}:{told.get('bootstrap_port', BOOTSTRAP_PORT)}"


def _name(rank: int) -> str:
    return f"engine_id.{rank}" if rank else "engine_id"


def _rank(pair: Pair) -> int:
    """P's data-parallel rank of this attempt: by the key, so that both legs name the same."""
    ranks = sum(1 for _ in takewhile(lambda rank: _name(rank) in pair.prefill.coordinates, count()))
    return int(pair.key[-8:], 16) % ranks
