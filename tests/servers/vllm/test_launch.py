"""Command lines and environments by role and device."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role
from ppd.servers.vllm.launch import CONNECTORS, TINY_ARGS, EngineSpec, command


def spec(**changes: Any) -> EngineSpec:
    cache = {"encoder_cache": "/cache"} if changes.get("role") is Role.ENCODE else {}
    return EngineSpec(**({"role": Role.DECODE, "model": "org/model", "python": "/venv/bin/python"} | cache | changes))


def flag(argv: tuple[str, ...], name: str) -> str | None:
    """The value after the last such flag, which is the one that vLLM takes."""
    places = [place for place, text in enumerate(argv) if text == name]
    return argv[places[-1] + 1] if places else None


def document(argv: tuple[str, ...], name: str) -> Any:
    text = flag(argv, name)
    return None if text is None else json.loads(text)


def test_a_decode_server_on_gpus_in_full() -> None:
    launch = command(
        spec(
            port=8200,
            host="10.0.0.6",
            side_channel_port=5601,
            gpus=(2, 3),
            tensor_parallel=2,
            extra_args=("--seed", "1"),
        )
    )
    assert launch.argv == (
        *("/venv/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "org/model"),
        *("--served-model-name", "org/model", "--host", "10.0.0.6", "--port", "8200", "--tensor-parallel-size", "2"),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
        "--kv-transfer-config",
        '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}',
        *("--seed", "1"),
    )
    assert launch.env == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.6",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5601",
        "CUDA_VISIBLE_DEVICES": "2,3",
    }


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("role", "kv_role"),
    [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer"), (Role.REPLICA, "kv_consumer")],
)
def test_every_engine_may_hand_over_and_pull(role: Role, kv_role: str, device: str) -> None:
    launch = command(spec(role=role, device=device))
    assert document(launch.argv, "--kv-transfer-config") == {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_load_failure_policy": "recompute",
    }
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in launch.env


@pytest.mark.parametrize(
    ("role", "policy"), [(Role.PREFILL, "fail"), (Role.DECODE, "recompute"), (Role.REPLICA, "recompute")]
)
def test_a_p_that_reads_back_fails_what_it_cannot_read(role: Role, policy: str) -> None:
    """vLLM would ask for the KV once more in place of computing it, and wait for ever."""
    told = document(command(spec(role=role, reads_back=True)).argv, "--kv-transfer-config")
    assert told["kv_load_failure_policy"] == policy


@pytest.mark.parametrize(
    ("connector", "device", "config", "variable"),
    [
        ("nixl_push", "cuda", {"engine_id": "10.0.0.5:8000"}, "VLLM_NIXL_SIDE_CHANNEL_PORT"),
        ("nixl_push", "cpu", {"engine_id": "10.0.0.5:8000", "kv_buffer_device": "cpu"}, "VLLM_NIXL_SIDE_CHANNEL_PORT"),
        ("mooncake", "cuda", {}, "VLLM_MOONCAKE_BOOTSTRAP_PORT"),
        (
            "mooncake",
            "cpu",
            {"kv_connector_extra_config": {"mooncake_protocol": "tcp"}},
            "VLLM_MOONCAKE_BOOTSTRAP_PORT",
        ),
    ],
)
def test_a_connector_is_started_as_the_proxy_speaks_to_it(
    connector: str, device: str, config: dict[str, Any], variable: str
) -> None:
    launch = command(spec(role=Role.PREFILL, connector=connector, device=device, host="10.0.0.5"))
    told = document(launch.argv, "--kv-transfer-config")
    assert told.pop("kv_connector") == CONNECTORS[connector]
    assert told == {"kv_role": "kv_producer", "kv_load_failure_policy": "recompute", **config}
    assert launch.env[variable] == "5600"


def test_with_nixl_push_only_p_has_an_id_that_outlives_it() -> None:
    """P would take a D that has begun anew for the one that it knows, and write into what is gone."""
    told = document(command(spec(role=Role.DECODE, connector="nixl_push")).argv, "--kv-transfer-config")
    assert "engine_id" not in told


@pytest.mark.parametrize("role", list(Role))
def test_an_engine_of_another_connector_says_its_own(role: Role) -> None:
    launch = command(spec(role=role, connector="none"))
    assert document(launch.argv, "--kv-transfer-config") is None
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in launch.env


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("role", [role for role in Role if role is not Role.ENCODE])
def test_every_engine_caches_prefixes_and_reports_cached_tokens(role: Role, device: str) -> None:
    argv = command(spec(role=role, device=device)).argv
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details"} <= set(argv)


SHARED = {"ec_connector": "ECExampleConnector", "ec_connector_extra_config": {"shared_storage_path": "/cache"}}
BY_REDIS = {
    "ec_connector": "RedisECConnector",
    "ec_connector_module_path": "ppd_ec_redis.connector",
}


@pytest.mark.parametrize(("cache", "config"), [("/cache", SHARED), ("redis", BY_REDIS), ("", None)])
@pytest.mark.parametrize("role", [role for role in Role if role is not Role.ENCODE])
def test_whoever_computes_prompts_may_be_given_embeddings(role: Role, cache: str, config: Any) -> None:
    argv = command(spec(role=role, host="10.0.0.8", port=8400, encoder_cache=cache)).argv
    found = document(argv, "--ec-transfer-config")
    assert found == (None if config is None else {"ec_role": "ec_consumer", **config})
    assert document(argv, "--kv-transfer-config") is not None


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("connector", [*CONNECTORS, "none"])
@pytest.mark.parametrize(("cache", "config"), [("/cache", SHARED), ("redis", BY_REDIS)])
def test_an_encoder_only_encodes(device: str, connector: str, cache: str, config: Any) -> None:
    launch = command(
        spec(role=Role.ENCODE, host="10.0.0.8", port=8400, encoder_cache=cache, device=device, connector=connector)
    )
    assert document(launch.argv, "--ec-transfer-config") == {"ec_role": "ec_producer", **config}
    assert {"--enforce-eager", "--no-enable-prefix-caching"} <= set(launch.argv)
    assert not {"--kv-transfer-config", "--enable-prefix-caching"} & set(launch.argv)
    assert not [name for name in launch.env if "SIDE_CHANNEL" in name or "BOOTSTRAP" in name]


def test_a_cpu_engine_is_started_by_module_and_stays_on_this_machine() -> None:
    launch = command(spec(role=Role.PREFILL, device="cpu", gpus=(0,)))
    assert launch.argv[:5] == ("/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/model")
    assert int(flag(launch.argv, "--block-size") or 0) % 32 == 0
    assert "--enforce-eager" in launch.argv
    assert launch.env["UCX_NET_DEVICES"] == launch.env["GLOO_SOCKET_IFNAME"] == "lo"
    assert launch.env["OMP_NUM_THREADS"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in launch.env


@pytest.mark.parametrize(("tensor_parallel", "in_one_process"), [(1, True), (2, False)])
def test_a_cpu_engine_of_one_rank_runs_in_its_core_and_is_forked(tensor_parallel: int, in_one_process: bool) -> None:
    launch = command(spec(device="cpu", tensor_parallel=tensor_parallel))
    assert (flag(launch.argv, "--distributed-executor-backend") == "uni") is in_one_process
    assert (launch.env.get("PPD_FORK_CORE") == "1") is in_one_process
    assert (launch.env.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0") is in_one_process


@pytest.mark.parametrize(
    ("model", "device", "offline"),
    [("/models/tiny", "cpu", True), ("./tiny", "cpu", True), ("org/model", "cpu", False), ("/models/x", "cuda", False)],
)
def test_a_local_model_on_cpus_asks_no_hub(model: str, device: str, offline: bool) -> None:
    env = command(spec(model=model, device=device)).env
    assert ("HF_HUB_OFFLINE" in env) is ("TRANSFORMERS_OFFLINE" in env) is offline


def test_extra_arguments_come_last_so_that_they_win() -> None:
    argv = command(spec(device="cpu", extra_args=("--max-num-seqs", "4", "--served-model-name", "mine"))).argv
    assert flag(argv, "--max-num-seqs") == "4"
    assert flag(argv, "--served-model-name") == "mine"
    assert command(spec(extra_args=TINY_ARGS)).argv[-len(TINY_ARGS) :] == TINY_ARGS


def test_the_side_channel_may_have_another_host_than_http() -> None:
    env = command(spec(host="0.0.0.0", side_channel_host="10.0.0.7")).env
    assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.7"


def test_kv_events_are_published_under_the_workers_address() -> None:
    assert document(command(spec()).argv, "--kv-events-config") is None
    assert document(command(spec(port=8100, kv_events_port=5557)).argv, "--kv-events-config") == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "topic": "kv@127.0.0.1:8100",
    }
    replayed = document(command(spec(port=8100, kv_events_port=5557, kv_replay_port=5558)).argv, "--kv-events-config")
    assert replayed["replay_endpoint"] == "tcp://*:5558"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"device": "tpu"}, "device"),
        ({"role": Role.ENCODE, "encoder_cache": ""}, "encoder_cache"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"gpus": (0,), "tensor_parallel": 2}, "gpus"),
        ({"host": "0.0.0.0"}, "side_channel_host"),
        ({"host": "::", "role": Role.PREFILL}, "side_channel_host"),
        ({"host": "::", "role": Role.REPLICA}, "side_channel_host"),
    ],
)
def test_what_cannot_be_started_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as refused:
        spec(**changes)
    assert refused.value.param == param


def test_without_a_connector_an_engine_may_listen_everywhere() -> None:
    assert command(spec(role=Role.REPLICA, host="0.0.0.0", connector="none")).env == {}


def test_an_engine_that_reads_back_is_told_so_and_for_how_long_it_keeps_kv() -> None:
    config = document(command(spec(reads_back=True, keeps_s=90)).argv, "--kv-transfer-config")
    assert config["kv_connector_extra_config"] == {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 90}
    assert "kv_connector_extra_config" not in document(command(spec()).argv, "--kv-transfer-config")
    with pytest.raises(ConfigError, match="nixl_push has none"):
        spec(reads_back=True, connector="nixl_push")
