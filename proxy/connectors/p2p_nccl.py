"""P2pNccl, for fleets of vLLM 0.9 to 0.23: both legs carry one request id, which holds the addresses of both workers.

P reads D's address from the id and sends it the KV; D reads P's address and waits. The bodies hold nothing about KV.
The legs run one after the other: a D that was asked first would wait inside its engine step and block all its other
requests.

A LOCAL turn's id holds no addresses. The stock connector parses every id and fails on such a one, so LOCAL needs a D
whose connector is patched to take an id without addresses as "nothing to receive". From 0.14 on both servers need
VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1 (read since 0.17), or D waits for an id that P never sends.
"""

from __future__ import annotations

import hashlib
import re

from ..errors import NoWorkerError
from ..fleet.worker import Worker
from ..openai.answer_shapes import body_usage
from ..openai.request import Endpoint, Fields
from .leg import Handoff, LegRequest, NoHandoff, Pair, answering_fields, leg
from .prefill import Version, engine_version, prefill_fields

ADDRESS = "zmq_address"  # the worker's coordinate: host:port of its rank 0

_ADDRESSED = "___prefill_addr_"
_HEX = re.compile(r"[0-9a-f]{32}")
_OLDEST: Version = (0, 9)  # pings carry no version, and only old versions have this connector


class P2pNccl:
    name = "p2p_nccl"
    needs_handoff = False
    coordinates = frozenset({"zmq_address"})
    shares_request_id = True
    takes_either_leg = False

    def prefill_leg(self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str) -> LegRequest:
        engine = engine_version(pair.prefill.engine_version) or _OLDEST
        return leg(endpoint, prefill_fields(endpoint, fields, engine), _request_id(pair, leg_id), fields)

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | NoHandoff:
        """Always a handoff, without parameters: P has sent the KV by the time it answers."""
        usage = body_usage(answer)
        return Handoff({}, usage.prompt_tokens or 0, usage.cached_tokens)

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest:
        """`leg_id` is the prefill leg's, or that leg's X-Request-Id."""
        request_id = leg_id if handoff is None else _request_id(pair, leg_id)
        return leg(endpoint, answering_fields(endpoint, fields), request_id, fields)


def _request_id(pair: Pair, leg_id: str) -> str:
    if leg_id.startswith(_ADDRESSED):
        return leg_id
    # A colon in the tail would confuse the pattern by which P finds the port.
    tail = leg_id if _HEX.fullmatch(leg_id) else hashlib.md5(leg_id.encode(), usedforsecurity=False).hexdigest()
    return f"{_ADDRESSED}{_address(pair.prefill)}___decode_addr_{_address(pair.decode)}_{tail}"


def _address(worker: Worker) -> str:
    address = worker.coordinates.get(ADDRESS)
    if not address:
        raise NoWorkerError("a worker has not announced its KV transfer address (zmq_address)")
    return address
