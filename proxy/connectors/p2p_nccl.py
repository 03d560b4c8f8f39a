"""P2pNccl, for fleets of vLLM 0.9 to 0.23: both legs carry one request id, which holds the addresses of both workers.

P reads D's address from the id and sends it the KV; D reads P's address and waits. The bodies hold nothing about KV.
The legs run one after the other: a D that was asked first would wait inside its engine step and block all its other
requests.

A LOCAL turn's id holds no addresses. vLLM's own D expects KV for each request all the same: it waits for it within its
step, with all its requests, or ends. So LOCAL needs a D that is patched to take such an id as "nothing to receive", and
that says so (`takes_plain`). From 0.14 on both servers need VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1 (read since 0.17),
or D waits for an id that P never sends.
"""

from __future__ import annotations

import secrets
from types import MappingProxyType

from ..fleet.worker import TAKES_PLAIN, Role
from ..leg_moves import LegOrder
from ..openai.request import Endpoint, Fields
from .coordinates import ADDRESS, SWITCH
from .leg import Finished, Handoff, LegRequest, NoHandoff, Pair, answering_fields, counts_of, leg
from .prefill import Version, prefill_fields

_PREFIX = "___prefill_addr_"
_OLDEST: Version = (0, 9)  # pings carry no version, and only old versions have this connector


class P2pNccl:
    name = "p2p_nccl"
    needs_handoff = False
    order = LegOrder.P_THEN_D
    coordinates = MappingProxyType(  # the address: of its rank 0
        {"zmq_address": ADDRESS.of(Role.PREFILL, Role.DECODE), TAKES_PLAIN: SWITCH}
    )
    takes_either_leg = False
    decodes_alone = False
    finds_by_content = False
    endpoints = frozenset(Endpoint) - {Endpoint.RESPONSES}  # where vLLM reads no X-Request-Id

    def new_key(self) -> str:
        return secrets.token_hex(16)

    def prefill_leg(self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str) -> LegRequest:
        return leg(endpoint, prefill_fields(endpoint, fields, pair.prefill, _OLDEST), _request_id(pair), fields)

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | Finished | NoHandoff:
        """Always a handoff, without parameters: P has sent the KV by the time it answers."""
        return counts_of(answer)

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest:
        request_id = leg_id if handoff is None else _request_id(pair)
        return leg(endpoint, answering_fields(endpoint, fields), request_id, fields)


def shown_id(request_id: str) -> str:
    """What a client may see of a leg's id, which vLLM repeats as the answer's: no addresses."""
    return request_id.rpartition("_")[2] if request_id.startswith(_PREFIX) else request_id


def _request_id(pair: Pair) -> str:
    """A colon in the key would confuse the pattern by which P finds the port."""
    prefill, decode = (worker.coordinates["zmq_address"] for worker in (pair.prefill, pair.decode))
    return f"{_PREFIX}{prefill}___decode_addr_{decode}_{pair.key}"
