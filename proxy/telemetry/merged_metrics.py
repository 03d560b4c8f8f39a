"""The metrics of a proxy's processes, merged into one set.

Counters and histograms add up; a successor reports what its predecessor had counted. Gauges add up too, except those
that every process reports for the whole proxy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

OF_THE_WHOLE = frozenset(
    "ppd_workers ppd_inflight_legs ppd_queued_prefill_tokens ppd_sessions ppd_breakers_open "
    "ppd_prediction_error_median ppd_laws_stale ppd_workers_on_kv_events ppd_kv_event_blocks".split()
)
LARGEST = frozenset({"ppd_handoff_oldest_seconds", "ppd_data_plane_info"})


class MetricSample(msgspec.Struct, array_like=True, gc=False):
    """One line of Prometheus' text."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, array_like=True, gc=False):
    """One metric of one process, with the samples of all its labels."""

    name: str
    text: str
    kind: str
    samples: list[MetricSample]


_DECODER = msgspec.msgpack.Decoder(list[Family])


def families(registry: CollectorRegistry) -> list[Family]:
    """What this process has counted, without times of creation, which can't be added."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [
                MetricSample(sample.name, dict(sample.labels), sample.value)
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ],
        )
        for metric in registry.collect()
    ]


def encoded(counted: Iterable[Family]) -> bytes:
    return msgspec.msgpack.encode(list(counted))


def decoded(counted: bytes) -> list[Family]:
    return _DECODER.decode(counted)


def inherited(own: Iterable[Family], before: Iterable[Family]) -> list[Family]:
    """A process's own metrics with its predecessors' counters and histograms, but not their gauges."""
    return added([own, [family for family in before if family.kind != "gauge"]])


def added(processes: Iterable[Iterable[Family]]) -> list[Family]:
    """All processes' metrics as one; the first process is the one asked, whose gauges of the whole proxy are used."""
    sums: dict[str, tuple[Family, dict[tuple[str, frozenset[tuple[str, str]]], MetricSample]]] = {}
    for position, counted in enumerate(processes):
        for family in counted:
            if position and family.name in OF_THE_WHOLE:
                continue
            _, samples = sums.setdefault(family.name, (family, {}))
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                known = samples.get(key)
                value = sample.value if known is None else _joined(family.name, known.value, sample.value)
                samples[key] = MetricSample(sample.name, sample.labels, value)
    return [Family(about.name, about.text, about.kind, list(samples.values())) for about, samples in sums.values()]


def _joined(name: str, one: float, other: float) -> float:
    return max(one, other) if name in LARGEST else one + other


def render(counted: Iterable[Family]) -> bytes:
    """In Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Merged(counted))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, counted: Iterable[Family]) -> None:
        self._counted = counted

    def collect(self) -> Iterator[Metric]:
        for family in self._counted:
            metric = Metric(family.name, family.text, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric

    def describe(self) -> Iterable[Metric]:
        return ()
