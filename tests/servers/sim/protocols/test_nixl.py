from __future__ import annotations

from typing import Any

import pytest

from ppd.servers.sim.core.counters import Trap
from ppd.servers.sim.core.errors import BadRequest
from ppd.servers.sim.core.fault_orders import FaultLeg
from ppd.servers.sim.core.handoffs import RemotePrefill, Transfer
from ppd.servers.sim.protocols.legs import leg_of_params
from ppd.servers.sim.protocols.nixl import read_transfer

WHOLE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 4]],
    "remote_engine_id": "p",
    "remote_request_id": "r1",
    "remote_host": "h",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_prefill_cached_tokens": 32,
}
REMOTE = RemotePrefill("p", "r1", "h", 5600, (3, 4), prefill_cached_tokens=32)


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in WHOLE.items() if key != name}


@pytest.mark.parametrize(
    ("params", "transfer"),
    [
        (None, Transfer()),
        ({}, Transfer()),
        ({"do_remote_decode": False, "do_remote_prefill": False}, Transfer()),
        ({"do_remote_decode": True}, Transfer(hands_over=True)),
        (WHOLE, Transfer(remote=REMOTE)),
        (WHOLE | {"remote_block_ids": []}, Transfer(trap=Trap.NO_REMOTE_BLOCKS)),
        (WHOLE | {"remote_block_ids": [[]]}, Transfer(trap=Trap.NO_REMOTE_BLOCKS)),
        (WHOLE | {"remote_block_ids": None}, Transfer(trap=Trap.NO_REMOTE_BLOCKS)),
        (without("remote_block_ids"), Transfer(trap=Trap.NO_REMOTE_BLOCKS)),
        *(
            (without(name), Transfer(trap=Trap.NO_REMOTE_ADDRESS))
            for name in ("remote_host", "remote_port", "remote_engine_id", "remote_request_id")
        ),
        (WHOLE | {"remote_host": None}, Transfer(trap=Trap.NO_REMOTE_ADDRESS)),
        (without("remote_block_ids") | {"remote_host": None}, Transfer(trap=Trap.NO_REMOTE_BLOCKS)),
    ],
)
def test_what_kv_transfer_params_amount_to(params: dict[str, Any] | None, transfer: Transfer) -> None:
    assert read_transfer(params) == transfer


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_remote_prefill", "yes"),
        ("do_remote_decode", True),  # both at once
        ("remote_block_ids", [3, 4]),
        ("remote_block_ids", [["3"]]),
        ("remote_engine_id", 7),
        ("remote_request_id", ["r1"]),
        ("remote_host", 7),
        ("remote_port", "5600"),
        ("remote_port", 0),
        ("tp_size", 2),
        ("transfer_mode", "push"),
        ("remote_num_tokens", -1),
        ("remote_prefill_cached_tokens", "32"),
        ("disaggregated", 1),
    ],
)
def test_what_no_engine_has_answered_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        read_transfer(WHOLE | {name: value})
    assert (refused.value.param or "").startswith(f"kv_transfer_params.{name}")


def test_without_tp_size_there_is_no_heartbeat() -> None:
    remote = read_transfer(without("tp_size")).remote
    assert remote is not None
    assert not remote.has_heartbeat


@pytest.mark.parametrize(
    ("params", "leg"),
    [
        ({"do_remote_decode": True}, FaultLeg.PREFILL),
        ({"do_remote_prefill": True, "do_remote_decode": False}, FaultLeg.DECODE),
        ({}, FaultLeg.PLAIN),
        (None, FaultLeg.PLAIN),
        (7, FaultLeg.PLAIN),
    ],
)
def test_a_leg_is_told_by_its_transfer_params(params: Any, leg: FaultLeg) -> None:
    assert leg_of_params({"kv_transfer_params": params}) is leg
