"""What is kept of a turn in the sidecar: its receipt. Sessions and beliefs are the picker's."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from ppd.proxy.discovery.turn_report import LONGEST_NAME, TurnReport
from ppd.proxy.failures import Leg, Phase
from ppd.proxy.routing.attempt import Attempt
from ppd.proxy.routing.learning import ReceiptEnds, SeenAnswer
from ppd.proxy.routing.receipt_notes import decision_headers
from ppd.proxy.runtime.tasks import Drain
from ppd.proxy.sessions.matching import MatchKind, SessionMatch
from ppd.proxy.telemetry.metrics import Metrics
from ppd.proxy.telemetry.receipts import Receipt
from ppd.proxy.upstream.sidecar import LEGS, MOST_LEGS, NOT_ALLOWED, EndedLeg, SplitLegs

from .reporter import report_of

NOT_NAMED = "no_prefill_named"  # reason of a turn whose head names no P
NO_SESSION = SessionMatch(session_id="", turn=1, kind=MatchKind.FIRST, held_tokens=0, new_bytes=0, added=(), history=0)


def explained(receipt: Receipt, attempt: Attempt | None = None) -> dict[str, str]:
    """The headers that tell what was done, and where a P was named also how its leg went. attempt: None: it failed."""
    headers = decision_headers(receipt)
    ended = [
        EndedLeg(
            kind=leg.kind,
            started_s=leg.started_s,
            ended_s=leg.ended_s,
            status=leg.status,
            phase=leg.phase,
            error=leg.error or "",
        )
        for leg in receipt.legs
        if leg.ended_s is not None
    ]
    if receipt.error == NOT_ALLOWED:
        ended.append(EndedLeg(kind=Leg.PREFILL, phase=Phase.CONNECT, error=NOT_ALLOWED))
    if receipt.reason not in ("", NOT_NAMED) or any(leg.kind is Leg.PREFILL for leg in ended):
        handoff = None if attempt is None else attempt.handoff
        told = SplitLegs(
            legs=ended[-MOST_LEGS:],
            is_handed_over=handoff is not None,
            is_by_prefill=attempt is not None and attempt.is_finished_on_prefill,
            cached_tokens=None if handoff is None else handoff.cached_tokens,
        )
        headers[LEGS.decode()] = told.encode()
    return headers


class Records(ReceiptEnds):
    """In place of `Learner`. What a turn has taught is told to the picker, where there is one that listens."""

    def __init__(
        self,
        metrics: Metrics,
        drain: Drain,
        log: Callable[[Receipt], None] | None,
        report: Callable[[TurnReport], None] | None,
    ) -> None:
        super().__init__(metrics, drain, log)
        self._report = report

    def of(self, turn_id: str) -> Records:
        """Those of one turn, of which the picker is told by this id; empty: it gave none."""
        report = self._report
        if report is None or not turn_id:
            return self
        named = turn_id[:LONGEST_NAME]
        return Records(self._metrics, self._drain, self._log, lambda told: report(replace(told, turn_id=named)))

    def completed(self, match: SessionMatch, attempt: Attempt, answer: SeenAnswer, now_s: float) -> None:
        receipt, handoff = attempt.receipt, attempt.handoff
        summary, token_times_s = answer.summary, answer.token_times_s
        receipt.status, receipt.finish_reason = 200, summary.finish_reason
        receipt.prompt_tokens, receipt.completion_tokens = summary.prompt_tokens, summary.completion_tokens
        # After a handoff D counts all KV that it pulled as cached; P's answer has the true count.
        receipt.cached_tokens = handoff.cached_tokens if handoff else summary.cached_tokens
        if token_times_s is not None:
            times = (attempt.started_s, token_times_s, summary.completion_tokens)
            self._note_times(receipt, attempt.decision.route, *times)
        super()._close(receipt, "completed", now_s - attempt.started_s)
        if self._report is not None:
            report = report_of(
                receipt,
                last_token_s=None if token_times_s is None else token_times_s[1] - attempt.started_s,
                prefill_cached_tokens=handoff.cached_tokens if handoff else None,
                decode_cached_tokens=None if handoff else summary.cached_tokens,
            )
            self._report(report)

    def _close(self, receipt: Receipt, outcome: str, ended_s: float) -> None:
        super()._close(receipt, outcome, ended_s)
        if self._report is not None:
            self._report(report_of(receipt))
