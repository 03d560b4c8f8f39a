"""Settings of one simulated engine."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum

from ppd.proxy.config import PORT_PATTERN
from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role
from ppd.proxy.laws.step_time import EngineProfile

from .tokens import Tokenizer


class LoadFailurePolicy(StrEnum):
    """What D does when KV cannot be pulled; vLLM's `kv_load_failure_policy`."""

    FAIL = "fail"  # the request ends with 500
    RECOMPUTE = "recompute"  # D computes the prompt itself


class TemplateName(StrEnum):
    """The order in which a prompt is written."""

    PLAIN = "plain"  # tools, then messages as they are
    QWEN = "qwen"  # system, then tools; reasoning only after the last user's message
    GLM = "glm"  # tools, then system; reasoning only after the last user's message


class ReasoningField(StrEnum):
    """The member of a chat's answer that holds the reasoning."""

    REASONING = "reasoning"
    REASONING_CONTENT = "reasoning_content"  # its older name


class EventEncoding(StrEnum):
    """How KV events are written."""

    ARRAY = "array"  # as by vLLM up to 0.23: no session ids, hits are not announced, replay does not name the topic
    MAP = "map"  # as by vLLM 0.30 and later


_TCP = re.compile(rf"tcp://.+:(?:0|\*|{PORT_PATTERN})")
CONNECTORS = (  # those of `protocols`
    *("nixl", "nixl_push", "mooncake", "p2p_nccl", "moriio", "moriio_read", "offload_p2p", "lmcache"),
    *("sglang", "trtllm", "trtllm_gen_first", "none"),
)
_OF_CONNECTOR = {"bidirectional_kv_xfer": "nixl", "decode_radix_cache": "sglang", "takes_plain": "p2p_nccl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """Two engines with equal `model` and `seed` give equal answers, as two servers with the same weights do."""

    role: Role = Role.REPLICA
    connector: str = "nixl"  # as stock NIXL, it takes either leg whatever the role; of the others `protocols` tells
    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    model: str = "sim"
    aliases: tuple[str, ...] = ()  # further names of the model
    loras: tuple[str, ...] = ()  # further model names, each with answers of its own
    seed: int = 0
    tokenizer: Tokenizer = Tokenizer.CHARACTERS
    template: TemplateName = TemplateName.PLAIN
    reasoning: float = 0.0  # share of answers that begin with reasoning, where the request says nothing; 0: never any
    reasoning_field: ReasoningField = ReasoningField.REASONING
    block_size: int = 16  # tokens per KV block
    num_blocks: int = 16_384
    max_model_len: int = 32_768
    max_num_seqs: int = 256
    encoder_item_s: float = 0.06  # of encoding an item, for which all others of the step wait
    encoder_cache_items: int = 256  # embeddings that an engine keeps
    encoder_metadata: bool = True  # E tells what stands for an item without its data
    profile: EngineProfile = field(default_factory=EngineProfile)
    time_scale: float = 0.0  # 1: the profile's durations; 0: as fast as possible
    engine_id: str = ""  # empty: a random one per process
    side_channel_host: str = ""  # the host that peers are told to pull from; empty: `host`
    side_channel_port: int = 0  # where peers pull KV; 0: a free one
    lease_s: float = 30.0  # how long P keeps a finished prefill for D
    bidirectional_kv_xfer: bool = False  # D keeps what it has pulled and answered, and P reads it back
    decoder_kv_blocks_ttl: int = 480  # seconds for which D keeps it
    decode_radix_cache: bool = False  # an SGLang D keeps prompts, and is sent what it lacks
    takes_plain: bool = False  # a P2pNccl D that is patched to take requests without a transfer
    peer_timeout_s: float = 5.0
    meeting_timeout_s: float = 300.0  # how long a leg waits for the other one that has its key
    load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.FAIL
    kv_events_endpoint: str = ""  # empty: none; with * it is bound, else connected
    kv_events_topic: str = ""  # {address} stands for the engine's host:port
    kv_events_encoding: EventEncoding = EventEncoding.MAP
    kv_events_replay_endpoint: str = ""  # bound, for subscribers that missed events; empty: none
    kv_events_buffer_steps: int = 10_000  # how many of the latest batches can be replayed
    ssl_certfile: str = ""  # PEM chain, for TLS on `port`; empty: plain HTTP
    ssl_keyfile: str = ""  # PEM private key; empty: it is in the certificate's file
    api_key: str = ""  # empty: open
    stores_responses: bool = False  # as vLLM with VLLM_ENABLE_RESPONSES_API_STORE=1
    allow_faults: bool = False  # POST /faults
    dev_mode: bool = False  # POST /reset_prefix_cache, as vLLM with VLLM_SERVER_DEV_MODE=1
    fatal_text: str = ""  # a request that holds it ends the engine, as by SIGKILL; empty: none does
    keep_requests: int = 0  # how many of the latest requests `SimEngine.received` keeps
    shutdown_s: float = 2.0  # how long streams have to send their last chunk

    def __post_init__(self) -> None:
        counts = (
            "block_size",
            "num_blocks",
            "max_model_len",
            "max_num_seqs",
            "kv_events_buffer_steps",
            "encoder_cache_items",
        )
        for name in (*counts, "decoder_kv_blocks_ttl", "lease_s", "peer_timeout_s", "meeting_timeout_s"):
            if not getattr(self, name) > 0:  # nor not a number
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}", param=name)
        for name, connector in _OF_CONNECTOR.items():
            if getattr(self, name) and self.connector != connector:
                raise ConfigError(f"{name} needs connector {connector}", param=name)
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("ssl_keyfile needs ssl_certfile", param="ssl_keyfile")
        if self.connector not in CONNECTORS:
            raise ConfigError(f"connector must be {' or '.join(CONNECTORS)}, got {self.connector}", param="connector")
        if not 0 <= self.reasoning <= 1:
            raise ConfigError(f"reasoning must be between 0 and 1, got {self.reasoning}", param="reasoning")
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            endpoint = getattr(self, name)
            if endpoint.startswith("tcp://") and not _TCP.fullmatch(endpoint):  # ZeroMQ would take it modulo 65536
                raise ConfigError(f"{name} must have a port up to 65535, got {endpoint}", param=name)
        for name in ("encoder_item_s", "time_scale"):
            if not 0 <= getattr(self, name) < math.inf:
                told = f"{name} must be a finite number of at least 0, got {getattr(self, name)}"
                raise ConfigError(told, param=name)
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ConfigError(
                f"max_model_len must fit in the KV cache: {self.num_blocks} blocks of {self.block_size} tokens "
                f"hold less than {self.max_model_len}",
                param="max_model_len",
            )

    @property
    def keeps_s(self) -> float | None:
        """For how long a D keeps KV that may be read back; None: it does not."""
        return self.decoder_kv_blocks_ttl if self.bidirectional_kv_xfer else None

    @property
    def transfers_kv(self) -> bool:
        return self.connector != "none"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.model, *self.aliases, *self.loras)
