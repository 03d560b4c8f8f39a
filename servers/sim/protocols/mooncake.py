"""vLLM's MooncakeConnector: both legs carry a `transfer_id`, and D is told where P's bootstrap server is.

P hands over only if its answer ends by `length`, and does not tell D when it will not: D waits. Source: vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from ppd.proxy.fleet.worker import Role

from ..core.errors import BadRequest
from ..core.fault_orders import FaultLeg
from ..core.handoffs import HandedOver, RemotePrefill, Transfer
from .legs import Leg, Own, check_rank, fields_of, leg_of_params, params_of, plain

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_WHERE = "kv_transfer_params"


class _Prefill(msgspec.Struct, forbid_unknown_fields=True):
    transfer_id: _Text
    do_remote_decode: bool
    do_remote_prefill: bool = False


class _Decode(msgspec.Struct, forbid_unknown_fields=True):
    transfer_id: _Text
    remote_bootstrap_addr: _Text
    remote_engine_id: _Text
    do_remote_prefill: bool
    do_remote_decode: bool = False
    prompt_token_ids: list[int] | None = None


class Mooncake:
    engine = "vllm"
    is_joint = False
    is_written = True
    key_member = f"{_WHERE}.transfer_id"

    def leg(self, members: Mapping[str, Any], role: Role) -> FaultLeg:
        return leg_of_params(members)

    def read(self, leg: Leg, own: Own) -> tuple[Transfer, ...]:
        params = params_of(leg)
        if not params:
            return plain(leg)
        check_rank(leg)
        kind = leg_of_params(leg.members)
        if kind is FaultLeg.PREFILL and own.role is not Role.DECODE:
            key = fields_of(params, _Prefill, _WHERE).transfer_id
            return (Transfer(hands_over=True, key=key, only_at_length=True),) * leg.sequences
        if kind is FaultLeg.DECODE and own.role is not Role.PREFILL:
            fields = fields_of(params, _Decode, _WHERE)
            host, port = _address(fields.remote_bootstrap_addr)
            remote = RemotePrefill(fields.remote_engine_id, fields.transfer_id, host, port, None)
            return (Transfer(remote=remote, key=fields.transfer_id),) * leg.sequences
        allowed = {Role.PREFILL: "do_remote_decode", Role.DECODE: "do_remote_prefill"}.get(own.role, "one of the two")
        raise BadRequest(f"{_WHERE}: a {own.role} takes {allowed} = true", f"{_WHERE}.{allowed}")

    def answer(self, handed_over: HandedOver, own: Own) -> None:
        return None

    def coordinates(self, own: Own) -> dict[str, str]:
        """The engine's id is asked of the bootstrap server."""
        return {"bootstrap_host": own.host, "bootstrap_port": str(own.port)}

    def page(self, path: str, query: Mapping[str, str], own: Own) -> tuple[int, Any] | None:
        """The bootstrap server's: engine and workers by data-parallel rank."""
        if path != "/query":
            return None
        return 200, {"0": {"engine_id": own.engine_id, "worker_addr": {"0": {"0": f"tcp://{own.host}:{own.port}"}}}}


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.scheme != "http":
        name = f"{_WHERE}.remote_bootstrap_addr"
        raise BadRequest(f"{name}: must be http://host:port", name)
    return host, port
