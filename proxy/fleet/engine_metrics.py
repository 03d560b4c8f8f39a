"""What an engine's `/metrics` says: its load, its KV cache's size, when its process started, and a few counters.

Names and labels are vLLM's (0.20 on; the counters' `_total` is part of the text format), SGLang's and TensorRT-LLM's.
Samples of several data-parallel ranks are summed; of their KV usage the largest counts. Of SGLang's tensor-parallel
ranks, which all may report the same requests, only the first counts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from .worker import Load

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)")
# It neither begins inside of a word nor backtracks: else a line of 40 KB takes 5 s.
_LABEL = re.compile(r'\b(\w++)="((?:[^"\\]|\\.)*+)"')

METRICS_PATH = "/metrics"
_PATHS = {"trtllm": "/prometheus/metrics"}  # its /metrics drains a queue of statistics, and is for one reader

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "trtllm_num_requests_running")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "trtllm_num_requests_waiting")
_KV_USAGE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "trtllm_kv_cache_utilization",
)
_CACHES = {  # with the labels of how many blocks there are, and of how many tokens each
    "vllm:cache_config_info": ("num_gpu_blocks", "block_size"),
    "sglang:cache_config_info": ("num_pages", "page_size"),
}
_CACHE_PARTS = ("trtllm_kv_cache_max_blocks", "trtllm_kv_cache_tokens_per_block")  # as values, of which the product
_LARGEST = 1e15  # that an engine can mean, so that sums are finite
_BORN = "process_start_time_seconds"

PEER_FAILURES = "vllm:kv_offload_tiering_promotion_job_failures_total"  # of a tier of its offloading, as peers are
COUNTERS = (
    "vllm:prompt_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:nixl_num_failed_transfers_total",
    "vllm:nixl_num_kv_expired_reqs_total",
    "vllm:nixl_num_notifications_after_expiry_total",
    PEER_FAILURES,
)
BY_SOURCE = "vllm:prompt_tokens_by_source_total"  # counted as `NAME{source}`
_WANTED = (*_RUNNING, *_WAITING, *_KV_USAGE, *_CACHES, *_CACHE_PARTS, _BORN, BY_SOURCE, *COUNTERS)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """`counters`: `COUNTERS` by name, `BY_SOURCE` by label (`local_compute`, ...); only those that the engine has."""

    load: Load = field(default_factory=Load)
    incarnation: str = ""  # the process's start time; empty: unknown
    prefix_caching: bool | None = None  # None: unknown
    counters: dict[str, float] = field(default_factory=dict)


def parse_metrics(text: str) -> EngineMetrics:
    """Skips lines that it does not need or can't read."""
    sums: dict[str, float] = {}
    kv_usage, capacity, parts = 0.0, 0, dict[str, int]()
    incarnation, prefix_caching = "", None
    for line in text.splitlines():
        if not line.startswith(_WANTED):
            continue
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, labels_text, value_text = match.groups()
        if name not in _WANTED:
            continue
        labels = dict(_LABEL.findall(labels_text or ""))
        if labels.get("tp_rank", "0") != "0":
            continue
        try:
            value = float(value_text)
        except ValueError:
            continue
        if not abs(value) <= _LARGEST:  # nor is NaN
            continue
        if name in _KV_USAGE:
            kv_usage = max(kv_usage, min(1.0, max(0.0, value)))
        elif name in _CACHES:
            blocks, size = _CACHES[name]
            capacity += _integer(labels, blocks) * _integer(labels, size)
            prefix_caching = _flag(labels.get("enable_prefix_caching"))
        elif name in _CACHE_PARTS:
            parts[name] = int(value)
        elif name == _BORN:
            incarnation = value_text
        else:
            key = labels.get("source", "") if name == BY_SOURCE else name
            sums[key] = sums.get(key, 0.0) + value
    running, waiting = (int(sum(sums.pop(name, 0) for name in names)) for names in (_RUNNING, _WAITING))
    load = Load(running, waiting, kv_usage, capacity + max(0, math.prod(parts.get(name, 0) for name in _CACHE_PARTS)))
    return EngineMetrics(load, incarnation, prefix_caching, sums)


def metrics_path(engine: str) -> str:
    """Where an engine of this kind has them."""
    return _PATHS.get(engine, METRICS_PATH)


def _integer(labels: dict[str, str], name: str) -> int:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 16 else 0


def _flag(text: str | None) -> bool | None:
    return {"True": True, "False": False}.get(text or "")
