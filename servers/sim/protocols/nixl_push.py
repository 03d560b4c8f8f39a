"""NIXL's push connector of vLLM: both legs have one `X-Request-Id`, by which P finds where to write D's KV.

D is told P's coordinates beforehand. P does not tell D when it will not write: D waits. So it does for a P that began
anew under the engine's id that D knows: D tells the process before where to write. Source: vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from ppd.proxy.fleet.worker import Role

from ..core.errors import BadRequest
from ..core.fault_orders import FaultLeg
from ..core.handoffs import HandedOver, RemotePrefill, Transfer
from .legs import Leg, Own, fields_of, leg_of_params, params_of, plain, request_id
from .nixl import Nixl

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_WHERE = "kv_transfer_params"


class _Prefill(msgspec.Struct, forbid_unknown_fields=True):
    do_remote_decode: bool
    do_remote_prefill: bool = False


class _Decode(msgspec.Struct, forbid_unknown_fields=True):
    remote_engine_id: _Text
    remote_host: _Text
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_request_id: _Text
    tp_size: _Count
    do_remote_prefill: bool
    do_remote_decode: bool = False
    pp_size: _Count = 1
    dcp_size: _Count = 1
    prompt_token_ids: list[int] | None = None


class NixlPush:
    engine = "vllm"
    is_joint = False
    is_written = True
    key_member = "X-Request-Id"

    def leg(self, members: Mapping[str, Any], role: Role) -> FaultLeg:
        return leg_of_params(members)

    def read(self, leg: Leg, own: Own) -> tuple[Transfer, ...]:
        params = params_of(leg)
        kind = leg_of_params(leg.members)
        if not params or kind is FaultLeg.PLAIN:
            return plain(leg)
        given = {name: value for name, value in params.items() if value is not None}
        key = request_id(leg)
        if kind is FaultLeg.PREFILL:
            fields_of(given, _Prefill, _WHERE)
            return (Transfer(hands_over=True, key=key),) * leg.sequences
        fields = fields_of(given, _Decode, _WHERE)
        for name, value in (("tp_size", fields.tp_size), ("pp_size", fields.pp_size), ("dcp_size", fields.dcp_size)):
            if value != 1:
                raise BadRequest(f"{_WHERE}.{name}: must be 1, as of every simulated engine", f"{_WHERE}.{name}")
        if fields.remote_request_id != key:
            name = f"{_WHERE}.remote_request_id"
            raise BadRequest(f"{name}: must be the request's own X-Request-Id, which P's leg has too", name)
        remote = RemotePrefill(fields.remote_engine_id, key, fields.remote_host, fields.remote_port, None)
        return (Transfer(remote=remote, key=key),) * leg.sequences

    def answer(self, handed_over: HandedOver, own: Own) -> dict[str, Any]:
        return Nixl().answer(handed_over, own) | {"transfer_mode": "push"}

    def coordinates(self, own: Own) -> dict[str, str]:
        return {"engine_id": own.engine_id, "side_channel_host": own.host, "side_channel_port": str(own.port)}

    def page(self, path: str, query: Mapping[str, str], own: Own) -> None:
        return None
