"""The proxy's Prometheus metrics. Labels are bounded: routes, reasons, roles, states and leg kinds are fixed sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .views import WorkerView
from .workers import Role

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0)
TPOT_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.15, 0.3, 1.0)


class Metrics:
    """Every series of one proxy, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

        self.turns = counter("ppd_turns", "Turns by route and reason", "route", "reason")
        self.outcomes = counter("ppd_turn_outcomes", "How turns ended", "route", "outcome")
        self.failures = counter(
            "ppd_worker_failures", "Workers that a turn gave up, before its first byte", "leg", "error"
        )
        self.ttft = histogram("ppd_ttft_seconds", "Time to first token, at the proxy", TTFT_BUCKETS_S, "route")
        self.tpot = histogram("ppd_tpot_seconds", "Mean time per output token", TPOT_BUCKETS_S, "route")
        self.legs = histogram("ppd_leg_seconds", "Leg durations", TTFT_BUCKETS_S, "leg")
        self.prompt_tokens = counter("ppd_prompt_tokens", "Prompt tokens as engines counted them", "route")
        self.cached_tokens = counter("ppd_cached_tokens", "Prompt tokens found in the worker's cache", "route")
        self.completion_tokens = counter("ppd_completion_tokens", "Generated tokens", "route")
        self.residency_misses = counter("ppd_residency_misses", "LOCAL turns whose prefix was not cached after all")
        self.handoffs_missing = counter("ppd_handoffs_missing", "Prefill answers without a usable handoff", "reason")
        self.heartbeats = counter("ppd_heartbeats", "Messages on the heartbeat ports", "result")
        self.passed_through = counter("ppd_passthrough_requests", "Requests outside of sessions", "endpoint", "status")
        self.config_reloads = counter("ppd_config_reloads", "Reads of a changed config file", "result")

    def watch(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Adds gauges that are read when they are scraped."""
        self.registry.register(_Live(collect))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Live(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        yield from self._collect()

    def describe(self) -> Iterable[Metric]:
        return ()


def fleet_gauges(views: Iterable[WorkerView]) -> Iterator[Metric]:
    """Workers by role and state, and what this proxy has in flight on each role."""
    views = tuple(views)
    workers = GaugeMetricFamily("ppd_workers", "Workers by role and state", labels=("role", "state"))
    inflight = GaugeMetricFamily("ppd_inflight_legs", "Legs that run now", labels=("role",))
    queued = GaugeMetricFamily("ppd_queued_prefill_tokens", "Prompt tokens still to compute", labels=("role",))
    for role in Role:
        members = [view for view in views if view.role is role]
        for state in ("up", "draining", "down"):
            workers.add_metric((role, state), sum(view.state == state for view in members))
        inflight.add_metric((role,), sum(view.inflight for view in members))
        queued.add_metric((role,), sum(view.queued_prefill_tokens for view in members))
    yield from (workers, inflight, queued)


def gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric((), value)
    return family
