"""vLLM's MoRIIOConnector: both legs carry a `transfer_id`, and an `X-Request-Id` with both addresses.

An address may stand in the parameters instead. P hands over only if its answer ends by `length`, and does not tell D
when it will not: D waits. In READ mode D is also given what P answered. Source: vLLM 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from ppd.proxy.config import PORT_PATTERN
from ppd.proxy.fleet.worker import Role

from ..core.errors import BadRequest
from ..core.fault_orders import FaultLeg
from ..core.handoffs import HandedOver, RemotePrefill, Transfer
from .legs import Leg, Own, check_rank, fields_of, leg_of_params, params_of, plain, request_id, wrong_name

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_WHERE = "kv_transfer_params"
_PEERS = re.compile(r"___prefill_addr_(.+?)___decode_addr_(.+)_[0-9a-f]{32}")
_ADDRESS = re.compile(rf"host:(.+),handshake:({PORT_PATTERN}),notify:({PORT_PATTERN})")


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Of the peer; every simulated engine is of size 1."""

    transfer_id: _Text
    remote_dp_size: Literal[1]
    remote_tp_size: Literal[1]
    remote_engine_id: str = ""
    remote_host: _Text | None = None
    remote_handshake_port: _Port | None = None
    remote_notify_port: _Port | None = None
    do_remote_prefill: bool = False
    do_remote_decode: bool = False


class _Decode(_Common):
    remote_dp_rank: Literal[0]
    prompt_token_ids: list[int] | None = None


class _Reading(_Decode, kw_only=True):
    """READ mode: what P has answered."""

    remote_engine_id: _Text
    remote_block_ids: Annotated[list[list[int]], msgspec.Meta(min_length=1)]
    tp_size: Literal[1]


class Moriio:
    """WRITE mode."""

    engine = "vllm"
    is_joint = False
    is_written = True
    decode_kind: type[_Decode] = _Decode
    key_member = f"{_WHERE}.transfer_id"

    def leg(self, members: Mapping[str, Any], role: Role) -> FaultLeg:
        return leg_of_params(members)

    def read(self, leg: Leg, own: Own) -> tuple[Transfer, ...]:
        params = params_of(leg)
        kind = leg_of_params(leg.members)
        if not params or kind is FaultLeg.PLAIN:
            return plain(leg)
        check_rank(leg)
        given = {name: value for name, value in params.items() if value is not None}
        fields = fields_of(given, _Common if kind is FaultLeg.PREFILL else self.decode_kind, _WHERE)
        host, port = _peer(leg, own, fields, kind)
        if kind is FaultLeg.PREFILL:
            return (Transfer(hands_over=True, key=fields.transfer_id, only_at_length=True),) * leg.sequences
        remote = RemotePrefill(fields.remote_engine_id, fields.transfer_id, host, port, None)
        return (Transfer(remote=remote, key=fields.transfer_id),) * leg.sequences

    def answer(self, handed_over: HandedOver, own: Own) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(handed_over.block_ids)],
            "remote_engine_id": own.engine_id,
            "remote_host": own.host,
            "remote_handshake_port": own.port,
            "remote_notify_port": own.port,
            "remote_dp_rank": 0,
            "remote_dp_rank_override": True,
            "remote_dp_size": 1,
            "remote_dp_size_local": 1,
            "tp_size": 1,
            "transfer_id": handed_over.key,
        }

    def coordinates(self, own: Own) -> dict[str, str]:
        """As the engine's own pings have them."""
        ports = {name: str(own.port) for name in ("handshake_port", "notify_port")}
        return {"side_channel_host": own.host, **ports, "dp_size": "1", "tp_size": "1"}

    def page(self, path: str, query: Mapping[str, str], own: Own) -> None:
        return None


class MoriioRead(Moriio):
    """D reads the blocks that P has named."""

    is_written = False
    decode_kind = _Reading


def _address(own: Own) -> str:
    return f"host:{own.host},handshake:{own.port},notify:{own.port}"


def _peer(leg: Leg, own: Own, fields: _Common, kind: FaultLeg) -> tuple[str, int]:
    """Host and notify port, from the request's id or else from the parameters."""
    named = "" if leg.path == "/v1/responses" else request_id(leg)
    if (peers := _PEERS.fullmatch(named)) is not None:
        prefill, decode = peers.groups()
        mine, other = (prefill, decode) if kind is FaultLeg.PREFILL else (decode, prefill)
        address = _ADDRESS.fullmatch(other)
        if mine == _address(own) and address is not None:
            return address[1], int(address[3])
        raise wrong_name("X-Request-Id", _address(own), named)
    for name in ("remote_host", "remote_handshake_port", "remote_notify_port"):
        if getattr(fields, name) is None:
            raise BadRequest(f"{_WHERE}.{name}: must be there if X-Request-Id has no addresses", f"{_WHERE}.{name}")
    assert fields.remote_host is not None and fields.remote_notify_port is not None, "both were looked at"
    return fields.remote_host, fields.remote_notify_port
