"""What turns hold of workers: the load of their legs, and the KV that a P keeps for a D to pull.

The dispatcher and the simulator book their legs here, so both worlds decide on the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from .registry import Registry
from .worker import WorkerId


class LegBooking:
    """The legs of one attempt: on D or R the one that answers, and for a SPLIT the one on P before it.

    Each call states what has happened. `free_prefill`, `computed` and `release` may come at any time, and twice.
    """

    __slots__ = (
        *("_computes_here", "_decode", "_holds_decode", "_holds_prefill", "_new_tokens", "_prefill", "_prompt_tokens"),
        "_registry",
    )

    def __init__(
        self, registry: Registry, decode: WorkerId, prefill: WorkerId | None, *, prompt_tokens: int, new_tokens: int
    ) -> None:
        """Estimates. prompt_tokens: what P computes; new_tokens: what the answering worker does not hold yet."""
        self._registry = registry
        self._decode = decode
        self._prefill = prefill
        self._prompt_tokens = prompt_tokens
        self._new_tokens = new_tokens
        self._holds_decode = self._holds_prefill = self._computes_here = False

    def reserve(self) -> None:
        """Both workers at the decision, or a burst of turns would all find the same workers idle."""
        if self._prefill is None:
            self._registry.reserve(self._decode, self._new_tokens, self._prompt_tokens)
            self._computes_here = True
        else:
            self._registry.reserve(self._decode, 0, self._prompt_tokens)  # what D pulls it does not compute
            self._registry.reserve(self._prefill, self._prompt_tokens, self._prompt_tokens)
            self._holds_prefill = True
        self._holds_decode = True

    def free_prefill(self) -> None:
        """P has ended its leg, well or not."""
        if self._holds_prefill:
            assert self._prefill is not None, "only a P is held so"
            self._holds_prefill = False
            self._registry.prefilled(self._prefill, self._prompt_tokens)
            self._registry.release(self._prefill)

    def computed(self) -> None:
        """The answering worker computes nothing more of the prompt: it has begun to answer, or has failed."""
        if self._computes_here:
            self._computes_here = False
            self._registry.prefilled(self._decode, self._new_tokens)

    @property
    def holds_prefill(self) -> bool:
        return self._holds_prefill

    def release(self) -> None:
        self.free_prefill()
        self.computed()
        if self._holds_decode:
            self._holds_decode = False
            self._registry.release(self._decode)


LEASE_S = 30.0  # vLLM's default: P frees KV that no D has pulled by then


class Ledger:
    """Handoffs that P announced and no D has pulled, by leg id, with the time of the announcement.

    One that no D will pull stays pinned on P until its lease ends, and is counted until then.
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
