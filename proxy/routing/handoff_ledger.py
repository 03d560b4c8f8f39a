"""The ledger of handoffs: prompts whose KV waits on a P for a D to pull it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

LEASE_S = 30.0  # vLLM's default: what no D has pulled by then, P frees by itself


class Ledger:
    """Handoffs that P announced and no D has pulled, by leg id, with the time P announced them.

    One that no D was asked for, as none could be reached or the client left, stays pinned on P until its lease ends,
    and is counted until then.
    """

    def __init__(self) -> None:
        self._opened_s: dict[str, float] = {}

    def open(self, leg_id: str, now_s: float) -> None:
        self.outstanding(now_s)
        self._opened_s[leg_id] = now_s

    def close(self, leg_id: str) -> None:
        self._opened_s.pop(leg_id, None)

    def has(self, leg_id: str) -> bool:
        return leg_id in self._opened_s

    def outstanding(self, now_s: float) -> int:
        # Insertion order is age order: the first is the oldest.
        while self._opened_s and now_s - next(iter(self._opened_s.values())) > LEASE_S:
            del self._opened_s[next(iter(self._opened_s))]
        return len(self._opened_s)

    def gauges(self, now_s: float) -> Iterator[Metric]:
        count = GaugeMetricFamily("ppd_handoffs_outstanding", "Handoffs announced by P and not yet pulled by D")
        count.add_metric((), self.outstanding(now_s))
        age = GaugeMetricFamily("ppd_handoff_oldest_seconds", "Age of the oldest outstanding handoff")
        age.add_metric((), now_s - next(iter(self._opened_s.values()), now_s))
        yield from (count, age)
