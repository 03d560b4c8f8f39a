"""P2pNccl, of vLLM up to 0.23: the `X-Request-Id` of both legs holds both addresses, and the bodies say nothing.

P sends the prompt's KV to D before it answers, and keeps none. D takes it inside its step, in which it waits for what
has not come: without a time-out, and all its other requests with it. Under a name without addresses vLLM's own D would
wait so for ever: here the request is refused, unless D is started as one that is patched for LOCAL turns. Source: vLLM
0.23, with VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ppd.proxy.config import PORT_PATTERN
from ppd.proxy.fleet.worker import TAKES_PLAIN, Role

from ..core.errors import BadRequest
from ..core.fault_orders import FaultLeg
from ..core.handoffs import HandedOver, RemotePrefill, Transfer
from .legs import Leg, Own, params_of, plain, wrong_name

_NAME = "X-Request-Id"
_PEERS = re.compile(r"___prefill_addr_(.+?)___decode_addr_(.+)_[0-9a-f]{32}")
_ADDRESS = re.compile(rf"(\S+):({PORT_PATTERN})")
_LEGS = {Role.PREFILL: FaultLeg.PREFILL, Role.DECODE: FaultLeg.DECODE}


class P2pNccl:
    engine = "vllm"
    is_joint = False
    is_written = False
    key_member = _NAME

    def leg(self, members: Mapping[str, Any], role: Role) -> FaultLeg:
        """By the role: bodies say nothing of it."""
        return _LEGS.get(role, FaultLeg.PLAIN)

    def read(self, leg: Leg, own: Own) -> tuple[Transfer, ...]:
        if params_of(leg):
            raise BadRequest("kv_transfer_params: this connector reads none", "kv_transfer_params")
        named = "" if leg.path == "/v1/responses" else leg.headers.get(_NAME, "")  # vLLM reads no header there
        if own.role not in _LEGS or (_takes_plain(own) and "_addr_" not in named):
            return plain(leg)
        if (peers := _PEERS.fullmatch(named)) is None:
            raise BadRequest(f"{_NAME}: must have both addresses, and 32 hex digits", _NAME)
        prefill, decode = peers.groups()
        mine, other = (prefill, decode) if own.role is Role.PREFILL else (decode, prefill)
        address = _ADDRESS.fullmatch(other)
        if mine != _address(own) or address is None:
            raise wrong_name(_NAME, _address(own), named)
        host, port = address[1], int(address[2])
        keys = [f"{named}-{place}" for place in range(leg.sequences)]
        if own.role is Role.PREFILL:
            return tuple(Transfer(hands_over=True, key=key, receiver=(host, port), is_sent=True) for key in keys)
        remotes = (RemotePrefill("", key, host, port, None) for key in keys)
        return tuple(Transfer(remote=remote, key=remote.request_id, is_sent=True) for remote in remotes)

    def answer(self, handed_over: HandedOver, own: Own) -> None:
        return None

    def coordinates(self, own: Own) -> dict[str, str]:
        """The address as the engine's own pings have it; of the patch its operator has to tell."""
        return {"zmq_address": _address(own)} | ({TAKES_PLAIN: "true"} if _takes_plain(own) else {})

    def page(self, path: str, query: Mapping[str, str], own: Own) -> None:
        return None


def _takes_plain(own: Own) -> bool:
    return own.takes_plain and own.role is Role.DECODE


def _address(own: Own) -> str:
    return f"{own.host}:{own.port}"
