"""`/metrics`, under vLLM's names unless the engine is another. Gauges and counters are read at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..core.sequence import Finish
from .other_metrics import METRICS, MetricsSource

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_BYTES = tuple(2.0**power for power in range(12, 37, 2))


class Latencies:
    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            parent = Histogram(f"vllm:{name}", text, _LABELS, registry=registry, buckets=tuple(buckets))
            return parent.labels(model, "0")

        self.first_token_s = histogram("time_to_first_token_seconds", "Time to first token.", _FIRST_TOKEN_S)
        self.between_tokens_s = histogram("inter_token_latency_seconds", "Time between tokens.", _BETWEEN_TOKENS_S)
        self.request_s = histogram("e2e_request_latency_seconds", "Request latency.", _REQUEST_S)
        self.transfer_s = histogram("nixl_xfer_time_seconds", "Duration of KV pulls.", _FIRST_TOKEN_S)
        self.transfer_bytes = histogram("nixl_bytes_transferred", "Bytes of KV pulls.", _BYTES)


class MetricsRegistry:
    """One engine's registry, and the Prometheus collector of its counters and gauges."""

    def __init__(self, source: MetricsSource, engine: str = "vllm") -> None:
        self._source = source
        self._registry = CollectorRegistry()
        self._labels = (source.config.model, "0")
        self._others = METRICS.get(engine)
        self.latencies = Latencies(CollectorRegistry() if self._others else self._registry, source.config.model)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        if self._others is not None:
            yield from self._others(self._source)
            return
        yield from self._gauges()
        yield from self._counters()

    def _gauges(self) -> Iterator[Metric]:
        scheduler, pool, config = self._source.scheduler, self._source.pool, self._source.config
        running = scheduler.running + self._source.encoder.running
        yield self._gauge("num_requests_running", "Requests in the batch.", running)
        yield self._gauge("num_requests_waiting", "Requests that wait.", scheduler.waiting + scheduler.pulling)
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Requests that wait.", labels=(*_LABELS, "reason")
        )
        reasons.add_metric((*self._labels, "capacity"), scheduler.waiting)
        reasons.add_metric((*self._labels, "deferred"), scheduler.pulling)
        yield reasons
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, pinned ones included.", pool.usage)
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache.",
            labels=("block_size", "num_gpu_blocks", "enable_prefix_caching", "engine"),
        )
        info.add_metric((str(config.block_size), str(config.num_blocks), "True", "0"), 1)
        yield info
        started = GaugeMetricFamily("process_start_time_seconds", "Start time of the process, Unix seconds.")
        started.add_metric((), self._source.started_at)
        yield started

    def _counters(self) -> Iterator[Metric]:
        counters = self._source.counters
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens.", counters.prompt_tokens),
            ("generation_tokens", "Generated tokens.", counters.generation_tokens),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", counters.prefix_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", counters.prefix_hits),
            ("external_prefix_cache_queries", "Tokens asked of another engine.", counters.external_queries),
            ("external_prefix_cache_hits", "Tokens pulled from another engine.", counters.external_hits),
            ("num_preemptions", "Preempted requests.", counters.preemptions),
            *self._of_connector(),
        ):
            yield self._family(name, text, (), [((), value)])
        sources = [
            (("local_compute",), counters.local_compute_tokens),
            (("local_cache_hit",), counters.local_cache_hit_tokens),
            (("external_kv_transfer",), counters.external_kv_tokens),
        ]
        yield self._family("prompt_tokens_by_source", "Prompt tokens by where they came from.", ("source",), sources)
        finished = [((reason.value,), counters.finished[reason]) for reason in Finish]
        yield self._family("request_success", "Finished requests.", ("finished_reason",), finished)
        # Not in vLLM: a real engine does not report these.
        traps = CounterMetricFamily("ppd_sim:traps", "Handoff misuse.", labels=(*_LABELS, "trap"))
        for trap, count in counters.traps.items():
            traps.add_metric((*self._labels, trap.value), count)
        yield traps
        expired = CounterMetricFamily("ppd_sim:expired_handoffs", "Prompts whose KV no D took.", labels=_LABELS)
        expired.add_metric(self._labels, counters.expired_handoffs)
        yield expired

    def _of_connector(self) -> tuple[tuple[str, str, int], ...]:
        """What vLLM's connectors count themselves; those of other names count nothing there."""
        counters, connector = self._source.counters, self._source.config.connector
        if connector == "offload_p2p":
            failures = counters.failed_transfers
            return (("kv_offload_tiering_promotion_job_failures", "Failed loads from a tier.", failures),)
        if connector not in ("nixl", "nixl_push"):
            return ()
        return (
            ("nixl_num_failed_transfers", "Failed KV pulls.", counters.failed_transfers),
            ("nixl_num_failed_notifications", "Failed notifications to peers.", counters.failed_notifications),
            ("nixl_num_kv_expired_reqs", "Handoffs that nobody pulled in time.", counters.expired_handoffs),
            ("nixl_num_notifications_after_expiry", "Pulls without a lease.", counters.notifications_after_expiry),
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _family(
        self, name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], int]]
    ) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=(*_LABELS, *labels))
        for extra, value in values:
            family.add_metric((*self._labels, *extra), value)
        return family
