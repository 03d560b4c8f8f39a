"""SGLang: both legs at once, paired by a room of P's bootstrap service.

D asks that service where P's KV is, tells P where to write it, and P writes. P also samples the first token, which D
then sends: so P gets the client's body as D does, and its role ends it after that token. An engine in one of the two
roles refuses a request without a room, so D takes no LOCAL turns. A room is used once. A D without a radix cache, as is
the default, keeps nothing of a turn; its `GET /server_info` tells. Source: SGLang 0.5.
"""

from __future__ import annotations

import secrets
from types import MappingProxyType

import msgspec

from ..errors import UNREADABLE
from ..fleet.worker import PREFIX_CACHE, Role, Worker
from ..leg_moves import LegOrder
from ..openai.body_members import encoded
from ..openai.request import CHOOSING, Endpoint, Fields
from .coordinates import HOST, PORT, SWITCH
from .leg import Finished, Handoff, LegRequest, NoHandoff, Pair, answering_fields, counts_of, leg

ENGINE = "sglang"
BOOTSTRAP_PORT = "8998"  # the engine's default
ROOM_BITS = 63
_WHOLE = encoded(False)  # P's answer is read as one body


class SGLang:
    name = "sglang"
    order = LegOrder.D_FIRST
    needs_handoff = False
    coordinates = MappingProxyType({"bootstrap_host": HOST, "bootstrap_port": PORT, PREFIX_CACHE: SWITCH})  # D's: last
    takes_either_leg = False
    decodes_alone = False
    finds_by_content = False
    endpoints = frozenset(CHOOSING)  # elsewhere SGLang takes no room

    def new_key(self) -> str:
        return str(secrets.randbits(ROOM_BITS))

    def prefill_leg(self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str) -> LegRequest:
        body = {**answering_fields(endpoint, fields, ENGINE), **_room(pair), "stream": _WHOLE}
        body.pop("stream_options", None)
        return leg(endpoint, body, leg_id, fields)

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | Finished | NoHandoff:
        return counts_of(answer)

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest:
        return leg(endpoint, {**answering_fields(endpoint, fields, ENGINE), **_room(pair)}, leg_id, fields)


def info_url(worker: Worker) -> str:
    """Where a D tells whether it keeps what turns leave there; empty if it need not be asked."""
    is_asked = worker.connector == SGLang.name and worker.role is Role.DECODE
    return f"{worker.base_url}/server_info" if is_asked and PREFIX_CACHE not in worker.coordinates else ""


class _ServerInfo(msgspec.Struct):
    disaggregation_decode_enable_radix_cache: bool | None = None


def cache_told(answer: bytes) -> dict[str, str]:
    """The coordinate in an answer to `info_url`; empty for an answer that does not say."""
    try:
        keeps = msgspec.json.decode(answer, type=_ServerInfo).disaggregation_decode_enable_radix_cache
    except UNREADABLE:
        return {}
    return {} if keeps is None else {PREFIX_CACHE: str(keeps).lower()}


def _room(pair: Pair) -> Fields:
    told = pair.prefill.coordinates
    return {
        "bootstrap_host": encoded(told.get("bootstrap_host") or pair.prefill.address.rpartition(":")[0]),
        "bootstrap_port": encoded(int(told.get("bootstrap_port", BOOTSTRAP_PORT))),
        "bootstrap_room": encoded(int(pair.key)),
    }
