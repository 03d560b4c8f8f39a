"""What turns hold of workers: the load of their legs, and the KV that a P keeps for a D to pull.

The dispatcher and the simulator book their legs here, so both worlds decide on the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from .ledger import LegEstimates, LegWork, Use, prefill_left_s
from .registry import Registry
from .worker import WorkerId


class LegBooking:
    """The legs of one attempt: on D or R the one that answers, and for a SPLIT the one on P, or a lender, before it.

    Each call states what has happened. `free_prefill`, `computed` and `release` may come at any time, and twice. What
    was booked on a worker that has left since is gone with it, and is not taken from what it does when it is back.
    """

    __slots__ = (
        *("_answering", "_computes_here", "_decode", "_decode_use", "_estimates", "_fetch", "_handover", "_prefill"),
        *("_prefill_use", "_prefilling", "_registry", "_source"),
    )

    def __init__(
        self,
        registry: Registry,
        decode: WorkerId,
        prefill: WorkerId | None,
        estimates: LegEstimates,
        source: WorkerId | None = None,
    ) -> None:
        """source: from which the worker that computes the prompt first fetches KV."""
        self._registry = registry
        self._decode = decode
        self._prefill = prefill
        self._source = source
        self._estimates: LegEstimates | None = estimates  # None: what is booked follows from them
        self._answering: LegWork | None = None  # None: nothing is held there
        self._prefilling: LegWork | None = None  # the same
        self._computes_here = False  # who answers
        self._decode_use: Use | None = None  # None: the worker has left
        self._prefill_use: Use | None = None
        self._fetch: _Move | None = None  # None: nothing is moved so
        self._handover: _Move | None = None  # the same, or it has been

    def reserve(self, now_s: float) -> None:
        """Both workers at the decision, or a burst of turns would all find the same workers idle."""
        assert self._estimates is not None, "it is reserved once"
        estimates, self._estimates, is_split = self._estimates.possible(), None, self._prefill is not None
        prefill_s, beside_s = 0.0, 0.0
        new, output = estimates.new_tokens, estimates.output_tokens
        fetched, computed = estimates.fetched_tokens, 0
        if not is_split:  # else D pulls it, and computes nothing
            computed = new - fetched if new > fetched else 1
            prefill_s, beside_s = estimates.prefill_s, estimates.beside_s
        self._answering = answering = LegWork(
            prefill_tokens=computed,
            prefill_s=prefill_s,
            beside_s=beside_s,
            placed_tokens=new,
            context_tokens=estimates.prompt_tokens + output // 2 or 1,
            reserved_tokens=new + output,
            ready_s=estimates.ready_s,
            patience_s=estimates.patience_s,
            shows_first_token=estimates.shows_first_token,
        )
        if self._source is not None and (link_s := estimates.fetch_link_s):
            ends = self._source, self._prefill or self._decode
            self._fetch = _Move.begun(self._registry, ends, 0.0, link_s, now_s)
        if self._prefill is not None:
            self._reserve_prefill(self._prefill, estimates, fetched, now_s)
        self._decode_use = self._registry.begin(self._decode, answering, now_s)
        self._computes_here = not is_split

    def _reserve_prefill(self, prefill: WorkerId, estimates: LegEstimates, fetched: int, now_s: float) -> None:
        prefill_s = estimates.prefill_s
        new = estimates.new_on_prefill_tokens
        self._prefilling = prefilling = LegWork(
            prefill_tokens=max(1, new - fetched),
            prefill_s=prefill_s,
            beside_s=estimates.beside_s,
            placed_tokens=new if estimates.is_lent else 0,
            reserved_tokens=new,
            ready_s=estimates.ready_s,
            patience_s=estimates.patience_s,
        )
        if link_s := estimates.link_s:
            computed_s = prefill_s + self._left_s(prefill, now_s)
            self._handover = _Move.begun(self._registry, (prefill, self._decode), computed_s, link_s, now_s)
        self._prefill_use = self._registry.begin(prefill, prefilling, now_s)

    def free_prefill(self, now_s: float) -> None:
        """P has ended its leg, well or not."""
        prefilling, self._prefilling = self._prefilling, None
        if prefilling is None:
            return
        assert self._prefill is not None, "only a P is held so"
        if self._fetch is not None:
            self._fetch.end(self._registry, now_s)
        if (use := self._prefill_use) is not None:
            use.computed(prefilling, now_s)
            use.end(prefilling)
            self._registry.use_changed(self._prefill, use, legs=True)

    def computed(self, now_s: float) -> None:
        """The answering worker computes nothing more of the prompt, and has its KV: it answers, or has failed."""
        if (use := self._note_computed(now_s)) is not None:
            self._registry.use_changed(self._decode, use)

    def _note_computed(self, now_s: float) -> Use | None:
        """Returns what this process does on the answering worker, if that has changed."""
        changed = None
        if self._computes_here:
            self._computes_here = False
            if self._fetch is not None:
                self._fetch.end(self._registry, now_s)
            if self._decode_use is not None and self._answering is not None:
                changed = self._decode_use
                changed.computed(self._answering, now_s)
        if self._handover is not None:
            self._handover.end(self._registry, now_s)
            self._handover = None
        return changed

    @property
    def holds_prefill(self) -> bool:
        return self._prefilling is not None

    def release(self, now_s: float) -> None:
        answering = self._answering
        if answering is None:  # the last that is given back, as the first that is reserved
            return
        if self._prefilling is not None:
            self.free_prefill(now_s)
        if self._computes_here or self._handover is not None:
            self._note_computed(now_s)
        self._answering = None
        if (use := self._decode_use) is not None:
            use.end(answering)
            self._registry.use_changed(self._decode, use, legs=True)

    def _left_s(self, worker: WorkerId, now_s: float) -> float:
        """Until prompts of other turns are computed there."""
        return 0.0 if self._registry.use(worker) is None else prefill_left_s(self._registry.total_use(worker), now_s)


class _Move:
    """KV on its way from one worker to another, which takes the link of each."""

    __slots__ = ("_done_s", "_from", "_receives", "_sends", "_to", "_transfer_s")

    def __init__(
        self, ends: tuple[WorkerId, WorkerId], uses: tuple[Use, Use], transfer_s: float, done_s: float
    ) -> None:
        self._from, self._to = ends
        self._sends, self._receives = uses
        self._transfer_s = transfer_s
        self._done_s = done_s

    @classmethod
    def begun(
        cls, registry: Registry, ends: tuple[WorkerId, WorkerId], after_s: float, transfer_s: float, now_s: float
    ) -> _Move | None:
        """ends: the sender and the receiver; None where one of them has left.

        The sender's link is in use from `after_s` on, when it has computed what it sends; the receiver's may serve
        others until then.
        """
        sends, receives = map(registry.use, ends)
        if sends is None or receives is None:
            return None
        by_all, to_all = map(registry.total_use, ends)
        done_s = max(now_s + after_s, by_all.sends_free_s, to_all.receives_free_s) + transfer_s
        sends.begin_sending(done_s)
        receives.begin_receiving(max(now_s, to_all.receives_free_s) + transfer_s, transfer_s)
        return cls(ends, (sends, receives), transfer_s, done_s)

    def end(self, registry: Registry, now_s: float) -> None:
        """The KV is there, or will not be moved."""
        transfer_s = self._transfer_s
        self._sends.end_sending(min(transfer_s, max(0.0, self._done_s - now_s)), now_s)
        registry.use_changed(self._from, self._sends)
        self._receives.end_receiving(transfer_s, now_s)
        registry.use_changed(self._to, self._receives)


LEASE_S = 30.0  # vLLM's default: P frees KV that no D has pulled by then


class OpenHandoffs:
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
