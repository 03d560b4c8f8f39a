"""The proxy's Prometheus metrics. Labels have few values: routes, reasons, roles, states, kinds of legs, some keys."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..config import DataPlane
from ..fleet.view import WorkerView
from ..fleet.worker import Role
from ..laws.accuracy import Judged

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0)
LAG_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
KEYS_SHOWN = 100
OTHER = "(other)"  # of all beyond a bound: no key has such a name, and no worker
WORKERS_SHOWN = 100
ERROR_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
TPOT_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.15, 0.3, 1.0)

ENDS = ("completed", "rejected", "failed", "cancelled", "broken")  # outcomes of a receipt

Counts = Iterable[tuple[tuple[str, ...], int]]
"""By the values of a metric's labels."""


class TurnCounter(Collector):
    """A counter for the path of every turn. The library's own locks for threads, which there are none of."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, *labels: str) -> None:
        self._about = (name, text, None, labels)
        self._values = defaultdict[tuple[str, ...], float](float)
        registry.register(self)

    def add(self, *values: str, by: float = 1.0) -> None:
        """values: one for each label, in their order."""
        self._values[values] += by

    def collect(self) -> Iterator[Metric]:
        name, text, value, labels = self._about
        family = CounterMetricFamily(name, text, value, labels)
        for values, count in self._values.items():
            family.add_metric(values, count)
        yield family


class TurnSum(Collector):
    """A counter that is added up when it is read, of what several have counted in one step."""

    def __init__(
        self, registry: CollectorRegistry, counts: Callable[[], Counts], name: str, text: str, *labels: str
    ) -> None:
        self._counts = counts
        self._about = (name, text, None, labels)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(*self._about)
        for values, count in self._counts():
            family.add_metric(values, count)
        yield family


class TurnEnds:
    """How turns ended: two metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._turns = defaultdict[tuple[str, str, str], int](int)
        TurnSum(registry, lambda: self._by(0, 1), "ppd_turns", "Turns by route and reason", "route", "reason")
        TurnSum(registry, self._ends, "ppd_turn_outcomes", "How turns ended", "route", "outcome")

    def add(self, route: str, reason: str, outcome: str) -> None:
        """route, reason: empty where nothing was decided."""
        self._turns[route, reason, outcome] += 1

    def _ends(self) -> Counts:
        """With zeros, so that the first failures of a route are a rise."""
        routes = ["none", *(route for route, _, _ in self._turns if route)]
        sums: dict[tuple[str, ...], int] = {(route, end): 0 for route in routes for end in ENDS}
        sums.update(self._by(0, 2))
        return sums.items()

    def _by(self, *places: int) -> Counts:
        sums: dict[tuple[str, ...], int] = {}
        for labels, count in self._turns.items():
            values = tuple([labels[place] or "none" for place in places])
            sums[values] = sums.get(values, 0) + count
        return sums.items()


