"""What one attempt at a turn tells the books of its workers, as its legs go on."""

from __future__ import annotations

from collections.abc import Mapping

from ..fleet.worker import WorkerId
from .beliefs import Beliefs
from .held import BeliefEvidence, Held, PromptEntry


class TurnTouches:
    """Touches the prompt's entries, and compares what answers say with what was believed at the decision."""

    __slots__ = ("_beliefs", "_decode", "_entry", "_held", "_prefill", "_prompt_tokens", "_touched")

    def __init__(
        self,
        beliefs: Beliefs,
        entry: PromptEntry,
        held: Mapping[WorkerId, Held],
        *,
        decode: WorkerId,
        prefill: WorkerId | None,
        prompt_tokens: int,
    ) -> None:
        """held: as the decision saw it; prompt_tokens: an estimate."""
        self._beliefs = beliefs
        self._entry = entry
        self._held = held
        self._decode = decode
        self._prefill = prefill
        self._prompt_tokens = prompt_tokens
        self._touched = 0  # when D had used the prefix before this turn

    def prefilled(self, cached: int | None) -> None:
        """The prompt's KV is on P, which had found so many of its tokens cached; None: P does not say."""
        assert self._prefill is not None, "only a SPLIT has a P"
        touched = self._last_touched(self._prefill)
        self._compare(self._prefill, touched, cached)
        self._touch(self._prefill)

    def answering(self) -> None:
        """The prompt's KV is on the answering worker from here on, whatever becomes of its answer."""
        self._touched = self._last_touched(self._decode)
        self._touch(self._decode)
        if self._entry.source is None:  # it opens its session: what begins like it may come at once
            self._beliefs.passed(self._entry.history, self._entry.marks)

    def answered(self, cached: int | None) -> None:
        """So many of the prompt's tokens had been cached on the answering worker; after a handoff it cannot say."""
        if self._prefill is None:
            self._compare(self._decode, self._touched, cached)

    def _last_touched(self, worker: WorkerId) -> int:
        source = self._entry.source
        return 0 if source is None else self._beliefs.touched(worker, source)

    def _touch(self, worker: WorkerId) -> None:
        where = self._beliefs.residency(worker, self._prompt_tokens)
        if where is not None:
            self._beliefs.touch(self._entry.history, where, self._entry.marks)

    def _compare(self, worker: WorkerId, touched: int, cached: int | None) -> None:
        held = self._held.get(worker)
        where = None if held is None else self._beliefs.residency(worker, held.tokens)
        if cached is not None and where is not None and held is not None and held.evidence is BeliefEvidence.OWN_TURNS:
            self._beliefs.found(self._entry.history, touched, where, cached)
