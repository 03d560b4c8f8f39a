"""NIXL's pull connector of vLLM: P answers with its blocks, and D, asked next, pulls those that its own cache lacks.

A wrong `kv_transfer_params` is no error here: it has the effect that it has on vLLM, which is to kill or to hang. But a
D's handle by which P reads KV back is refused by the name of what is wrong with it, and one that is used twice, or too
late, is counted by D as such and reads other KV, which shows in the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ppd.proxy.fleet.worker import Role

from ..core.counters import Trap
from ..core.fault_orders import FaultLeg
from ..core.handoffs import HandedOver, RemotePrefill, Transfer
from .legs import Leg, Own, fields_of, leg_of_params, params_of


class Nixl:
    engine = "vllm"
    is_joint = False
    is_written = False
    key_member = None

    def leg(self, members: Mapping[str, Any], role: Role) -> FaultLeg:
        return leg_of_params(members)

    def read(self, leg: Leg, own: Own) -> tuple[Transfer, ...]:
        return (read_transfer(params_of(leg), reads_back=own.reads_back),) * leg.sequences

    def answer(self, handed_over: HandedOver, own: Own) -> dict[str, Any]:
        """With every field that vLLM 0.33 sends."""
        is_kept = handed_over.kept_until is not None
        return {
            "do_remote_prefill": not is_kept,
            "do_remote_decode": is_kept,
            "remote_block_ids": [list(handed_over.block_ids)],
            "remote_engine_id": own.engine_id,
            "remote_request_id": handed_over.request_id,
            "remote_host": own.host,
            "remote_port": own.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": handed_over.tokens,
            "remote_blocks_expiry_time": handed_over.kept_until,
            "remote_registration_generation": 0,
            "transfer_mode": "pull",
            **({} if is_kept else {"remote_prefill_cached_tokens": handed_over.cached_tokens}),
        }

    def coordinates(self, own: Own) -> dict[str, str]:
        return {}

    def page(self, path: str, query: Mapping[str, str], own: Own) -> None:
        return None


class _Handle(msgspec.Struct):
    """What a D keeps, as its own answer names it."""

    remote_block_ids: list[list[int]]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_num_tokens: int
    remote_blocks_expiry_time: float


def read_transfer(params: dict[str, Any] | None, *, reads_back: bool = False) -> Transfer:
    """1. Nothing, or neither flag: a plain request.  2. do_remote_decode: hand over.  3. do_remote_prefill: pull.

    Traps of the third: without block ids the engine dies; without a field that names the peer the request hangs. With
    the blocks of a D in the second, P reads them back before it computes the rest; an engine that cannot, hangs.
    """
    if not params or not (params.get("do_remote_prefill") or params.get("do_remote_decode")):
        return Transfer()
    if not params.get("do_remote_prefill"):
        if not params.get("remote_block_ids"):
            return Transfer(hands_over=True)
        return _read_back(params) if reads_back else Transfer(hands_over=True, trap=Trap.NOT_BIDIRECTIONAL)
    block_ids = _block_ids(params.get("remote_block_ids"))
    if not block_ids:
        return Transfer(trap=Trap.NO_REMOTE_BLOCKS)
    engine_id, request_id = params.get("remote_engine_id"), params.get("remote_request_id")
    host, port = params.get("remote_host"), params.get("remote_port")
    if not (engine_id and request_id and host and isinstance(port, int)):
        return Transfer(trap=Trap.NO_REMOTE_ADDRESS)
    cached = params.get("remote_prefill_cached_tokens")
    return Transfer(
        remote=RemotePrefill(
            str(engine_id),
            str(request_id),
            str(host),
            port,
            block_ids,
            prefill_cached_tokens=cached if isinstance(cached, int) else None,
            has_heartbeat=bool(params.get("tp_size")),
        )
    )


def _read_back(params: dict[str, Any]) -> Transfer:
    handle = fields_of(params, _Handle, "kv_transfer_params")
    remote = RemotePrefill(
        *(handle.remote_engine_id, handle.remote_request_id, handle.remote_host, handle.remote_port),
        block_ids=_block_ids(handle.remote_block_ids),
        has_heartbeat=False,
        kept_until=handle.remote_blocks_expiry_time,
    )
    return Transfer(hands_over=True, remote=remote, read_back=handle.remote_num_tokens)


def _block_ids(groups: Any) -> tuple[int, ...]:
    if not isinstance(groups, list) or not groups or not isinstance(groups[0], list):
        return ()
    ids = groups[0]
    return tuple(ids) if all(isinstance(block_id, int) for block_id in ids) else ()
