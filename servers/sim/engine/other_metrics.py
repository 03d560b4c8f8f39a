"""`/metrics` under the names of engines other than vLLM: those that a proxy reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..core.block_pool import BlockPool
from ..core.config import SimConfig
from ..core.counters import Counters
from ..core.scheduler import Scheduler
from ..encoding.encoder import Encoder
from .meetings import Meetings


class MetricsSource(Protocol):
    """An engine; `started_at` is Unix time, in seconds."""

    config: SimConfig
    counters: Counters
    encoder: Encoder
    meetings: Meetings
    pool: BlockPool
    scheduler: Scheduler
    started_at: float


def sglang_metrics(source: MetricsSource) -> Iterator[Metric]:
    """No start time: SGLang's processes share their metrics, so those of one process are left out."""
    config, counters, pool, scheduler = source.config, source.counters, source.pool, source.scheduler
    for name, value in (
        ("num_running_reqs", scheduler.running),
        ("num_queue_reqs", scheduler.waiting),
        ("num_prefill_prealloc_queue_reqs", source.meetings.waiting),
        ("num_prefill_inflight_queue_reqs", len(source.meetings)),
        ("num_decode_transfer_queue_reqs", scheduler.pulling),
        ("token_usage", pool.usage),
        ("cache_hit_rate", counters.prefix_hits / max(1, counters.prefix_queries)),
    ):
        yield _labelled(GaugeMetricFamily(f"sglang:{name}", name, labels=("model_name",)), (config.model,), value)
    info = GaugeMetricFamily("sglang:cache_config_info", "The KV cache.", labels=("page_size", "num_pages"))
    yield _labelled(info, (str(config.block_size), str(config.num_blocks)), 1)
    for name, value in (
        ("prompt_tokens", counters.prompt_tokens),
        ("generation_tokens", counters.generation_tokens),
        ("cached_tokens", counters.local_cache_hit_tokens),
    ):
        yield _labelled(CounterMetricFamily(f"sglang:{name}", name, labels=("model_name",)), (config.model,), value)


def trtllm_metrics(source: MetricsSource) -> Iterator[Metric]:
    config, pool, scheduler = source.config, source.pool, source.scheduler
    for name, value in (
        ("num_requests_running", scheduler.running),
        ("num_requests_waiting", scheduler.waiting + scheduler.pulling),
        ("kv_cache_utilization", pool.usage),
        ("kv_cache_tokens_per_block", config.block_size),
        ("kv_cache_max_blocks", config.num_blocks),
    ):
        labels = ("model_name", "engine_type")
        yield _labelled(GaugeMetricFamily(f"trtllm_{name}", name, labels=labels), (config.model, "trtllm"), value)


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, labels: tuple[str, ...], value: float) -> Metric:
    family.add_metric(labels, value)
    return family


METRICS: dict[str, Callable[[MetricsSource], Iterator[Metric]]] = {"sglang": sglang_metrics, "trtllm": trtllm_metrics}
