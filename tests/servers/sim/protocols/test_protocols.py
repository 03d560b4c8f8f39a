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
