"""How the doctor reads engines' answers, and what it finds out of a config without asking anybody."""

from __future__ import annotations

import socket
from pathlib import Path

import aiohttp
import pytest
import zmq.auth

from ppd.proxy.cli.doctor.gather import ProxyClient, Said, counts_of, facts_of_config, facts_of_proxy, seen
from ppd.proxy.cli.doctor.values import ConfigFact, EngineCounts, Facts, WorkerFact
from ppd.proxy.fleet.engine_metrics import EngineMetrics
from ppd.proxy.fleet.worker import Load, Role, Worker
from ppd.proxy.health.probe import EngineStatus
from ppd.servers.fleet.ports import free_ports

BY_SOURCE = {"local_compute": 5.0, "local_cache_hit": 4.0, "external_kv_transfer": 3.0}
OLD = {"vllm:prefix_cache_hits_total": 7.0, "vllm:external_prefix_cache_hits_total": 8.0}
NIXL = {"vllm:nixl_num_kv_expired_reqs_total": 2.0, "vllm:nixl_num_failed_transfers_total": 1.0}


@pytest.mark.parametrize(
    ("counters", "counts"),
    [
        (BY_SOURCE | OLD | NIXL, EngineCounts(5, 4, 3, 2, 1)),
        (OLD, EngineCounts(None, 7, 8, None, None)),
        ({"local_compute": float("nan")}, EngineCounts()),
        ({}, EngineCounts()),
    ],
)
def test_counters(counters: dict[str, float], counts: EngineCounts) -> None:
    assert counts_of(counters) == counts


D1 = WorkerFact(
    name="D1", worker=Worker(role=Role.DECODE, address="d:1", models=("m",), engine_version="1"), healthy=False
)


def test_an_engine_knows_best_what_it_is() -> None:
    metrics = EngineMetrics(Load(running=2), prefix_caching=False, counters=BY_SOURCE)
    fact = seen(D1, EngineStatus(True, ("n",), "2", metrics))
    assert (fact.worker.models, fact.worker.engine_version, fact.healthy) == (("n",), "2", True)
    assert (fact.prefix_caching, fact.load, fact.counts) == (False, Load(running=2), EngineCounts(5, 4, 3))


def test_what_an_engine_does_not_tell_stays_as_others_say_it() -> None:
    fact = seen(D1, EngineStatus(True))
    assert (fact.worker, fact.load, fact.counts) == (D1.worker, None, None)


@pytest.mark.parametrize(
    ("body", "value"), [(b'{"a": 1}', {"a": 1}), (b"[1]", {}), (b"not json", {}), (b"\xff", {}), (b"", {})]
)
def test_only_objects_are_read(body: bytes, value: object) -> None:
    assert Said(200, body).json() == value


async def of_config(tmp_path: Path, text: str) -> Facts:
    file = tmp_path / "ppd.toml"
    file.write_text(text)
    async with aiohttp.ClientSession() as session:
        return await facts_of_config(session, file, {})


async def valid(tmp_path: Path, text: str) -> ConfigFact:
    facts = await of_config(tmp_path, "port = 0\nheartbeat_port = 0\n" + text)
    assert facts.config is not None, facts.config_error
    return facts.config


async def test_an_invalid_config_is_a_fact(tmp_path: Path) -> None:
    facts = await of_config(tmp_path, "w_ttft = -1.0")
    assert facts.config is None
    assert "w_ttft = -1.0" in facts.config_error


async def test_all_that_serve_would_refuse_is_told(tmp_path: Path) -> None:
    """What has a finding of its own is told where the rest can be used."""
    facts = await of_config(
        tmp_path, 'w_ttft = -1.0\nworkers = ["X=a:1"]\nkeys_file = "absent"\nprofile = "absent"\ntable = "absent"'
    )
    for key in ("w_ttft = -1.0", "workers = 'X=a:1'", "absent: must be a readable key file", "profile = 'absent'"):
        assert key in facts.config_error
    assert "table" not in facts.config_error


async def test_a_port_in_use_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        facts = await of_config(tmp_path, f"port = {port}\nheartbeat_port = 0")
    assert facts.config is not None
    assert [(fact.key, fact.error) for fact in facts.config.ports] == [
        ("port", "Address already in use"),
        ("heartbeat_port", ""),
    ]


@pytest.mark.parametrize(
    ("text", "error", "has_cells"),
    [
        ("", "", True),
        ('table = "nowhere"', "table = 'nowhere'", False),
        ('table = "nowhere"\nmode = "always_split"', "table = 'nowhere'", False),
    ],
)
async def test_the_table_is_loaded_in_every_mode(tmp_path: Path, text: str, error: str, has_cells: bool) -> None:
    config = await valid(tmp_path, text)
    assert config.table_error.startswith(error) and bool(config.table_error) == bool(error)
    assert bool(config.table_cells) is has_cells


async def test_keys_of_agents_are_looked_for(tmp_path: Path) -> None:
    zmq.auth.create_certificates(tmp_path, "proxy")
    clients = tmp_path / "clients"

    async def error(key_file: str) -> str:
        text = f'curve_port = 1\ncurve_server_key_file = "{tmp_path / key_file}"\ncurve_clients_dir = "{clients}"'
        return (await valid(tmp_path, text)).curve_error

    assert "must be a ZeroMQ certificate" in await error("absent")
    assert "with its secret key" in await error("proxy.key")
    assert "must be a folder" in await error("proxy.key_secret")
    clients.mkdir()
    assert await error("proxy.key_secret") == ""


async def test_what_has_no_effect_is_kept(tmp_path: Path) -> None:
    (notice,) = (await valid(tmp_path, "picker_shadow = true")).notices
    assert "picker_shadow" in notice


async def test_nothing_of_a_key_is_kept(tmp_path: Path) -> None:
    facts = await of_config(tmp_path, 'port = 0\nheartbeat_port = 0\nadmin_key = "s3cret"\nworker_api_key = "s3cret"')
    assert "s3cret" not in repr(facts)


async def test_a_proxy_that_is_not_there_is_a_fact() -> None:
    (port,) = free_ports(1)
    async with aiohttp.ClientSession() as session:
        client = ProxyClient(session, f"http://user:s3cret@127.0.0.1:{port}", admin_key="", client_key="")
        facts = await facts_of_proxy(session, client)
    assert facts.proxy is not None
    assert facts.proxy.error
    assert facts.proxy.address == f"127.0.0.1:{port}"
    assert "s3cret" not in repr(facts)


class Engine(ProxyClient):
    """Answers `/health`, as nearly every server does, and nothing else."""

    async def operator(self, path: str) -> Said:
        return Said(200 if path == "/health" else 404)


async def test_an_engine_is_not_taken_for_a_proxy() -> None:
    async with aiohttp.ClientSession() as session:
        facts = await facts_of_proxy(session, Engine(session, "http://engine:1", admin_key="", client_key=""))
    assert facts.proxy is not None
    assert facts.proxy.error == "it has no /ready: an engine, or another server"
