"""LMCache's own transfer: P is told where D receives, and sends it the prompt's full blocks; D finds them as its cache.

P does not wait for that, and D is told nothing. Source: LMCache 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from ppd.proxy.fleet.worker import Role

from ..core.fault_orders import FaultLeg
from ..core.handoffs import HandedOver, Transfer
from .legs import Leg, Own, fields_of, params_of, plain

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Ports = Annotated[  # of each tensor-parallel rank
    list[Annotated[int, msgspec.Meta(ge=1, le=65535)]], msgspec.Meta(min_length=1, max_length=1)  # it has one rank
]
_WHERE = "kv_transfer_params"


class _Spec(msgspec.Struct, forbid_unknown_fields=True):
    req_id: _Text
    receiver_host: _Text
    receiver_init_port: _Ports
    receiver_alloc_port: _Ports


class _Params(msgspec.Struct, forbid_unknown_fields=True):
    disagg_spec: _Spec
    ret_first_tok: bool = False


class LmCache:
    engine = "vllm"
    is_joint = False
    is_written = False
    key_member = f"{_WHERE}.disagg_spec.req_id"

    def leg(self, members: Mapping[str, Any], role: Role) -> FaultLeg:
        return FaultLeg.PREFILL if members.get(_WHERE) else FaultLeg.PLAIN

    def read(self, leg: Leg, own: Own) -> tuple[Transfer, ...]:
        params = params_of(leg)
        if not params:
            return plain(leg)
        spec = fields_of(params, _Params, _WHERE).disagg_spec
        receiver = (spec.receiver_host, spec.receiver_init_port[0])
        return (Transfer(hands_over=True, key=spec.req_id, receiver=receiver),) * leg.sequences

    def answer(self, handed_over: HandedOver, own: Own) -> dict[str, Any]:
        return {"first_tok": handed_over.first_token}

    def coordinates(self, own: Own) -> dict[str, str]:
        port = str(own.port)
        return {"receiver_host": own.host, "receiver_init_port": port, "receiver_alloc_port": port}

    def page(self, path: str, query: Mapping[str, str], own: Own) -> None:
        return None
