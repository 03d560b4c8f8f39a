"""What to do about what `ppd doctor` found of KV: each connector and each engine has its own words for it."""

from __future__ import annotations

from collections.abc import Mapping

from ...fleet.worker import Worker

OTHERS = ("sglang", "trtllm")  # engines whose metrics and flags are not vLLM's
_LOGS = "and at the logs of both."
HANDOFF: Mapping[str, str] = {
    "nixl": "Look at kv_transfer_params in P's answer, at P's VLLM_NIXL_SIDE_CHANNEL_HOST (it must be reachable from "
    "D), and at D's log for failed transfers.",
    "nixl_push": "Look whether P has the engine_id, side_channel_host and side_channel_port that were announced, "
    f"whether D reaches them, {_LOGS}",
    "mooncake": "Look whether D reaches P's bootstrap server (GET /query) and the addresses that it tells, whether "
    f"both have one mooncake_protocol, {_LOGS}",
    "moriio": "Look whether P and D reach each other's handshake and notify ports, whether neither has read_mode, "
    f"{_LOGS}",
    "moriio_read": f"Look whether D reaches P's handshake and notify ports, whether both have read_mode, {_LOGS}",
    "p2p_nccl": "Look whether P and D reach each other's zmq_address, whether both have "
    f"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1, {_LOGS}",
    "offload_p2p": "Look whether D reaches P's p2p_host and p2p_port, whether all have one hash seed and one block "
    f"size, {_LOGS}",
    "lmcache": "Look whether P reaches D's receiver ports, or both the same store. What comes after P's answer, D "
    "computes.",
    "none": "Connector none moves nothing by itself: give P and D a shared KV store, or use the engine's own "
    "connector.",
    "sglang": f"Look whether D reaches P's bootstrap_host and bootstrap_port, {_LOGS}",
    "trtllm": f"Look whether both have a cache_transceiver_config with one backend, whether D reaches P, {_LOGS}",
    "trtllm_gen_first": f"Look whether D reaches P's ctx_info_endpoint (GET /server_info of P), {_LOGS}",
}
"""Where nothing moved, or too little, by connector."""

_NO_HANDOFF: Mapping[str, str] = {
    "trtllm": "Look at disaggregated_params in P's answer: P needs a cache_transceiver_config.",
}
_NO_HANDOFF_OF_VLLM = "Start P with a --kv-transfer-config that names its connector."

_TOLD: Mapping[str, str] = {
    "mooncake": "Look whether its bootstrap server answers GET /query, or say bootstrap_host= and bootstrap_port=.",
    "trtllm_gen_first": "Look whether GET /server_info tells ctx_info_endpoint: P needs a cache_transceiver_config.",
}
"""Of what a connector must know, where the engine tells it when it is asked."""

_CACHING: Mapping[str, str] = {
    "vllm": "Start it without --no-enable-prefix-caching, and with room for more KV if other requests evict so soon.",
    "sglang": "Start it without --disable-radix-cache, and with room for more KV if other requests evict so soon.",
    "trtllm": "Start it with enable_block_reuse: true, and with room for more KV if other requests evict so soon.",
}
_COUNTING: Mapping[str, str] = {
    "vllm": "Start the engines with --enable-prompt-tokens-details, and make their /metrics readable from here.",
    "sglang": "Start the engines with --enable-cache-report.",
    "trtllm": "Look whether its usage has prompt_tokens_details.",
}


def no_handoff(connector: str) -> str:
    return _NO_HANDOFF.get(connector, _NO_HANDOFF_OF_VLLM)


def unknown(worker: Worker, missing: str) -> str:
    return _TOLD.get(worker.connector, f"Add {missing}=... to the worker, or announce it by `ppd agent --coordinate`.")


def caching(engine: str) -> str:
    return _CACHING.get(engine, _CACHING["vllm"])


def counting(engine: str) -> str:
    return _COUNTING.get(engine, _COUNTING["vllm"])


def versions(engine: str) -> str:
    """Of an engine that has told none."""
    if engine == "sglang":
        return "Say engine_version=... of each worker: SGLang is not asked for it."
    return "Make the workers reachable from here."
