"""The ledger of handoffs: prompts whose KV waits on a P for a D to pull it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

# A lease lasts 30 s and D's heartbeats extend it. A handoff that D has not been asked to pull by then must not be
# used at all: the pull would succeed, and read blocks that may hold another prompt by now.
USABLE_S = 20.0


class Ledger:
    """Handoffs that P announced and no D has finished pulling, by leg id, with the time P announced them."""

    def __init__(self) -> None:
        self._opened_s: dict[str, float] = {}

    def open(self, leg_id: str, now_s: float) -> None:
        self._opened_s[leg_id] = now_s

    def close(self, leg_id: str) -> None:
        self._opened_s.pop(leg_id, None)

    def __len__(self) -> int:
        return len(self._opened_s)

    def gauges(self, now_s: float) -> Iterator[Metric]:
        count = GaugeMetricFamily("ppd_handoffs_outstanding", "Handoffs announced by P and not yet pulled by D")
        count.add_metric((), len(self._opened_s))
        age = GaugeMetricFamily("ppd_handoff_oldest_seconds", "Age of the oldest outstanding handoff")
        # Insertion order is age order: the first is the oldest.
        age.add_metric((), now_s - next(iter(self._opened_s.values()), now_s))
        yield from (count, age)
