"""What an engine's `/metrics` says: its load, its KV cache's size, when its process started, and a few counters.

Names and labels are vLLM's (0.20 on; the counters' `_total` is part of the text format). Samples of several
data-parallel ranks (label `engine`) are summed; of their KV usage the largest counts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from .worker import Load

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_CACHE = "vllm:cache_config_info"
_BORN = "process_start_time_seconds"

COUNTERS = (
    "vllm:prompt_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:nixl_num_failed_transfers_total",
    "vllm:nixl_num_kv_expired_reqs_total",
    "vllm:nixl_num_notifications_after_expiry_total",
)
BY_SOURCE = "vllm:prompt_tokens_by_source_total"  # counted as `NAME{source}`
_WANTED = (_RUNNING, _WAITING, *_KV_USAGE, _CACHE, _BORN, BY_SOURCE, *COUNTERS)


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
    kv_usage, capacity = 0.0, 0
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
        try:
            value = float(value_text)
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        if name in _KV_USAGE:
            kv_usage = max(kv_usage, min(1.0, max(0.0, value)))
        elif name == _CACHE:
            capacity += _integer(labels, "num_gpu_blocks") * _integer(labels, "block_size")
            prefix_caching = _flag(labels.get("enable_prefix_caching"))
        elif name == _BORN:
            incarnation = value_text
        else:
            key = labels.get("source", "") if name == BY_SOURCE else name
            sums[key] = sums.get(key, 0.0) + value
    load = Load(int(sums.pop(_RUNNING, 0)), int(sums.pop(_WAITING, 0)), kv_usage, capacity)
    return EngineMetrics(load, incarnation, prefix_caching, sums)


def _integer(labels: dict[str, str], name: str) -> int:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 16 else 0


def _flag(text: str | None) -> bool | None:
    return {"True": True, "False": False}.get(text or "")
