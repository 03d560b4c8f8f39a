"""What holds for every protocol."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.proxy.fleet.worker import Role
from ppd.servers.sim.core.config import CONNECTORS
from ppd.servers.sim.core.errors import BadRequest
from ppd.servers.sim.core.handoffs import Transfer
from ppd.servers.sim.protocols import PROTOCOLS
from ppd.servers.sim.protocols.legs import Leg, Own

CHAT = "/v1/chat/completions"
OWN = {role: Own(role, "e", "10.0.0.5", 8998) for role in Role}


def read(name: str, role: Role, members: dict[str, Any], *, path: str = CHAT, sequences: int = 1) -> Any:
    return PROTOCOLS[name].read(Leg(path, members, {"X-Request-Id": "r"}, sequences), OWN[role])


def test_each_has_its_place_in_the_config() -> None:
    assert tuple(PROTOCOLS) == CONNECTORS


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_replicas_plain_request_takes_part_in_no_transfer(name: str) -> None:
    assert read(name, Role.REPLICA, {"model": "m"}, sequences=2) == (Transfer(), Transfer())


@pytest.mark.parametrize("name", [name for name in PROTOCOLS if PROTOCOLS[name].engine == "vllm"])
@pytest.mark.parametrize("params", ["p", [1], 7])
def test_kv_transfer_params_are_an_object(name: str, params: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        read(name, Role.DECODE, {"kv_transfer_params": params})
    assert refused.value.param == "kv_transfer_params"


NAMED = f"___prefill_addr_{{}}___decode_addr_{{}}_{'0a' * 16}"
MORIIO = "host:{},handshake:{},notify:{}"
TO_D = {"transfer_id": "t", "remote_dp_size": 1, "remote_tp_size": 1, "remote_dp_rank": 0, "do_remote_prefill": True}


@pytest.mark.parametrize(
    ("port", "is_one"), [("0", False), ("1", True), ("65535", True), ("65536", False), ("99999", False)]
)
@pytest.mark.parametrize("of", ["p2p_nccl", "moriio handshake", "moriio notify"])
def test_the_ports_in_a_name_are_ports(of: str, port: str, is_one: bool) -> None:
    connector, _, which = of.partition(" ")
    if connector == "p2p_nccl":
        name, params = NAMED.format(f"10.0.0.6:{port}", "10.0.0.5:8998"), {}
    else:
        ports = (port, "7") if which == "handshake" else ("7", port)
        name = NAMED.format(MORIIO.format("10.0.0.6", *ports), MORIIO.format("10.0.0.5", 8998, 8998))
        params = {"kv_transfer_params": TO_D}
    leg = Leg(CHAT, params, {"X-Request-Id": name}, 1)
    if is_one:
        assert len(PROTOCOLS[connector].read(leg, OWN[Role.DECODE])) == 1
    else:
        with pytest.raises(BadRequest, match=f"with ports from 1 to 65535, got .*{port}") as refused:
            PROTOCOLS[connector].read(leg, OWN[Role.DECODE])
        assert refused.value.param == "X-Request-Id"
