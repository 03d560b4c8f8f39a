"""What the proxy learns from a finished turn: token counts, residency and times."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from ..beliefs.cache_book import BLOCK_TOKENS
from ..errors import PPDError
from ..laws.corrections import TPOT, TTFT
from ..laws.forecasts import AnswerEnded, SessionReturned
from ..openai.answer import AnswerSummary
from ..openai.reply_key import ReplyKey
from ..policy import Route
from ..runtime.tasks import Drain, draining
from ..sessions.prefix_chain import PrefixEnd
from ..sessions.table import SessionMatch, TurnOutcome
from ..telemetry.metrics import Metrics
from ..telemetry.receipts import LEGS_OF_ONE, Receipt, ReceiptLog, Receipts
from .attempt import Attempt
from .foresight import came_to
from .reading_back import keep
from .receipt_notes import error_name, note_errors
from .state import State

log = logging.getLogger(__name__)

LOCAL, READBACK = Route.LOCAL, Route.READBACK  # quicker to look up

# A LOCAL turn is a residency miss where it found less than this share of what was believed resident, and lacks more
# than two blocks: engines cache whole blocks, so nothing of a shorter prefix may ever be found again.
MISS_SHARE = 0.5
MISS_TOKENS = 2 * BLOCK_TOKENS


class SeenAnswer(msgspec.Struct, frozen=True):
    """What a completed turn teaches, whoever has seen its answer: this process, or a sidecar that reports."""

    summary: AnswerSummary
    reply: ReplyKey
    token_times_s: tuple[float, float] | None = None  # of the first and the last token; None: it was not streamed


class ReceiptEnds:
    """Closes receipts, and counts what they say. What a completed turn teaches is told by those that inherit."""

    _receipts: Receipts | None = None  # that are kept

    def __init__(self, metrics: Metrics, drain: Drain, log: Callable[[Receipt], None] | None) -> None:
        """log: told each receipt, once it is closed."""
        self._metrics = metrics
        self._drain = drain
        self._log = log

    def unanswered(
        self,
        receipt: Receipt,
        exc: BaseException,
        ended_s: float,
        name: Callable[[PPDError], str] = error_name,
    ) -> None:
        """A turn has come to no answer: it was refused, or has failed, or its client has gone."""
        if isinstance(exc, asyncio.CancelledError):
            self.cancelled(receipt, ended_s, is_answered=False)
        elif isinstance(exc, PPDError):
            receipt.status, receipt.error = exc.status, name(exc)
            self.failed(receipt, ended_s, by_request=exc.is_of_request)
        else:  # an error of ours
            receipt.status, receipt.error = PPDError.status, PPDError.kind
            self.failed(receipt, ended_s)

    def failed(self, receipt: Receipt, ended_s: float, *, by_request: bool = False) -> None:
        """by_request: it was at fault itself (PPDError.is_of_request), so nothing of the fleet has failed."""
        self._close(receipt, "rejected" if by_request else "failed", ended_s)

    def cancelled(self, receipt: Receipt, ended_s: float, *, is_answered: bool) -> None:
        """By its client, or by the end of a drain. is_answered: the client has the beginning of an answer."""
        if not self._drain.is_cut:
            receipt.status = 499
            self._close(receipt, "cancelled", ended_s)
            return
        refusal = draining()
        receipt.error = refusal.reason
        if is_answered:
            self.broken(receipt, ended_s)
        else:
            receipt.status = refusal.status
            self.failed(receipt, ended_s)

    def broken(self, receipt: Receipt, ended_s: float) -> None:
        receipt.status = 200
        self._close(receipt, "broken", ended_s)

    def _close(self, receipt: Receipt, outcome: str, ended_s: float) -> None:
        receipt.outcome, receipt.ended_s = outcome, ended_s
        for leg in receipt.legs:  # those that are closed after this
            if leg.ended_s is None:
                leg.ended_s = ended_s
        self._metrics.turns.add(receipt.route, receipt.reason, outcome)
        if receipt.encoder is not None:
            for decision in receipt.encoder.decisions:
                self._metrics.encoder_items.labels(decision).inc()
        if (len(receipt.legs) >= LEGS_OF_ONE or receipt.encoder is not None) and self._receipts is not None:
            self._receipts.ended(receipt)
        if receipt.client:  # else no key is required
            tokens = receipt.prompt_tokens or 0, receipt.completion_tokens or 0
            self._metrics.by_key.turn(receipt.client, outcome, *tokens)
        if self._log is not None:
            self._log(receipt)

    def _note_times(
        self,
        receipt: Receipt,
        route: Route,
        started_s: float,
        token_times_s: tuple[float, float],
        completion_tokens: int | None,
    ) -> None:
        first_s, last_s = token_times_s
        receipt.ttft_s = first_s - started_s
        self._metrics.ttft.observe(receipt.ttft_s, route)
        if completion_tokens is not None and completion_tokens > 1:
            receipt.tpot_s = (last_s - first_s) / (completion_tokens - 1)
            self._metrics.tpot.observe(receipt.tpot_s, route)


class Learner(ReceiptEnds):
    """Closes receipts. Only a completed turn changes its session."""

    def __init__(self, state: State, drain: Drain, log: ReceiptLog | None) -> None:
        super().__init__(
            state.metrics, drain, None if log is None else lambda one: log.write(state.receipts.written(one))
        )
        self._state = state
        self._receipts = state.receipts
        self._sessions = state.sessions
        self._tokens = state.tokens
        self._templates = state.templates
        self._beliefs = state.beliefs
        self._engine_caches = state.engine_caches
        self._rate_limits = state.rate_limits
        self._count_checks = state.count_checks
        self._laws = state.laws
        self._forecasts = state.forecasts

    def completed(self, match: SessionMatch, attempt: Attempt, answer: SeenAnswer, now_s: float) -> None:
        receipt = attempt.receipt
        receipt.status = 200
        receipt.finish_reason = answer.summary.finish_reason
        try:
            self._learn(match, attempt, answer, now_s)
        except Exception:
            # The answer is whole, and its client is to have it, whatever is wrong with what it taught.
            log.exception("request %s: not all that its answer taught is known", receipt.id)
        self._close(receipt, "completed", now_s - attempt.started_s)

    def _learn(self, match: SessionMatch, attempt: Attempt, answer: SeenAnswer, now_s: float) -> None:
        receipt, route = attempt.receipt, attempt.decision.route
        summary, token_times_s = answer.summary, answer.token_times_s
        if token_times_s is not None:
            self._note_times(receipt, route, attempt.started_s, token_times_s, summary.completion_tokens)
            self._note_predictions(attempt, summary, token_times_s[0], now_s)
            if attempt.decision.prediction is not None:
                note_errors(receipt, attempt.decision.prediction, token_times_s[0] - attempt.asked_s)
        if summary.prompt_tokens is not None:
            self._note_usage(match, attempt, answer, now_s)
            if self._engine_caches and attempt.request.choices == 1 and not attempt.is_finished_on_prefill:
                self._await_events(attempt, now_s)

    def assumed(self, match: SessionMatch, attempt: Attempt, reply: PrefixEnd | None, now_s: float) -> None:
        """An answer without usage, or that nobody saw (reply: None): its session goes on by what was estimated."""
        receipt, decision = attempt.receipt, attempt.decision
        receipt.status, receipt.counts_evidence = 200, "estimate"
        prompt, completion = receipt.estimated_prompt_tokens, receipt.estimated_output_tokens
        residency = self._beliefs.residency
        outcome = TurnOutcome(
            prompt_tokens=prompt,
            completion_tokens=completion,
            reply_key=reply,
            decode=residency(attempt.decode, prompt + completion),
            prefill=residency(decision.prefill.id, prompt) if decision.prefill else None,
        )
        self._sessions.finish(match, attempt.request.prompt, outcome, now_s)
        self._close(receipt, "completed", now_s - attempt.started_s)

    def began(self, match: SessionMatch, model: str, now_s: float) -> None:
        """A turn has come."""
        if match.ended_s is not None:
            self._forecasts.learn(SessionReturned(model, match.turn - 1, match.calls_tool, match.ended_s, now_s))

    def _note_predictions(self, attempt: Attempt, summary: AnswerSummary, first_s: float, now_s: float) -> None:
        """Nothing where P's part was lost, so that D computed what P was to."""
        if attempt.foreseen is None or (attempt.decision.prefill is not None and attempt.handoff is None):
            return
        cached = attempt.handoff.cached_tokens if attempt.handoff else summary.cached_tokens
        prompt, computed = summary.prompt_tokens, None
        if prompt is not None and cached is not None:
            computed = max(1, prompt - cached)
        times = came_to(
            attempt.foreseen,
            first_s - attempt.asked_s,
            attempt.receipt.tpot_s,
            computed_tokens=computed,
            output_tokens=summary.completion_tokens or 0,
            choices=attempt.request.choices,
        )
        prefill = attempt.decision.prefill or attempt.decision.decode
        names = {TTFT: prefill.name, TPOT: attempt.decision.decode.name}
        for one in times.by_profile:
            if one.is_sound:
                self._metrics.prediction_errors.observe(
                    attempt.decision.route, names[one.figure], one.figure, one.error
                )
        if times.by_profile or times.by_table:
            self._laws.learn(times, now_s)

    def _note_usage(self, match: SessionMatch, attempt: Attempt, answer: SeenAnswer, now_s: float) -> None:
        request, decision, receipt, reply = attempt.request, attempt.decision, attempt.receipt, answer.reply
        summary, handoff, route = answer.summary, attempt.handoff, decision.route
        prompt, completion = summary.prompt_tokens or 0, summary.completion_tokens or 0
        # After a handoff D counts all KV that it pulled as cached; P's answer has the true count.
        cached = summary.cached_tokens if handoff is None else handoff.cached_tokens
        receipt.prompt_tokens, receipt.completion_tokens, receipt.cached_tokens = prompt, completion, cached
        # A worker that reports no usage leaves the estimate charged.
        self._rate_limits.settle(attempt.client, attempt.charged_tokens, prompt + completion, now_s)
        self._metrics.tokens.add(route, prompt, cached or 0, completion)
        held_tokens, calls_tool = decision.cached_tokens, reply.calls_tool
        found = cached if request.counts_tell else None  # in the cache
        if route is LOCAL and found is not None and found < min(held_tokens * MISS_SHARE, held_tokens - MISS_TOKENS):
            self._metrics.residency_misses.inc()
        # What an unknown stored response adds to the prompt has tokens, but no bytes here.
        is_whole = request.counts_tell and (match.source is not None or request.prompt.previous_response_id is None)
        self._tokens.learn(request.model, match.added if is_whole else (), prompt - match.held_tokens, completion)
        if request.choices == 1:
            self._forecasts.learn(AnswerEnded(request.model, match.turn, calls_tool, now_s))
        if attempt.count is not None:
            self._count_checks.learn(attempt.count, prompt)
        prefill, residency = decision.prefill, self._beliefs.residency
        is_read_back = route is READBACK  # P then holds the prompt under a name that nobody asks for
        is_on_decode = not attempt.is_finished_on_prefill
        if is_on_decode:
            self._learn_template(attempt, prompt, found)
        attempt.touches.answered(None if is_read_back else found)
        outcome = TurnOutcome(
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=found if handoff is None and held_tokens and is_on_decode else None,
            reply_key=reply.key(),
            response_id=summary.response_id,
            reasoned=reply.reasoned,
            reply_alone=reply.alone(),
            calls_tool=calls_tool,
            decode=residency(attempt.decode, prompt + completion) if is_on_decode else None,
            prefill=None if prefill is None or is_read_back else residency(prefill.id, prompt),
        )
        self._sessions.finish(match, request.prompt, outcome, now_s)
        if summary.handle is not None or self._state.handles.kept:
            keep(self._state, match, attempt, summary)

    def _await_events(self, attempt: Attempt, now_s: float) -> None:
        receipt, decode, prefill = attempt.receipt, attempt.decision.decode, attempt.decision.prefill
        prompt, completion = receipt.prompt_tokens or 0, receipt.completion_tokens or 0
        computed = prompt - (prompt if receipt.cached_tokens is None else receipt.cached_tokens)
        stored = self._engine_caches.stored
        if prefill is not None:
            if attempt.decision.route is not READBACK:
                stored(prefill.id, attempt.history, prompt, computed, now_s)
            computed = 0  # D does not say how much of a handoff it had
        stored(decode.id, attempt.history, prompt + completion, computed + completion, now_s)

    def _learn_template(self, attempt: Attempt, prompt: int, cached: int | None) -> None:
        asked, worker, prefill = attempt.request.prompt, attempt.decode, attempt.decision.prefill
        if prefill is not None:
            self._templates.computed(worker, prompt)
            worker = prefill.id
        if attempt.decision.route is READBACK:  # what P found was not its own
            return
        if self._templates.learn(asked.model, worker, asked.chain, prompt, cached):
            first = "tools" if self._templates.known.of(asked.model).tools_first else "the system's text"
            log.info("model %s: its template renders %s first, by what workers have found cached", asked.model, first)