class TurnTokens:
    """Tokens of turns, by route: three metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rows = defaultdict[str, list[int]](lambda: [0, 0, 0])
        TurnSum(registry, lambda: self._of(0), "ppd_prompt_tokens", "Prompt tokens as engines counted them", "route")
        TurnSum(
            registry, lambda: self._of(1), "ppd_cached_tokens", "Prompt tokens found in the worker's cache", "route"
        )
        TurnSum(registry, lambda: self._of(2), "ppd_completion_tokens", "Generated tokens", "route")

    def add(self, route: str, prompt: int, cached: int, completion: int) -> None:
        row = self._rows[route]
        row[0] += prompt
        row[1] += cached
        row[2] += completion

    def _of(self, place: int) -> Counts:
        return [((route,), row[place]) for route, row in self._rows.items()]


class KeyCounters:
    """What clients did, by the names of their keys. The first KEYS_SHOWN names are told apart, the rest is `OTHER`."""

    def __init__(self, turns: TurnCounter, tokens: TurnCounter) -> None:
        self._turns = turns
        self._tokens = tokens
        self._shown: set[str] = set()

    def turn(self, key: str, outcome: str, prompt_tokens: int, completion_tokens: int) -> None:
        name = self._label(key)
        self._turns.add(name, outcome)
        self._tokens.add(name, "prompt", by=prompt_tokens)
        self._tokens.add(name, "completion", by=completion_tokens)

    def _label(self, key: str) -> str:
        if key not in self._shown:
            if len(self._shown) >= KEYS_SHOWN:
                return OTHER
            self._shown.add(key)
        return key


class TurnHistogram(Collector):
    """A histogram for the path of every turn. bounds: upper ones, ascending; +Inf is added."""

    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, bounds: tuple[float, ...], labels: tuple[str, ...]
    ) -> None:
        self._about = (name, text, None, None, labels)
        self._bounds = bounds
        # By labels, how many amounts there are between any two bounds; and behind these counts the sum of all.
        self._rows = defaultdict[tuple[str, ...], list[float]](lambda: [0.0] * (len(bounds) + 2))
        registry.register(self)

    def observe(self, amount: float, *values: str) -> None:
        """values: one for each label, in their order."""
        row = self._rows[values]
        row[bisect_left(self._bounds, amount)] += 1
        row[-1] += amount

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(*self._about)
        names = [*(repr(bound) for bound in self._bounds), "+Inf"]
        for values, (*counts, total) in self._rows.items():
            family.add_metric(values, list(zip(names, accumulate(counts), strict=True)), total)
        yield family


class PredictionErrors:
    """How far predicted times were off. The first WORKERS_SHOWN workers are told apart, the rest is `OTHER`."""

    def __init__(self, errors: TurnHistogram) -> None:
        self._errors = errors
        self._shown: set[str] = set()

    def observe(self, route: str, worker: str, figure: str, error: float) -> None:
        if worker not in self._shown:
            if len(self._shown) < WORKERS_SHOWN:
                self._shown.add(worker)
            else:
                worker = OTHER
        self._errors.observe(error, route, worker, figure)


class Metrics:
    """The metrics of one process, in a registry of its own."""

    def __init__(self, refusals: Iterable[str] = ()) -> None:
        """refusals: their reasons."""
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        def counts(name: str, text: str, *labels: str) -> TurnCounter:
            return TurnCounter(self.registry, name, text, *labels)

        def spread(name: str, text: str, bounds: tuple[float, ...], *labels: str) -> TurnHistogram:
            return TurnHistogram(self.registry, name, text, bounds, labels)

        def times(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=bounds, registry=self.registry)

        self.turns = TurnEnds(self.registry)
        self.failures = counter("ppd_leg_failures", "Legs that failed, at what, and why", "leg", "phase", "cause")
        self.retries = counter("ppd_retries", "Requests to be tried again, by how that was paid", "result")
        self.abandoned = counter("ppd_handovers_abandoned", "Hand-overs whose client left", "fate")
        self.refused = counter("ppd_refused", "Requests refused for the proxy's own limits", "reason")
        about = "Requests refused before they were turns, by what their clients got"
        self.rejected = counter("ppd_rejected_requests", about, "status")
        self.queue_wait = times("ppd_queue_wait_seconds", "Waits in the queue, of turns that waited", TTFT_BUCKETS_S)
        self.loop_lag = times("ppd_loop_lag_seconds", "How late the event loop runs what is due", LAG_BUCKETS_S)
        self.encoder_items = counter("ppd_encoder_items", "Images, sounds and videos, by who encodes them", "decision")
        self.canaries = counter("ppd_canaries", "Tiny conversations over a pair of P and D", "result")
        self.ttft = spread("ppd_ttft_seconds", "Time to first token, at the proxy", TTFT_BUCKETS_S, "route")
        self.tpot = spread("ppd_tpot_seconds", "Mean time per output token", TPOT_BUCKETS_S, "route")
        self.legs = spread("ppd_leg_seconds", "Leg durations", TTFT_BUCKETS_S, "leg")
        about = "Relative errors of predicted times, by route, worker and figure"
        self.prediction_errors = PredictionErrors(
            spread("ppd_prediction_error", about, ERROR_BUCKETS, "route", "worker", "figure")
        )
        self.tokens = TurnTokens(self.registry)
        self.by_key = KeyCounters(
            counts("ppd_key_turns", "Turns by the name of the client's key", "key", "outcome"),
            counts("ppd_key_tokens", "Tokens by the name of the client's key", "key", "kind"),
        )
        self.residency_misses = counter("ppd_residency_misses", "LOCAL turns whose prefix was not cached after all")
        self.handoffs_missing = counter("ppd_handoffs_missing", "Prefill answers without a usable handoff", "reason")
        self.heartbeats = counter("ppd_heartbeats", "Messages on the heartbeat ports", "result")
        self.kv_events = counter("ppd_kv_events", "Engines' KV events, by what became of them", "kind", "role")
        self.kv_event_batches_dropped = counter("ppd_kv_event_batches_dropped", "KV event batches not used", "reason")
        self.kv_event_gaps = counter("ppd_kv_event_gaps", "Gaps in the numbers of KV event batches", "result")
        self.tokenized = counter("ppd_prompts_tokenized", "Prompts, by whether their tokens came in time", "result")
        self.token_counts = counter("ppd_token_counts", "Tokenised prompts that workers counted too", "result")
        self.passed_through = counter("ppd_passthrough_requests", "Requests outside of sessions", "endpoint", "status")
        self.config_reloads = counter("ppd_config_reloads", "Reads of a changed config, key or TLS file", "result")
        self._start_from_0(refusals)

    def _start_from_0(self, refusals: Iterable[str]) -> None:
        """What an alert must see rise is there before: to Prometheus, a series' first value is no rise."""
        self.config_reloads.labels("refused")
        self.heartbeats.labels("dropped")
        self.retries.labels("no_budget")
        for reason in refusals:
            self.refused.labels(reason)

    def reloaded(self, taken: bool) -> None:
        self.config_reloads.labels("taken" if taken else "refused").inc()

    def watch(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Adds gauges that are computed at each scrape."""
        self.registry.register(_Live(collect))


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


def laws_gauges(judged: Iterable[Judged]) -> Iterator[Metric]:
    labels = ("basis", "name", "figure")
    median = GaugeMetricFamily("ppd_prediction_error_median", "Median error over the newest turns", labels=labels)
    stale = GaugeMetricFamily("ppd_laws_stale", "1: a profile or a table that does not fit this fleet", labels=labels)
    for one in judged:
        values = (one.basis, one.name, one.figure)
        median.add_metric(values, one.median_error)
        stale.add_metric(values, float(one.stale))
    yield from (median, stale)


def data_plane_info(configured: DataPlane, is_built: bool) -> Metric:
    """What `ppd doctor --proxy` reads, too."""
    about, labels = "1; what serves turns over HTTP/1.1, was configured, and is built", ("plane", "configured", "built")
    info = GaugeMetricFamily("ppd_data_plane_info", about, labels=labels)
    info.add_metric((configured.serving(is_built), configured, "yes" if is_built else "no"), 1)
    return info


def lost_receipts(count: int) -> Metric:
    lost = CounterMetricFamily("ppd_receipts_lost", "Receipts that receipt_log did not take, as of a full disk")
    lost.add_metric((), count)
    return lost


def log_counters(lost: Mapping[str, int], held_back: int) -> Iterator[Metric]:
    """lost: by log."""
    lines = CounterMetricFamily("ppd_log_lines_lost", "Log lines that were lost, as on a full disk", labels=("log",))
    for log, count in lost.items():
        lines.add_metric((log,), count)
    yield lines
    held = CounterMetricFamily("ppd_log_lines_held_back", "Log lines beyond log_lines_per_minute of their kind")
    held.add_metric((), held_back)
    yield held


def gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric((), value)
    return family
