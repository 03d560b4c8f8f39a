"""SGLang's disaggregation: both legs carry P's bootstrap address and a room, and meet there. Source: SGLang 0.5.23.

Roles are fixed: P computes when D has come, and its answer ends when D has the KV. D never computes a prompt. With
`--disaggregation-decode-enable-radix-cache` it keeps what it is sent and asks for what it lacks; else P sends all.
Either refuses a request without a room, so there is no LOCAL turn. Only chat and completions carry the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from ppd.proxy.fleet.worker import Role

from ..core.errors import BadRequest
from ..core.fault_orders import FaultLeg
from ..core.handoffs import HandedOver, RemotePrefill, Transfer
from .legs import Leg, Own, fields_of, plain

FAKE_HOST = "2.2.2.2"  # reserved: no transfer, for warm-up and health probes
_PATHS = ("/v1/chat/completions", "/v1/completions")
_LEGS = {Role.PREFILL: FaultLeg.PREFILL, Role.DECODE: FaultLeg.DECODE}
_SHAPE = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": None}
_RANKS = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")


class _Fields(msgspec.Struct):
    bootstrap_host: Annotated[str, msgspec.Meta(min_length=1)]
    bootstrap_room: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = 8998


class Sglang:
    engine = "sglang"
    is_joint = True
    is_written = False
    key_member = "bootstrap_room"

    def leg(self, members: Mapping[str, Any], role: Role) -> FaultLeg:
        return _LEGS.get(role, FaultLeg.PLAIN) if members.get("bootstrap_room") is not None else FaultLeg.PLAIN

    def read(self, leg: Leg, own: Own) -> tuple[Transfer, ...]:
        if own.role not in _LEGS:  # it is not disaggregated, and ignores the fields
            return plain(leg)
        if leg.path not in _PATHS or leg.members.get("bootstrap_room") is None:
            raise BadRequest(
                "Invalid request: Disaggregated request received without bootstrap room id.", "bootstrap_room"
            )
        fields = fields_of(leg.members, _Fields)
        if fields.bootstrap_host == FAKE_HOST:
            return (Transfer(ends_after_prefill=own.role is Role.PREFILL),) * leg.sequences
        rooms = [str(fields.bootstrap_room + place) for place in range(leg.sequences)]
        if own.role is Role.DECODE:
            port = fields.bootstrap_port or 8998
            remotes = (RemotePrefill("", room, fields.bootstrap_host, port, None) for room in rooms)
            pulls_all = not own.keeps_prefixes
            return tuple(Transfer(remote=remote, key=remote.request_id, pulls_all=pulls_all) for remote in remotes)
        if fields.bootstrap_port not in (None, own.port):
            raise BadRequest(
                f"bootstrap_port: must be {own.port}, this server's, got {fields.bootstrap_port}", "bootstrap_port"
            )
        return tuple(Transfer(hands_over=True, key=room, ends_after_prefill=True) for room in rooms)

    def answer(self, handed_over: HandedOver, own: Own) -> None:
        return None

    def coordinates(self, own: Own) -> dict[str, str]:
        return {"bootstrap_host": own.host, "bootstrap_port": str(own.port)}

    def page(self, path: str, query: Mapping[str, str], own: Own) -> tuple[int, Any] | None:
        """The bootstrap server's own: `GET /route` asks for one rank of P, or with all -1 for P's shape."""
        if path == "/health":
            return 200, "OK"
        if path != "/route":
            return None
        if missing := [name for name in _RANKS if name not in query]:
            return 400, f"Missing inputs for bootstrap server: {', '.join(missing)}"
        ranks = {query[name] for name in _RANKS}
        if ranks == {"-1"}:
            return 200, _SHAPE
        return (200, {"rank_ip": own.host, "rank_port": own.port}) if ranks <= {"0"} else (404, "Unknown rank")
