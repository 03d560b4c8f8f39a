"""Settings: what a file and flags may say, and how a wrong one is named."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from ppd.proxy.config import Mode, ProxyConfig, build, convert, read_file, with_changes
from ppd.proxy.discovery.static_workers import parse_worker, static_workers
from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role


def write(path: Path, text: str) -> Path:
    file = path / "ppd.toml"
    file.write_text(text)
    return file


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert build(write(tmp_path, ""), {}) == ProxyConfig()


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    config = build(write(tmp_path, 'mode = "always_split"\nport = 9000\n'), {"port": 9001})
    assert (config.mode, config.port) == (Mode.ALWAYS_SPLIT, 9001)


def test_a_whole_number_may_stand_for_a_float(tmp_path: Path) -> None:
    assert build(write(tmp_path, "w_ttft = 3\n"), {}).w_ttft == 3.0


@pytest.mark.parametrize(
    ("text", "key", "shown"),
    [
        ("prot = 1", "prot", "no such key"),
        ('port = "x"', "port", "whole number"),
        ("port = 70000", "port", "0 to 65535"),
        ("port = true", "port", "whole number"),
        ('mode = "both"', "mode", "table, always_local, always_split, fraction, replica"),
        ('lookup = "both"', "lookup", "nearest, interpolated"),
        ("x = 1.5", "x", "share from 0 to 1"),
        ("w_ttft = -1", "w_ttft", "at least 0"),
        ("w_tpot = nan", "w_tpot", "at least 0"),
        ("w_tpot = inf", "w_tpot", "at least 0"),
        ("worker_ttl_s = 0", "worker_ttl_s", "above 0"),
        ("attempts = 0", "attempts", "above 0"),
        ("drain_delay_s = -1", "drain_delay_s", "at least 0"),
        ('cors_allow_origins = ["chat.example"]', "cors_allow_origins", "origins as browsers send them"),
        ('cors_allow_origins = ["https://chat.example/"]', "cors_allow_origins", "origins as browsers send them"),
        ('cors_allow_origins = ["https://Chat.example"]', "cors_allow_origins", "origins as browsers send them"),
        ('cors_allow_origins = ["https://chat.example:443"]', "cors_allow_origins", "origins as browsers send them"),
        ('cors_allow_origins = ["https://*.example"]', "cors_allow_origins", "origins as browsers send them"),
        ('cors_allow_origins = ["null"]', "cors_allow_origins", "origins as browsers send them"),
        ('cors_allow_origins = ["*", "https://chat.example"]', "cors_allow_origins", "alone"),
        ('workers = "P=a:1"', "workers", "list of strings"),
        ('workers = ["X=a:1"]', "workers", "ROLE=host:port"),
        ('workers = ["P=a"]', "workers", "ROLE=host:port"),
        ('workers = ["P=a:1,speed"]', "workers", "ROLE=host:port"),
        ('workers = ["P=a:1,connector=bogus"]', "workers", "nixl|p2p_nccl|none"),
        ('workers = ["P=a:1", "D=a:1"]', "workers", "named once"),
        ('workers = ["P=a:1,conector=none"]', "workers", ",connector="),
        ('workers = ["P=a..b:1"]', "workers", "ROLE=host:port"),
        ("w_ttft = 1" + "0" * 400, "w_ttft", "2^53"),
        ('heartbeat_allow = ["10.0.0.0/99"]', "heartbeat_allow", "10.0.0.0/8"),
        ("curve_port = 30002", "curve_port", "curve_clients_dir"),
        ('log_level = "loud"', "log_level", "debug, info"),
        ("port = ", "config", "TOML"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(tmp_path: Path, text: str, key: str, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        static_workers(build(write(tmp_path, text + "\n"), {}))
    assert caught.value.param == key
    assert key in str(caught.value)
    assert shown in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read_file(tmp_path / "none.toml")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "ppd.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="TOML"):
        read_file(tmp_path / "ppd.toml")


def test_an_error_never_shows_a_key() -> None:
    with pytest.raises(ConfigError) as caught:
        convert("admin_key", 12345)
    assert "12345" not in str(caught.value)


def test_every_setting_can_come_from_a_file_in_its_own_type() -> None:
    for field in fields(ProxyConfig):
        assert convert(field.name, field.default) == field.default


def test_a_static_worker_may_name_connector_model_and_coordinates() -> None:
    worker = parse_worker("P=[::1]:8100,connector=p2p_nccl,model=m,zmq_address=10.0.0.1:21001")
    assert (worker.role, worker.address, worker.connector, worker.models) == (
        Role.PREFILL,
        "[::1]:8100",
        "p2p_nccl",
        ("m",),
    )
    assert worker.coordinates == {"zmq_address": "10.0.0.1:21001"}


def test_a_changed_file_takes_live_keys_and_names_those_that_wait_for_a_restart(tmp_path: Path) -> None:
    before = build(write(tmp_path, ""), {"x": 0.25})
    wanted = build(write(tmp_path, "w_tpot = 3\nport = 9000\nx = 0.75\n"), {"x": 0.25})
    config, waiting = with_changes(before, before, wanted)
    assert (config.w_tpot, config.port, config.x) == (3.0, 10001, 0.25)
    assert waiting == ("port",)


def test_what_the_admin_api_set_stands_until_the_file_says_otherwise(tmp_path: Path) -> None:
    before = build(write(tmp_path, "w_tpot = 1\n"), {})
    running = replace(before, w_tpot=6.0)
    other_key = build(write(tmp_path, "w_tpot = 1\nw_ttft = 2\n"), {})
    assert with_changes(running, before, other_key)[0].w_tpot == 6.0
    assert with_changes(running, other_key, build(write(tmp_path, "w_tpot = 2\nw_ttft = 2\n"), {}))[0].w_tpot == 2.0


@pytest.mark.parametrize("origin", ["*", "https://chat.example", "http://localhost:3000", "http://[::1]:8", "app://x"])
def test_an_origin_is_taken_as_browsers_send_it(origin: str) -> None:
    assert ProxyConfig(cors_allow_origins=(origin,)).cors_allow_origins == (origin,)
