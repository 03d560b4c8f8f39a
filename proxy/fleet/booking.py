"""What turns hold of workers: the load of their legs, and the KV that a P keeps for a D to pull.

The dispatcher and the simulator book their legs here, so both worlds decide on the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from .ledger import LONGEST_S, MOST_TOKENS, LegEstimates, LegWork, Use, prefill_left_s
from .registry import Registry
from .worker import WorkerId


class LegBooking:
    """The legs of one attempt: on D or R the one that answers, and for a SPLIT the one on P before it.

    Each call states what has happened. `free_prefill`, `computed` and `release` may come at any time, and twice. What
    was booked on a worker that has left since is gone with it, and is not taken from what it does when it is back.
    """

    __slots__ = (
        *("_answering", "_computes_here", "_decode", "_decode_use", "_estimates", "_holds_decode", "_holds_prefill"),
        *("_moved_s", "_prefill", "_prefill_use", "_prefilling", "_registry", "_transfer_s"),
    )

    def __init__(self, registry: Registry, decode: WorkerId, prefill: WorkerId | None, estimates: LegEstimates) -> None:
        self._registry = registry
        self._decode = decode
        self._prefill = prefill
        self._estimates = estimates
        self._holds_decode = self._holds_prefill = self._computes_here = False
        self._decode_use: Use | None = None  # None: the worker has left
        self._prefill_use: Use | None = None
        self._moved_s: float | None = None  # when the links should have moved the KV; None: they need not, or have

    def reserve(self, now_s: float) -> None:
        """Both workers at the decision, or a burst of turns would all find the same workers idle."""
        estimates, prefill_s = self._estimates, _seconds(self._estimates.prefill_s)
        new, output = _tokens(estimates.new_tokens), _tokens(estimates.output_tokens)
        prompt, is_split = _tokens(estimates.prompt_tokens), self._prefill is not None
        self._answering = LegWork(
            prefill_tokens=0 if is_split else new,  # what D pulls it does not compute
            prefill_s=0.0 if is_split else prefill_s,
            placed_tokens=new,
            context_tokens=prompt + output // 2 or 1,
            reserved_tokens=new + output,
            shows_first_token=estimates.shows_first_token,
        )
        if self._prefill is not None:
            self._prefilling = LegWork(
                prefill_tokens=prompt,
                prefill_s=prefill_s,
                reserved_tokens=_tokens(estimates.new_on_prefill_tokens),
            )
            if transfer_s := _seconds(estimates.transfer_s):
                self._begin_transfer(self._prefill, prefill_s, transfer_s, now_s)
            self._prefill_use = self._registry.begin(self._prefill, self._prefilling, now_s)
            self._holds_prefill = True
        self._decode_use = self._registry.begin(self._decode, self._answering, now_s)
        self._computes_here = not is_split
        self._holds_decode = True

    def free_prefill(self, now_s: float) -> None:
        """P has ended its leg, well or not."""
        if self._holds_prefill:
            assert self._prefill is not None, "only a P is held so"
            self._holds_prefill = False
            self._registry.computed(self._prefill, self._prefill_use, self._prefilling, now_s)
            self._registry.end(self._prefill, self._prefill_use, self._prefilling)

    def computed(self, now_s: float) -> None:
        """The answering worker computes nothing more of the prompt, and has its KV: it answers, or has failed."""
        if self._computes_here:
            self._computes_here = False
            self._registry.computed(self._decode, self._decode_use, self._answering, now_s)
        if self._moved_s is not None:
            self._end_transfer(self._moved_s, now_s)

    @property
    def holds_prefill(self) -> bool:
        return self._holds_prefill

    def release(self, now_s: float) -> None:
        self.free_prefill(now_s)
        self.computed(now_s)
        if self._holds_decode:
            self._holds_decode = False
            self._registry.end(self._decode, self._decode_use, self._answering)

    def _begin_transfer(self, prefill: WorkerId, prefill_s: float, transfer_s: float, now_s: float) -> None:
        """Takes both links. P's is in use from when P should be done; D's may serve others until then."""
        sends, receives = self._registry.use(prefill), self._registry.use(self._decode)
        if sends is None or receives is None:  # one has left meanwhile
            return
        by_all, to_all = self._registry.total_use(prefill), self._registry.total_use(self._decode)
        computed_s = now_s + prefill_left_s(by_all, now_s) + prefill_s
        self._moved_s = max(computed_s, by_all.sends_free_s, to_all.receives_free_s) + transfer_s
        self._transfer_s = transfer_s
        sends.begin_sending(self._moved_s)
        receives.begin_receiving(max(now_s, to_all.receives_free_s) + transfer_s, transfer_s)

    def _end_transfer(self, moved_s: float, now_s: float) -> None:
        """The KV is there, or will not be moved."""
        sends, receives, transfer_s = self._prefill_use, self._decode_use, self._transfer_s
        assert self._prefill is not None and sends is not None and receives is not None, "the links were taken"
        self._moved_s = None
        sends.end_sending(min(transfer_s, max(0.0, moved_s - now_s)), now_s)
        self._registry.use_changed(self._prefill, sends)
        receives.end_receiving(transfer_s, now_s)
        self._registry.use_changed(self._decode, receives)


def _tokens(estimate: int) -> int:
    return min(max(0, estimate), MOST_TOKENS)


def _seconds(estimate: float) -> float:
    return estimate if 0.0 < estimate <= LONGEST_S else 0.0  # neither holds of NaN


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
