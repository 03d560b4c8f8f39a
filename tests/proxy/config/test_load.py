"""Settings: what a file and flags may say, and how a wrong one is named."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ppd.proxy.config import Draft, Mode, ProxyConfig, build, convert, with_changes
from ppd.proxy.discovery.static_workers import parse_worker, static_workers
from ppd.proxy.errors import ConfigError, ConfigErrors
from ppd.proxy.fleet.worker import UNHEARD, EventSource, Role


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
        ('mode = "both"', "mode", "table, always_local, session_hash, free_kv, always_split, fraction, replica"),
        ('lookup = "both"', "lookup", "nearest, interpolated"),
        ("x = 1.5", "x", "a number from 0 to 1"),
        ("w_ttft = -1", "w_ttft", "at least 0"),
        ("w_ttft = 0\nw_tpot = 0", "w_ttft", "above 0 where w_tpot is 0"),
        ("w_tpot = nan", "w_tpot", "at least 0"),
        ("w_tpot = inf", "w_tpot", "at least 0"),
        ("worker_ttl_s = 0", "worker_ttl_s", "above 0"),
        ("slo_ttft_s = 0", "slo_ttft_s", "a number above 0, at most 3600"),
        ("slo_tpot_s = nan", "slo_tpot_s", "above 0, at most 60"),
        ("slo_ttft_factor = 1001", "slo_ttft_factor", "above 0, at most 1000"),
        ("attempts = 0", "attempts", "at least 1"),
        ("attempts = 1e3", "attempts", "whole number"),
        ('attempts = "3"', "attempts", "whole number"),
        ("x = true", "x", "a number from 0 to 1"),
        ("processes = 65", "processes", "from 1 to 64"),
        ("queue_timeout_s = 1e300", "queue_timeout_s", "2^53"),
        ('host = "a\\nb"', "host", "control character"),
        ('host = "' + "a" * 5000 + '"', "host", "at most 4096 characters"),
        ("workers = [" + '"P=a:1",' * 10_001 + "]", "workers", "at most 10000"),
        ('open_paths = ["/admin"]', "open_paths", "any of /health"),
        ('tls_cert_file = "a.pem"', "tls_cert_file", "set with tls_key_file"),
        ('worker_key_file = "a.pem"', "worker_cert_file", "set with worker_key_file"),
        ('tls_client_ca_file = "a.pem"', "tls_client_ca_file", "set with tls_cert_file"),
        ('workers = "P=a:1"', "workers", "list of strings"),
        ('workers = ["X=a:1"]', "workers", "ROLE=host:port"),
        ('workers = ["P=a"]', "workers", "ROLE=host:port"),
        ('workers = ["P=a:1,speed"]', "workers", "ROLE=host:port"),
        ('workers = ["P=a:1,connector=bogus"]', "workers", "nixl|nixl_push|mooncake|p2p_nccl|moriio|moriio_read|"),
        ('workers = ["P=a:1", "D=a:1"]', "workers", "named once"),
        ('workers = ["D=a:1", "D=A:1"]', "workers", "'a:1': must be named once"),
        ('workers = ["P=a:1,conector=none"]', "workers", ",connector="),
        ('workers = ["R=a:1,model=m,model=n"]', "workers", ",model=NAME"),
        ('workers = ["P=a..b:1"]', "workers", "ROLE=host:port"),
        ('workers = ["P=a:1,zmq_address=b:1 c"]', "workers", "zmq_address=host:port"),
        ("w_ttft = 1" + "0" * 400, "w_ttft", "2^53"),
        ('share_prefixes = ["acme"]', "share_prefixes", "keys_file"),
        ("drain_delay_s = -1", "drain_delay_s", "at least 0"),
        ('cors_allow_origins = ["chat.example"]', "cors_allow_origins", "origins as browsers send them"),
        ('cors_allow_origins = ["https://chat.example/"]', "cors_allow_origins", "origins as browsers send them"),
        ('cors_allow_origins = ["https://Chat.example"]', "cors_allow_origins", "origins as browsers send them"),
        ('cors_allow_origins = ["https://chat.example:443"]', "cors_allow_origins", "origins as browsers send them"),
        ('cors_allow_origins = ["https://*.example"]', "cors_allow_origins", "origins as browsers send them"),
        ('cors_allow_origins = ["http://chat.example:65536"]', "cors_allow_origins", "origins as browsers send them"),
        ('cors_allow_origins = ["null"]', "cors_allow_origins", "origins as browsers send them"),
        ('cors_allow_origins = ["*", "https://chat.example"]', "cors_allow_origins", "alone"),
        ('heartbeat_allow = ["10.0.0.0/99"]', "heartbeat_allow", "10.0.0.0/8"),
        ('host = ""', "host", "0.0.0.0"),
        ('picker_host = ""', "picker_host", "0.0.0.0"),
        ("curve_port = 30002", "curve_port", "curve_clients_dir"),
        ('heartbeat_open = "yes"', "heartbeat_open", "true or false"),
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
    assert len(str(caught.value)) < 2000


def test_what_may_follow_an_address_is_told_only_where_the_address_is_right(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^workers = 'X=a:1': must be ROLE=host:port with ROLE P, D, R or E$"):
        static_workers(build(write(tmp_path, 'workers = ["X=a:1"]'), {}))


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    """In the file and in flags; a rule between keys only where each of them has a value that it may have."""
    file = write(
        tmp_path,
        """
        prot = 1
        mode = "both"
        worker_api_key = 12345
        tls_cert_file = 5
        tls_key_file = "key.pem"
        worker_cert_file = "cert.pem"
        """,
    )
    with pytest.raises(ConfigError) as caught:
        build(file, {"x": "2", "port": "nine", "curve_port": "30002"})
    assert isinstance(caught.value, ConfigErrors)
    assert [error.param for error in caught.value.errors] == [
        *("prot", "mode", "worker_api_key", "tls_cert_file"),  # of the file
        *("x", "port", "curve_port", "worker_cert_file"),
    ]
    assert "did you mean port?" in str(caught.value)
    assert "12345" not in str(caught.value)


def test_a_draft_has_the_default_where_a_value_is_refused(tmp_path: Path) -> None:
    draft = Draft.read(write(tmp_path, 'port = 70000\nw_ttft = 2\ntls_key_file = "a"\n'), {})
    assert (draft.config.port, draft.config.w_ttft, draft.config.tls_key_file) == (10001, 2.0, "")
    assert [error.param for error in draft.errors] == ["port", "tls_cert_file"]


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [("7", "port", 7), ("7", "w_ttft", 7.0), ("replica", "mode", Mode.REPLICA), ("7", "host", "7")],
)
def test_a_flag_is_the_text_of_its_value(text: str, name: str, value: object) -> None:
    assert getattr(build(None, {name: text}), name) == value


@pytest.mark.parametrize(
    ("name", "items", "shown"),
    [
        ("heartbeat_allow", ["10.0.0.0/8", "10.0.0.0/99"], "heartbeat_allow = '10.0.0.0/99'"),
        ("kv_events_allow", ["10.0.0.0/99"], "kv_events_allow = '10.0.0.0/99'"),
        ("open_paths", ["/health", "/admin"], "open_paths = '/admin'"),
        ("workers", ["P=a:1"] * 100 + [5], "workers = 5"),
    ],
)
def test_of_a_list_the_wrong_item_is_shown(name: str, items: list[object], shown: str) -> None:
    with pytest.raises(ConfigError, match=shown):
        build(None, {name: items})


@pytest.mark.parametrize(("option", "x"), [("", None), (",x=0", 0.0), (",x=0.25", 0.25), (",x=1", 1.0)])
def test_a_static_worker_may_have_a_share_of_its_own(option: str, x: float | None) -> None:
    assert parse_worker(f"D=a:1{option}").x == x


@pytest.mark.parametrize("wrong", ["ranks=0", "ranks=99999999999999999999", "events=tcp://-a:1", "events=none,ranks=0"])
def test_a_static_worker_without_events_has_no_ranks_that_cannot_be(wrong: str) -> None:
    """Processes could not tell each other of a worker with more ranks than a number can have."""
    assert parse_worker("D=a:1,events=none").kv_events == UNHEARD
    with pytest.raises(ConfigError, match="ranks=N"):
        parse_worker(f"D=a:1,{wrong}")


def test_a_static_worker_may_have_labels() -> None:
    labels = parse_worker("D=a:1,label.role=decode,label.llm-d.ai/role=both,tls=true").labels
    assert labels == {"role": "decode", "llm-d.ai/role": "both"}
    for wrong in (",label.=x", ",label.role=a b", ",label.role=-"):
        with pytest.raises(ConfigError, match=r"label\.NAME=VALUE"):
            parse_worker(f"D=a:1{wrong}")


def test_a_d_or_r_may_have_a_sidecar_before_it() -> None:
    taken = ("D=a:1,sidecar=true", "R=a:1,sidecar=true", "D=a:1,connector=trtllm,engine=trtllm,sidecar=true")
    assert [parse_worker(text).has_sidecar for text in ("D=a:1", "P=a:1,sidecar=false", *taken)] == [
        *(False, False, True, True, True)
    ]
    for wrong in (
        "P=a:1,sidecar=true",
        "E=a:1,sidecar=true",
        "D=a:1,sidecar=b:1",
        "D=a:1,connector=mooncake,sidecar=true",
    ):
        with pytest.raises(ConfigError, match=r"sidecar=true\" of a D or R"):
            parse_worker(wrong)


def test_a_static_worker_may_have_a_profile_of_its_own() -> None:
    assert [parse_worker(f"D=a:1{option}").profile for option in ("", ",profile=my.json")] == ["", "my.json"]


@pytest.mark.parametrize("option", ["x=", "x=1.1", "x=-0.1", "x=nan", "x=inf", "x=half"])
def test_a_static_workers_share_that_is_none_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match='x=SHARE" of a D'):
        parse_worker(f"D=a:1,{option}")


@pytest.mark.parametrize("role", ["P", "R", "E"])
def test_a_share_is_that_of_a_d(role: str) -> None:
    with pytest.raises(ConfigError, match='x=SHARE" of a D'):
        parse_worker(f"{role}=a:1,x=0.5")


def test_all_wrong_workers_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        static_workers(build(None, {"workers": ("X=a:1", "P=a:1", "D=a:1", "R=b")}))
    assert [text in str(caught.value) for text in ("'X=a:1'", "'a:1': must be named once", "'R=b'")] == [True] * 3


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]", "0.0.0.0", "*", "10.0.0.1", "gpu-1.lan"]
)
@pytest.mark.parametrize(
    ("guard", "guards"),
    [
        ({}, False),
        ({"heartbeat_allow": ("10.0.0.0/8",)}, True),
        ({"curve_port": 1, "curve_server_key_file": "k", "curve_clients_dir": "c"}, True),
        ({"heartbeat_open": True}, True),
        ({"heartbeat_port": 0}, True),
    ],
)
def test_a_heartbeat_port_that_strangers_reach_must_be_meant(host: str, guard: dict[str, Any], guards: bool) -> None:
    if guards or host in ("127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"):
        assert ProxyConfig(heartbeat_host=host, **guard).heartbeat_host == host
        return
    with pytest.raises(ConfigError) as caught:
        ProxyConfig(heartbeat_host=host, **guard)
    assert caught.value.param == "heartbeat_host"
    for way in (repr(host), "loopback", "heartbeat_allow", "curve_port", "heartbeat_open = true"):
        assert way in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        build(tmp_path / "none.toml", {})


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "ppd.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="TOML"):
        build(tmp_path / "ppd.toml", {})


def test_an_error_never_shows_a_key() -> None:
    with pytest.raises(ConfigError) as caught:
        convert({"admin_key": 12345})
    assert "12345" not in str(caught.value)


@pytest.mark.parametrize("name", ["admin_key", "worker_api_key"])
@pytest.mark.parametrize("key", ["ключ", "key ", " key"])
def test_a_key_that_no_header_holds_as_it_is_written_is_refused(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=r"must be printable ASCII without spaces around it") as caught:
        ProxyConfig(**{name: key})  # type: ignore[arg-type]
    assert caught.value.message.startswith(f"{name} = (hidden): ")


def test_a_number_with_too_many_digits_to_be_shown_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^port = a number that is too long: must be"):
        convert({"port": 1 << 50_000})


def test_every_setting_can_come_from_a_file_in_its_own_type() -> None:
    defaults = {field.name: field.default for field in fields(ProxyConfig)}
    assert convert(defaults) == defaults


def test_a_static_worker_may_name_connector_model_and_coordinates() -> None:
    worker = parse_worker("P=[::1]:8100,connector=p2p_nccl,model=m,zmq_address=10.0.0.1:21001")
    assert (worker.role, worker.address, worker.connector, worker.models) == (
        Role.PREFILL,
        "[::1]:8100",
        "p2p_nccl",
        ("m",),
    )
    assert worker.coordinates == {"zmq_address": "10.0.0.1:21001"}
    told = parse_worker("D=a:1,bidirectional_kv_xfer=true,decoder_kv_blocks_ttl=60")
    assert (told.connector, told.coordinates["decoder_kv_blocks_ttl"]) == ("nixl", "60")
    for wrong in ("bidirectional_kv_xfer=false", "decoder_kv_blocks_ttl=0"):
        with pytest.raises(ConfigError, match="decoder_kv_blocks_ttl=a number from 1 to 9999"):
            parse_worker(f"D=a:1,{wrong}")


@pytest.mark.parametrize("model", ["m" * 257, "a\nb", "a\x00", "\x1b[2J"])
def test_a_model_that_no_request_could_name_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="model=NAME"):
        parse_worker(f"D=a:1,model={model}")


@pytest.mark.parametrize(
    ("text", "engine", "connector"),
    [
        ("P=a:1", "vllm", "nixl"),
        ("P=a:1,connector=sglang,bootstrap_port=9001", "sglang", "sglang"),
        ("D=a:1,engine=sglang", "sglang", "sglang"),
        ("R=a:1,engine=sglang", "sglang", "none"),
        ("R=a:1", "vllm", "none"),
    ],
)
def test_engine_and_connector_follow_from_each_other(text: str, engine: str, connector: str) -> None:
    worker = parse_worker(text)
    assert (worker.engine, worker.connector) == (engine, connector)


@pytest.mark.parametrize(
    "options", ["engine=vlm", "bootstrap_port=9001", "engine=sglang,bootstrap_port=0", "engine=sglang,zmq_address=a:1"]
)
def test_what_the_engine_or_its_connector_does_not_know_is_refused(options: str) -> None:
    with pytest.raises(ConfigError, match="bootstrap_port=a port"):
        parse_worker(f"P=a:1,{options}")


def test_a_static_worker_may_say_where_it_publishes_kv_events() -> None:
    worker = parse_worker("D=10.0.0.6:8200,events=tcp://10.0.0.7:5557,replay=tcp://10.0.0.7:5600,ranks=2")
    assert worker.kv_events == EventSource("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5600", 2)
    assert worker.kv_events.of_rank(1) == EventSource("tcp://10.0.0.7:5558", "tcp://10.0.0.7:5601")
    assert parse_worker("D=10.0.0.6:8200,events=none").kv_events == UNHEARD


@pytest.mark.parametrize(
    "option", ["events=10.0.0.6:5557", "events=ipc:///tmp/x", "replay=inproc://x", "ranks=two", "replay=none"]
)
def test_kv_events_are_published_over_tcp(option: str) -> None:
    with pytest.raises(ConfigError, match=r"^workers = .*,events=tcp://host:port"):
        parse_worker(f"D=10.0.0.6:8200,{option}")


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_events_bind": "ipc:///tmp/x"},
        {"kv_events_bind": "tcp://*:65536"},
        {"kv_events_bind": "tcp://*:1", "processes": 2},
    ],
)
def test_engines_connect_over_tcp_to_the_only_process(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^kv_events_bind = .*: must be empty"):
        ProxyConfig(**changes)


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
    assert build(None, {"cors_allow_origins": (origin,)}).cors_allow_origins == (origin,)
