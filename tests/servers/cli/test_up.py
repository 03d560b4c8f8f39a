"""The fleet that `ppd up` is asked for, by name or by counts."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from ppd.offline.sweep import grid_file
from ppd.proxy.config import ProxyConfig
from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role
from ppd.servers.cli.up import (
    command,
    fleet_options,
    fleet_spec,
    own_log_folder,
    programs,
    with_gateway,
    with_topology,
)
from ppd.servers.fleet.fleet import FleetSpec, plan
from ppd.servers.fleet.gateway import EnvoyGateway
from ppd.servers.fleet.ports import free_offset, free_ports
from ppd.servers.fleet.prepare import Prepared
from ppd.servers.fleet.topology import Topology


def asked(*args: str) -> Topology:
    found: list[Topology] = []

    @click.command()
    @fleet_options
    def asks(**flags: Any) -> None:
        found.append(with_topology(flags)["topology"])

    CliRunner().invoke(asks, list(args), catch_exceptions=False, standalone_mode=False)
    return found[0]


def test_counts_are_the_default() -> None:
    assert asked().workers == 4
    assert asked("-P", "2", "-R", "0") == Topology("", 2, 2, 0)
    assert asked("-E", "1") == Topology("", 1, 2, 1, encoders=1)


def test_each_of_the_papers_topologies_can_be_named() -> None:
    names = [arms.topology for arms in grid_file.read("paper").arms]
    papers = {*names, *(name.replace("D", "pD") for name in names if Topology.parse(name).has_choice)}
    assert len(papers) == 17
    assert {asked("--topology", name) for name in papers} == {Topology.parse(name) for name in papers}


@pytest.mark.parametrize("flag", ["-P", "--decode", "-R", "-E"])
def test_a_name_and_counts_together_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="--topology 1P_1D counts the workers already"):
        asked("--topology", "1P_1D", flag, "1")


@pytest.mark.parametrize(
    ("topology", "mode", "is_refused"),
    [("1P_1D_2pD", "slo", True), ("1P_3D", "slo", False), ("1P_3pD", "fraction", False), ("1P_3pD", "", False)],
)
def test_a_share_of_its_own_that_the_configs_mode_knows_nothing_of_is_refused(
    topology: str, mode: str, is_refused: bool, tmp_path: Path
) -> None:
    """Else the fleet would silently run in another mode than its config says."""
    file = tmp_path / "ppd.toml"
    file.write_text(f'mode = "{mode}"\nprofile = "h100-llama-3.1-8b"\n' if mode else "")
    flags = ("--topology", topology, "--config", str(file), "--port", "1", "--connector", "none", "--readback")
    found = CliRunner().invoke(command, flags)  # readback needs a connector: so nothing is started
    assert found.exit_code == 1
    assert ("mode = 'slo': with a pD the mode is fraction" in found.output) is is_refused


@pytest.mark.parametrize("encoders", ["0", "1"])
def test_a_fleet_in_which_nobody_answers_is_refused(encoders: str) -> None:
    with pytest.raises(ConfigError, match="a fleet needs a worker that answers: give at least one D or R"):
        asked("-P", "0", "-D", "0", "-R", "0", "-E", encoders)


def test_a_gateway_needs_the_two_ports_behind_its_own() -> None:
    prepared = Prepared(model="", name="sim")
    spec = FleetSpec(engine="sim", workers={}, prepared=prepared, port=65534, log_dir=Path())
    with pytest.raises(ConfigError, match="port = 65534: must be at most 65533"):
        with_gateway(spec, ProxyConfig())


def test_vllm_is_launched_with_its_own_connectors() -> None:
    with pytest.raises(ConfigError, match="must be nixl, nixl_push, mooncake or none with --engine vllm"):
        fleet_spec(Console(), "vllm", "", Topology.parse("1P_1D"), (), connector="sglang")
    with pytest.raises(ConfigError, match="readback: needs connector nixl, not mooncake"):
        fleet_spec(Console(), "sim", "", Topology.parse("1P_1D"), (), connector="mooncake", readback=True)


PREPARED = Prepared(model="", name="sim")


def test_programs_are_called_as_the_proxy_calls_their_workers() -> None:
    """It numbers workers as they come, which need not be the order in which they were started."""
    spec = FleetSpec(engine="sim", workers={Role.PREFILL: 1, Role.DECODE: 2}, prepared=PREPARED)
    names = {"127.0.0.1:8100": "P1", "127.0.0.1:8201": "D1", "127.0.0.1:8200": "D2"}
    assert [line.split() for line in programs(plan(spec), names)] == [
        ["program", "address", "log"],
        ["proxy", "127.0.0.1:10001", "ppd-logs/proxy.log"],
        ["P1", "127.0.0.1:8100", "ppd-logs/P-8100-engine.log"],
        ["D2", "127.0.0.1:8200", "ppd-logs/D-8200-engine.log"],
        ["D1", "127.0.0.1:8201", "ppd-logs/D-8201-engine.log"],
    ]


def test_a_sidecar_is_called_as_its_worker() -> None:
    gateway = EnvoyGateway(program="envoy", config=ProxyConfig())
    spec = FleetSpec(engine="sim", workers={Role.DECODE: 2}, prepared=PREPARED, gateway=gateway)
    names = {"127.0.0.1:8501": "D1", "127.0.0.1:8500": "D2"}
    assert [line.split()[:2] for line in programs(plan(spec), names)[3:]] == [
        ["D2", "127.0.0.1:8200"],
        ["D2-sidecar", "127.0.0.1:8500"],
        ["D1", "127.0.0.1:8201"],
        ["D1-sidecar", "127.0.0.1:8501"],
    ]


def test_a_folder_in_which_another_fleet_logs_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    port, heartbeats = free_ports(2)
    with own_log_folder(folder), free_offset({Role.REPLICA: 1}) as offset:
        (folder / "proxy.log").write_text("of the first")
        flags = ("--port", str(port), "--heartbeat-port", str(heartbeats), "--port-offset", str(offset))
        found = CliRunner().invoke(command, ("-P", "0", "-D", "0", *flags, "--log-dir", str(folder)))
    assert found.exit_code == 1
    assert f"log_dir = {str(folder)!r}: another fleet logs there; --log-dir takes another folder" in found.output
    assert (folder / "proxy.log").read_text() == "of the first"
    with own_log_folder(folder):  # it has ended
        pass


def test_a_refused_fleet_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of vLLM with encoders, whose cache is in a folder; on a machine that seems to have all that it needs."""
    programs, temporary, logs = (tmp_path / name for name in ("programs", "temporary", "logs"))
    for folder in (programs, temporary):
        folder.mkdir()
    for name, does in (("nvidia-smi", "echo GPU 0: one"), ("python3", "true")):
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    port, heartbeats = free_ports(2)
    with own_log_folder(logs), free_offset({Role.REPLICA: 1, Role.ENCODE: 1}) as offset:
        flags = ("--port", str(port), "--heartbeat-port", str(heartbeats), "--port-offset", str(offset))
        fleet = ("-P", "0", "-D", "0", "-E", "1", "--engine", "vllm", "--model", "m")
        found = CliRunner().invoke(command, (*fleet, *flags, "--log-dir", str(logs)))
    assert "another fleet logs there" in found.output
    assert list(temporary.iterdir()) == []


def test_logs_need_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"log_dir = .*must be a folder"), own_log_folder(tmp_path / "file"):
        pass
