"""`ppd agent`'s options: the engine that it launches or attaches, and how proxies reach it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ppd.proxy.errors import ConfigError, FormatError, PPDError
from ppd.proxy.fleet.worker import EventSource, Role
from ppd.servers.cli.agent import AgentOptions, address_of, command, curve_keys, identity_of, launch_of


def options(**changes: Any) -> AgentOptions:
    defaults: dict[str, Any] = {
        "role": Role.DECODE,
        "proxies": ("127.0.0.1:30001",),
        "attach": "",
        "engine": "sim",
        "model": "",
        "host": "127.0.0.1",
        "port": 8200,
        "side_channel_host": "",
        "side_channel_port": 5600,
        "kv_events_port": 0,
        "kv_replay_port": 0,
        "device": "cuda",
        "gpus": "",
        "tensor_parallel": 1,
        "python": "py",
        "advertise": "",
        "connector": "nixl",
        "coordinates": (),
        "x": None,
        "profile": "",
        "labels": (),
        "sidecar": False,
        "interval": 10.0,
        "drain_timeout": 60.0,
        "api_key": "",
        "curve_key": None,
        "curve_server_key": None,
        "log_path": Path("x.log"),
        "encoder_cache": "",
        "engine_args": (),
        "launch_id": "0f1e2d3c4b5a",
    }
    return AgentOptions(**(defaults | changes))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"engine": "sim", "model": "m", "engine_args": ("--seed", "3")}, "--role D --host 127.0.0.1 --port 8200"),
        ({"engine": "sim", "connector": "none", "engine_args": ("--seed", "3")}, "--connector none --seed 3"),
        ({"engine": "vllm", "model": "m", "gpus": "0,1", "tensor_parallel": 2}, "--tensor-parallel-size 2"),
        ({"engine": "vllm", "model": "m", "role": Role.REPLICA}, "--kv-transfer-config"),
        ({"engine": "vllm", "model": "m", "role": Role.ENCODE, "encoder_cache": "/c"}, '"ec_role": "ec_producer"'),
        ({"engine": "vllm", "model": "m", "role": Role.PREFILL, "encoder_cache": "/c"}, '"ec_role": "ec_consumer"'),
    ],
)
def test_the_launched_engine_is_the_one_asked_for(changes: dict[str, Any], wanted: str) -> None:
    assert wanted in " ".join(launch_of(options(**changes)).argv)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"engine": "vllm"}, "model"),
        ({"engine": "vllm", "model": "m", "gpus": "a"}, "gpus"),
        ({"engine": "vllm", "model": "m", "role": Role.ENCODE}, "encoder_cache = ''"),
        ({"engine": "sglang"}, "--attach"),
        ({"engine": "trtllm"}, "--attach"),
    ],
)
def test_what_cannot_be_launched_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        launch_of(options(**changes))


def test_an_identity_may_advertise_another_address_and_coordinates() -> None:
    made = identity_of(
        options(advertise="10.0.0.9:80", coordinates=("zmq_address=10.0.0.9:21001",), connector="p2p_nccl"),
        "127.0.0.1:1",
    )
    assert (made.address, made.coordinates) == ("10.0.0.9:80", {"zmq_address": "10.0.0.9:21001"})
    assert identity_of(options(profile="h100"), "127.0.0.1:1").profile == "h100"
    given = options(labels=("role=decode", "llm-d.ai/role=both"))
    assert identity_of(given, "127.0.0.1:1").labels == {"role": "decode", "llm-d.ai/role": "both"}
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        identity_of(options(coordinates=("zmq_address",)), "127.0.0.1:1")


@pytest.mark.parametrize("role", [Role.PREFILL, Role.REPLICA, Role.ENCODE])
def test_only_a_d_has_a_share_of_its_own(role: Role) -> None:
    assert identity_of(options(x=0.5), "127.0.0.1:1").x == 0.5
    with pytest.raises(FormatError, match="x: must be a share from 0 to 1, and of a D"):
        identity_of(options(x=0.5, role=role), "127.0.0.1:1")


def test_an_identity_may_be_that_of_a_sidecar() -> None:
    at = "10.0.0.9:8000"
    made = [identity_of(options(sidecar=one, advertise=at), "127.0.0.1:1") for one in (False, True)]
    assert [(one.address, one.has_sidecar) for one in made] == [(at, False), (at, True)]
    with pytest.raises(ConfigError, match="sidecar: must be given with --advertise"):
        identity_of(options(sidecar=True), "127.0.0.1:1")
    with pytest.raises(FormatError, match="sidecar: must be of a D or R"):
        identity_of(options(sidecar=True, advertise=at, role=Role.PREFILL), "127.0.0.1:1")


@pytest.mark.parametrize(
    ("connector", "coordinates"),
    [
        ("nixl", {}),
        ("sglang", {"bootstrap_host": "127.0.0.1", "bootstrap_port": "5600"}),
        ("mooncake", {"bootstrap_host": "127.0.0.1", "bootstrap_port": "5600"}),
        ("trtllm", {}),
        ("trtllm_gen_first", {}),
        ("offload_p2p", {"p2p_host": "127.0.0.1", "p2p_port": "5600"}),
        (
            "moriio",
            {
                "side_channel_host": "127.0.0.1",
                "handshake_port": "5600",
                "notify_port": "5600",
                "dp_size": "1",
                "tp_size": "1",
            },
        ),
        (
            "nixl_push",
            {"engine_id": "127.0.0.1:8100-0f1e2d3c", "side_channel_host": "127.0.0.1", "side_channel_port": "5600"},
        ),
    ],
)
def test_a_simulated_p_is_announced_with_what_its_connector_needs(connector: str, coordinates: dict[str, str]) -> None:
    asked = options(role=Role.PREFILL, port=8100, connector=connector)
    assert identity_of(asked, "127.0.0.1:8100").coordinates == coordinates
    kinds = {"sglang": "sglang", "trtllm": "trtllm", "trtllm_gen_first": "trtllm"}
    assert identity_of(asked, "127.0.0.1:8100").engine == kinds.get(connector, "sim")
    argv = launch_of(asked).argv
    assert argv.count("--connector") == (connector != "nixl")
    assert ("--engine-id" in argv) is ("engine_id" in coordinates)


@pytest.mark.parametrize(
    ("changes", "coordinates"),
    [
        ({}, {}),
        (
            {"connector": "nixl_push", "tensor_parallel": 2, "gpus": "0,1"},
            {
                "engine_id": "10.0.0.5:8100-0f1e2d3c",
                "side_channel_host": "10.0.0.5",
                "side_channel_port": "5600",
                "tp_size": "2",
            },
        ),
        *(
            (
                {"connector": "nixl_push", "engine_args": given, "tensor_parallel": 2, "gpus": "0,1"},
                {
                    "engine_id": "10.0.0.5:8100-0f1e2d3c",
                    "side_channel_host": "10.0.0.5",
                    "side_channel_port": "5600",
                    **sizes,
                },
            )
            for given, sizes in (
                (("--pipeline-parallel-size", "4"), {"tp_size": "2", "pp_size": "4"}),
                (("--pipeline_parallel_size=4", "-tp", "8"), {"tp_size": "8", "pp_size": "4"}),
                (("-pp", "4", "-pp", "2", "-tp=1"), {"pp_size": "2"}),
                (("-pp", "1", "--tensor-parallel-size=1"), {}),
                (("--pipeline-parallel-size",), {"tp_size": "2"}),
                (("-pp", "x"), {"tp_size": "2"}),
            )
        ),
        ({"connector": "mooncake"}, {"bootstrap_host": "10.0.0.5", "bootstrap_port": "5600"}),
        ({"connector": "sglang", "attach": "http://10.0.0.5:8100"}, {}),
        ({"connector": "mooncake", "attach": "http://10.0.0.5:8100"}, {}),
    ],
)
def test_a_launched_vllm_is_announced_with_what_it_was_told(
    changes: dict[str, Any], coordinates: dict[str, str]
) -> None:
    asked = options(role=Role.PREFILL, engine="vllm", model="m", host="10.0.0.5", port=8100, **changes)
    assert identity_of(asked, "10.0.0.5:8100").coordinates == coordinates
    if not asked.attach:
        config = json.loads(launch_of(asked).argv[launch_of(asked).argv.index("--kv-transfer-config") + 1])
        assert config.get("engine_id") == coordinates.get("engine_id")


@pytest.mark.parametrize("engine", ["sim", "vllm"])
def test_each_launch_of_a_pushing_p_has_an_id_of_its_own_unless_it_is_pinned(engine: str) -> None:
    def told(**changes: Any) -> str:
        asked = options(role=Role.PREFILL, engine=engine, model="m", connector="nixl_push", **changes)
        announced = identity_of(asked, "127.0.0.1:8200").coordinates["engine_id"]
        assert announced in " ".join(launch_of(asked).argv)
        return announced

    assert told() == told() != told(launch_id="another")
    assert told(coordinates=("engine_id=mine",)) == "mine"


@pytest.mark.parametrize(
    ("ports", "source"),
    [
        ((0, 0), EventSource()),
        ((0, 5558), EventSource()),
        ((5557, 0), EventSource("tcp://10.0.0.9:5557")),
        ((5557, 5558), EventSource("tcp://10.0.0.9:5557", "tcp://10.0.0.9:5558")),
    ],
)
def test_an_identity_says_where_kv_events_are_published(ports: tuple[int, int], source: EventSource) -> None:
    asked = options(advertise="10.0.0.9:80", kv_events_port=ports[0], kv_replay_port=ports[1])
    assert identity_of(asked, "127.0.0.1:1").kv_events == source


def test_an_engine_that_listens_everywhere_must_say_where_it_is_reached() -> None:
    with pytest.raises(ConfigError, match="advertise"):
        identity_of(options(host="0.0.0.0"), "0.0.0.0:8200")
    assert identity_of(options(host="0.0.0.0", advertise="10.0.0.9:80"), "0.0.0.0:8200").address == "10.0.0.9:80"


@pytest.mark.parametrize(
    ("changes", "host"),
    [
        ({}, "127.0.0.1"),
        ({"host": "0.0.0.0", "advertise": "10.0.0.9:80"}, "10.0.0.9"),
        ({"advertise": "10.0.0.9:80", "side_channel_host": "10.1.0.9"}, "10.1.0.9"),
    ],
)
def test_other_engines_reach_nixl_where_proxies_reach_http_unless_told(changes: dict[str, Any], host: str) -> None:
    launch = launch_of(options(engine="vllm", model="m", **changes))
    assert launch.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == host


@pytest.mark.parametrize(("url", "address"), [("http://a:1", "a:1"), ("a:1", "a:1"), ("http://a:1/", "a:1")])
def test_an_engine_is_attached_by_its_url(url: str, address: str) -> None:
    assert address_of(url) == address


@pytest.mark.parametrize("url", ["a", "http://a", "http://:1", ""])
def test_a_url_without_host_or_port_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="attach"):
        address_of(url)


def test_curve_keys_come_as_a_pair(tmp_path: Path) -> None:
    assert curve_keys(None, None) is None
    with pytest.raises(ConfigError, match="together"):
        curve_keys(tmp_path / "a", None)
    with pytest.raises(ConfigError, match="certificates"):
        curve_keys(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("engine", ["sim", "vllm"])
def test_an_engine_that_is_launched_gets_what_is_announced_of_reading_back(engine: str) -> None:
    told = ("bidirectional_kv_xfer=true", "decoder_kv_blocks_ttl=90")
    asked = options(role=Role.DECODE, engine=engine, model="m", host="10.0.0.5", port=8100, coordinates=told)
    assert identity_of(asked, "10.0.0.5:8100").coordinates == dict(text.split("=") for text in told)
    argv = launch_of(asked).argv
    if engine == "sim":
        assert argv[argv.index("--bidirectional-kv-xfer") :][:3] == (
            *("--bidirectional-kv-xfer", "--decoder-kv-blocks-ttl", "90"),
        )
    else:
        config = json.loads(argv[argv.index("--kv-transfer-config") + 1])
        assert config["kv_connector_extra_config"] == {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 90}
    with pytest.raises(PPDError, match="bidirectional_kv_xfer = yes: must be true"):
        identity_of(options(coordinates=("bidirectional_kv_xfer=yes",)), "10.0.0.5:8100")


def test_a_simulated_p2p_nccl_d_is_patched_where_it_is_announced_so() -> None:
    for told in ((), ("takes_plain=true",)):
        asked = options(role=Role.DECODE, engine="sim", model="m", connector="p2p_nccl", coordinates=told)
        assert ("--takes-plain" in launch_of(asked).argv) is bool(told)
        assert ("takes_plain" in identity_of(asked, "10.0.0.5:8100").coordinates) is bool(told)


@pytest.mark.parametrize("engine", ["sim", "vllm"])
@pytest.mark.parametrize(
    ("connector", "told", "said"),
    [
        (
            "nixl",
            "decoder_kv_blocks_ttl=abc",
            "coordinate: decoder_kv_blocks_ttl = abc: must be a number from 1 to 9999",
        ),
        ("nixl", "engine_id=e", "coordinate = engine_id=e: must be of bidirectional_kv_xfer, decoder_kv_blocks_ttl"),
        ("none", "engine_id=e", "coordinate = engine_id=e: must not be given with connector none"),
        ("moriio", "notify_port=65536", "coordinate: notify_port = 65536: must be a port from 1 to 65535"),
        ("p2p_nccl", "zmq_address=h:99999", "coordinate: zmq_address = h:99999: must be host:port, with a port from 1"),
    ],
)
def test_what_a_connector_cannot_use_is_refused_before_an_engine_is_launched(
    engine: str, connector: str, told: str, said: str
) -> None:
    asked = options(engine=engine, model="m", connector=connector, coordinates=("bidirectional_kv_xfer=true", told))
    if connector != "nixl":
        asked = replace(asked, coordinates=(told,))
    for made in (launch_of, partial(identity_of, address="127.0.0.1:8200")):
        with pytest.raises(ConfigError) as refused:
            made(asked)
        assert said in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--interval", "nan"), "nan is not a finite number"),
        (("--drain-timeout", "nan"), "nan is not a finite number"),
        (("--x", "nan"), "nan is not a finite number"),
        (("--proxy", "10.0.0.1"), "proxy = '10.0.0.1': must be host:port, with a port from 1 to 65535"),
        (("--coordinate", "engine_id"), "coordinate = engine_id: must be NAME=VALUE"),
        (("--attach", "http://h:65536"), "attach = 'http://h:65536': must be http://host:port"),
        (("--attach", "http://h"), "attach = 'http://h': must be http://host:port"),
        (("--attach", "https://h:1"), "attach = 'https://h:1': must be http://host:port"),
        (("--", "--seed", "1"), "ENGINE_ARGS: go to an engine that is launched, not to one that is attached"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named_with_its_value(flags: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(command, ["--role", "D", "--attach", "http://127.0.0.1:1", *flags])
    assert result.exit_code in (1, 2)
    assert said in result.output
