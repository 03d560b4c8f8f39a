"""The p2p tier of vLLM's OffloadingConnector: P is told a `kv_request_id`, D the same one and where P is.

What D does not find it computes. At a `remote_kv_source` P looks for what that engine holds of the prompt, and computes
the rest. Source: vLLM 0.33.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from ppd.proxy.fleet.worker import Role

from ..core.errors import BadRequest
from ..core.fault_orders import FaultLeg
from ..core.handoffs import HandedOver, KvSource, RemotePrefill, Transfer
from .legs import Leg, Own, fields_of, params_of, plain

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_WHERE = "kv_transfer_params"


class _Peer(msgspec.Struct, forbid_unknown_fields=True):
    kv_request_id: _Text
    remote_host: _Text
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _Claim(msgspec.Struct, forbid_unknown_fields=True):
    kv_request_id: _Text


class _Params(msgspec.Struct, forbid_unknown_fields=True):
    remote_decoder: _Claim | None = None
    remote_prefiller: _Peer | None = None
    remote_kv_source: _Peer | None = None


class OffloadPeers:
    engine = "vllm"
    is_joint = False
    is_written = False
    key_member = f"{_WHERE}.kv_request_id"

    def leg(self, members: Mapping[str, Any], role: Role) -> FaultLeg:
        params = members.get(_WHERE)
        if not isinstance(params, dict):
            return FaultLeg.PLAIN
        if "remote_prefiller" in params:
            return FaultLeg.DECODE
        return FaultLeg.PREFILL if "remote_decoder" in params else FaultLeg.PLAIN

    def read(self, leg: Leg, own: Own) -> tuple[Transfer, ...]:
        params = params_of(leg)
        if not params:
            return plain(leg)
        fields = fields_of(params, _Params, _WHERE)
        if (remote := fields.remote_prefiller) is not None:
            if len(params) > 1:
                raise BadRequest(f"{_WHERE}: remote_prefiller stands alone", f"{_WHERE}.remote_prefiller")
            peer = RemotePrefill("", remote.kv_request_id, remote.remote_host, remote.remote_port, None)
            return (Transfer(remote=peer, key=remote.kv_request_id, recomputes=True),) * leg.sequences
        if fields.remote_decoder is None:
            return plain(leg)
        key, source = fields.remote_decoder.kv_request_id, fields.remote_kv_source
        if source is not None and source.kv_request_id == key:
            name = f"{_WHERE}.remote_kv_source.kv_request_id"
            raise BadRequest(f"{name}: must be another one than remote_decoder's", name)
        asked = None if source is None else KvSource(source.kv_request_id, source.remote_host, source.remote_port)
        return (Transfer(hands_over=True, key=key, source=asked),) * leg.sequences

    def answer(self, handed_over: HandedOver, own: Own) -> None:
        return None

    def coordinates(self, own: Own) -> dict[str, str]:
        return {"p2p_host": own.host, "p2p_port": str(own.port)}

    def page(self, path: str, query: Mapping[str, str], own: Own) -> None:
        return None
