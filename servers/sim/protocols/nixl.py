"""NIXL's pull connector of vLLM: P answers with its blocks, and D, asked next, pulls those that its own cache lacks.

What is missing in `kv_transfer_params` has the effect that it has on vLLM, which is to kill or to hang, and is counted.
What no P or D answers, as a member of another type, is refused by its name. So is a D's handle by which P reads KV back
where anything is missing. What is used twice, or too late, is counted by the engine that it names, and brings other KV,
which shows in the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from ppd.proxy.fleet.worker import Role

from ..core.counters import Trap
from ..core.errors import BadRequest
from ..core.fault_orders import FaultLeg
from ..core.handoffs import HandedOver, RemotePrefill, Transfer
from .legs import Leg, Own, fields_of, leg_of_params, params_of

_WHERE = "kv_transfer_params"


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


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    """What legs may carry: nothing is needed, and null is as if it were not there. All engines here are of size 1."""

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    remote_block_ids: list[list[int]] | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    tp_size: Literal[1] | None = None
    dcp_size: Literal[1] | None = None
    pp_size: Literal[1] | None = None
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    remote_blocks_expiry_time: float | None = None
    remote_registration_generation: int | None = None
    transfer_mode: Literal["pull"] | None = None
    remote_prefill_cached_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


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
    if not params:
        return Transfer()
    given = fields_of(params, _Given, _WHERE)
    if given.do_remote_prefill and given.do_remote_decode:
        name = f"{_WHERE}.do_remote_decode"
        raise BadRequest(f"{name}: must be false with do_remote_prefill", name)
    if given.do_remote_decode:
        if not given.remote_block_ids:
            return Transfer(hands_over=True)
        return _read_back(params) if reads_back else Transfer(hands_over=True, trap=Trap.NOT_BIDIRECTIONAL)
    return _pull(given) if given.do_remote_prefill else Transfer()


def _pull(given: _Given) -> Transfer:
    if not given.remote_block_ids or not given.remote_block_ids[0]:
        return Transfer(trap=Trap.NO_REMOTE_BLOCKS)
    engine_id, request_id = given.remote_engine_id, given.remote_request_id
    if not (engine_id and request_id and given.remote_host and given.remote_port):
        return Transfer(trap=Trap.NO_REMOTE_ADDRESS)
    return Transfer(
        remote=RemotePrefill(
            engine_id,
            request_id,
            given.remote_host,
            given.remote_port,
            tuple(given.remote_block_ids[0]),
            prefill_cached_tokens=given.remote_prefill_cached_tokens,
            has_heartbeat=bool(given.tp_size),
        )
    )


def _read_back(params: dict[str, Any]) -> Transfer:
    handle = fields_of(params, _Handle, _WHERE)
    remote = RemotePrefill(
        *(handle.remote_engine_id, handle.remote_request_id, handle.remote_host, handle.remote_port),
        block_ids=tuple(handle.remote_block_ids[0]),
        has_heartbeat=False,
        kept_until=handle.remote_blocks_expiry_time,
    )
    return Transfer(hands_over=True, remote=remote, read_back=handle.remote_num_tokens)
