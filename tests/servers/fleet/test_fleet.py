"""Which programs a fleet is made of."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.proxy.fleet.worker import Role
from ppd.servers.fleet.fleet import FleetSpec, plan, share_of_gpus
from ppd.servers.fleet.prepare import Prepared

WORKERS = {Role.PREFILL: 1, Role.DECODE: 2, Role.REPLICA: 1}
SIM = Prepared(model="", name="sim")
GPU = Prepared(model="m", name="m", device="cuda", python="/opt/python", gpu_count=4)


def spec(**changes: Any) -> FleetSpec:
    return FleetSpec(**{"engine": "sim", "workers": WORKERS, "prepared": SIM, **changes})


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_a_fleet_is_the_proxy_and_its_workers_each_on_its_own_port() -> None:
    members = plan(spec())
    assert [member.name for member in members] == ["proxy", "P1", "D1", "D2", "R1"]
    assert [member.address.rpartition(":")[2] for member in members] == ["10001", "8100", "8200", "8201", "8300"]
    channels = [flag(member.launch.argv, "--side-channel-port") for member in members[1:]]
    assert len(set(channels)) == 4


def test_every_agent_tells_the_fleets_own_proxy() -> None:
    for member in plan(spec(heartbeat_port=4000, port_offset=100))[1:]:
        assert flag(member.launch.argv, "--proxy") == "127.0.0.1:4000"
    assert flag(plan(spec(port_offset=100))[1].launch.argv, "--port") == "8200"


def test_a_d_with_a_share_of_its_own_is_told_it_and_the_proxy_goes_by_it() -> None:
    proxy, p1, d1, d2, r1 = plan(spec(x_of_decodes=(0.0, 1.0)))
    assert flag(proxy.launch.argv, "--mode") == "fraction"
    assert [flag(member.launch.argv, "--x") for member in (d1, d2)] == ["0", "1"]
    assert not any("--x" in member.launch.argv for member in (p1, r1))
    for unset in ((), (None, None)):
        assert not any({"--x", "--mode"} & set(member.launch.argv) for member in plan(spec(x_of_decodes=unset)))


def test_the_admin_key_is_not_on_a_command_line() -> None:
    proxy = plan(spec(admin_key="secret"))[0]
    assert "secret" not in proxy.launch.argv
    assert proxy.launch.env["PPD_ADMIN_KEY"] == "secret"


@pytest.mark.parametrize(
    ("gpus", "tensor_parallel", "given", "share"),
    [
        (4, 1, [(0,), (1,), (2,), (3,)], 1.0),
        (8, 2, [(0, 1), (2, 3), (4, 5), (6, 7)], 1.0),
        (2, 1, [(0,), (1,), (0,), (1,)], 0.45),
        (1, 1, [(0,), (0,), (0,), (0,)], 0.225),
    ],
)
def test_gpus_are_given_out_in_order_and_shared_where_they_are_few(
    gpus: int, tensor_parallel: int, given: list[tuple[int, ...]], share: float
) -> None:
    prepared = Prepared(model="m", name="m", device="cuda", gpu_count=gpus)
    fleet = spec(engine="vllm", prepared=prepared, tensor_parallel=tensor_parallel)
    assert [share_of_gpus(fleet, n) for n in range(4)] == [(each, share) for each in given]


def test_engine_arguments_reach_every_engine_behind_the_fleets_own() -> None:
    prepared = Prepared(model="m", name="m", device="cuda", python="py", gpu_count=1, engine_args=("--x", "1"))
    for member in plan(spec(engine="vllm", prepared=prepared))[1:]:
        own, _, passed = " ".join(member.launch.argv).partition(" -- ")
        assert "--python py" in own and "--gpus 0" in own
        assert passed.endswith("--x 1") and "--gpu-memory-utilization" in passed
