"""One turn from request to answer: find its session, decide, run the legs, relay, and learn from what came back.

The decision is redone without the workers that failed, as long as no byte has gone to the client: a P that fails is
replaced by another, and where there is none the policy itself falls back to a turn without hand-over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from .config import ProxyConfig
from .dispatch import ABORTED, Dispatcher, Opened, Running
from .errors import AnswerTimeout, LegError, NoWorkerError, PPDError, WorkerRefused, WorkerUnreachable
from .learning import Learner
from .policy import Decision, Route, Rules, Turn, decide
from .rates import RateMeter
from .receipts import CellRecord, Receipt
from .replies import ReplyKey
from .sessions import Place
from .state import State
from .turns import Request
from .workers import Role

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Reply:
    """What the client gets: a head, then a whole body or a stream."""

    content_type: str
    headers: dict[str, str]
    body: bytes | AsyncIterator[bytes]


class Router:
    """Routes turns. `rules` is replaced whole when weights, mode or table change."""

    def __init__(
        self,
        config: ProxyConfig,
        rules: Rules,
        state: State,
        dispatcher: Dispatcher,
        learner: Learner,
    ) -> None:
        self.rules = rules
        self._attempts = config.attempts
        self._state = state
        self._dispatcher = dispatcher
        self._learner = learner
        self._now = state.now
        self._turns = RateMeter(config.qps_window_s, state.now())
        self._conversations = RateMeter(config.qps_window_s, state.now())

    async def answer(
        self, request: Request, receipt: Receipt, headers: Mapping[str, str], forced: Route | None = None
    ) -> Reply:
        """The reply to one turn; PPDError where there is none. `headers` go to every leg."""
        started_s = self._now()
        place = self._state.sessions.find(request, started_s)
        turn = self._turn(request, place, forced)
        self._count(turn, started_s)
        _note_turn(receipt, place, turn)
        self._state.receipts.open(receipt)
        try:
            running, opened = await self._first_success(request, turn, receipt, headers, started_s)
        except PPDError as exc:
            receipt.status, receipt.error = exc.status, type(exc).__name__
            self._learner.failed(receipt, self._now() - started_s)
            raise
        except asyncio.CancelledError:
            self._learner.cancelled(receipt, self._now() - started_s)
            raise
        task = asyncio.current_task()
        assert task is not None, "runs in the request's task"
        # The client may leave before a stream is first read, when a generator's `finally` would never run.
        task.add_done_callback(lambda _: self._abandon(running))
        if opened.relay is not None:
            return Reply(opened.content_type, decision_headers(receipt), self._stream(place, running, opened))
        if opened.observer.summary.completed:
            self._learner.completed(place, running, opened, self._now())
        else:
            self._learner.broken(receipt, self._now() - started_s)
        running.close()
        return Reply(opened.content_type, decision_headers(receipt), opened.first)

    async def _first_success(
        self,
        request: Request,
        turn: Turn,
        receipt: Receipt,
        headers: Mapping[str, str],
        started_s: float,
    ) -> tuple[Running, Opened]:
        """Attempts until one has an answer, each without the workers that failed before it."""
        failed: dict[str, LegError] = {}
        answering = prefilling = 0  # failures so far
        while True:
            avoid = [*failed]
            if prefilling >= self._attempts:  # enough of them: the turn is computed without a hand-over
                avoid += [view.id for view in self._state.registry.views() if view.role is Role.PREFILL]
            try:
                decision = self._decide(turn, receipt, avoid)
            except NoWorkerError:
                if not failed:
                    raise
                break
            running = Running(
                request=request,
                decision=decision,
                receipt=receipt,
                headers=headers,
                reply=ReplyKey(request),
                started_s=started_s,
            )
            try:
                return running, await self._dispatcher.open(running)
            except LegError as exc:
                if not may_retry(exc):
                    raise
                is_prefill = decision.prefill is not None and exc.worker == decision.prefill.id
                self._give_up_on(exc, "prefill" if is_prefill else "answer")
                failed[exc.worker] = exc
                prefilling += is_prefill
                answering += not is_prefill
                if answering >= self._attempts:
                    break
        raise next(reversed(failed.values()))

    def _decide(self, turn: Turn, receipt: Receipt, avoid: Sequence[str]) -> Decision:
        now_s, rules = self._now(), self.rules
        counts_turns = rules.scored is not None and rules.scored.table.axes.qps_counts == "turns"
        qps = (self._turns if counts_turns else self._conversations).rate_rps(now_s)
        decision = decide(turn, self._state.registry.views(), rules, qps=qps, now_s=now_s, avoid=avoid)  # type: ignore[arg-type]
        _note_decision(receipt, turn, decision, rules)
        return decision

    def _give_up_on(self, exc: LegError, leg: str) -> None:
        self._state.metrics.failures.labels(leg, type(exc).__name__).inc()
        if isinstance(exc, WorkerUnreachable):
            self._state.registry.suspect(exc.worker, self._now())  # type: ignore[arg-type]
        log.warning("worker %s failed a turn: %s", exc.worker, exc)

    async def _stream(self, place: Place, running: Running, opened: Opened) -> AsyncIterator[bytes]:
        """The answer's bytes as they come; a stream that breaks ends with an error event in OpenAI's shape."""
        answer, relay, summary = running.answer, opened.relay, opened.observer.summary
        assert answer is not None and relay is not None, "a stream is open"
        first_token_s: float | None = None
        out = opened.first
        try:
            while True:
                now_s = self._now()
                if first_token_s is None and summary.first_token_seen:
                    first_token_s = now_s
                # Learnt before the client sees the end: its next turn may come at once.
                self._learn_once(place, running, opened, first_token_s)
                if out:
                    yield out
                data = await answer.chunk()
                if not data:
                    break
                out = relay.feed(data)
        except LegError as exc:
            running.receipt.error = type(exc).__name__
        tail = relay.finish()
        self._learn_once(place, running, opened, first_token_s)
        if tail:
            yield tail
        if running.receipt.outcome == "running":
            self._learner.broken(running.receipt, self._now() - running.started_s)
        running.close()

    def _learn_once(self, place: Place, running: Running, opened: Opened, first_token_s: float | None) -> None:
        """Learns from a stream as soon as it is all there."""
        summary = opened.observer.summary
        if summary.completed and summary.finish_reason != ABORTED and running.receipt.outcome == "running":
            now_s = self._now()
            times_s = None if first_token_s is None else (first_token_s, now_s)
            self._learner.completed(place, running, opened, now_s, token_times_s=times_s)

    def _abandon(self, running: Running) -> None:
        if running.receipt.outcome == "running":
            self._learner.cancelled(running.receipt, self._now() - running.started_s)
        running.close()

    def _turn(self, request: Request, place: Place, forced: Route | None) -> Turn:
        tokens = self._state.tokens
        new_tokens = tokens.estimate(request.model, place.new_bytes)
        return Turn(
            model=request.model,
            session_id=place.session_id,
            number=place.turn,
            prompt_tokens=place.held_tokens + new_tokens,
            held_tokens=place.held_tokens,
            output_tokens=tokens.expected_output(request.model, place.output_tokens, request.max_output_tokens),
            decode=place.decode,
            prefill=place.prefill,
            single_engine=request.single_engine,
            stored_response=request.previous_response_id is not None,
            forced=forced,
        )

    def _count(self, turn: Turn, now_s: float) -> None:
        self._turns.count(now_s)
        if turn.number == 1:
            self._conversations.count(now_s)


def may_retry(exc: LegError) -> bool:
    """A worker's 4xx is the request's own fault and the same everywhere; overload (429) and 5xx are not."""
    if isinstance(exc, AnswerTimeout):
        return False
    return not (isinstance(exc, WorkerRefused) and 400 <= exc.status < 500 and exc.status != 429)


def decision_headers(receipt: Receipt) -> dict[str, str]:
    """The response headers that explain a turn; workers by name, as addresses are not for clients."""
    headers = {
        "X-Request-Id": receipt.id,
        "X-PPD-Route": receipt.route,
        "X-PPD-Reason": receipt.reason,
        "X-PPD-Decode": receipt.decode,
        "X-PPD-Prefill": receipt.prefill,
        "X-PPD-Evidence": receipt.cell.evidence if receipt.cell else "",
    }
    return {name: value for name, value in headers.items() if value}


def _note_turn(receipt: Receipt, place: Place, turn: Turn) -> None:
    receipt.session, receipt.turn, receipt.kind = place.session_id, place.turn, place.kind.name.lower()
    receipt.forced = turn.forced or ""
    receipt.estimated_prompt_tokens = turn.prompt_tokens
    receipt.estimated_output_tokens = turn.output_tokens


def _note_decision(receipt: Receipt, turn: Turn, decision: Decision, rules: Rules) -> None:
    receipt.mode = rules.mode
    receipt.route, receipt.reason, receipt.wanted = decision.route, decision.reason, decision.wanted
    receipt.vetoes = list(decision.vetoes)
    receipt.decode = decision.decode.name
    receipt.prefill = decision.prefill.name if decision.prefill else ""
    receipt.qps = round(decision.qps, 3)
    receipt.estimated_cached_tokens = decision.cached_tokens
    receipt.estimated_new_tokens = max(1, turn.prompt_tokens - decision.cached_tokens)
    verdict, scored = decision.verdict, rules.scored
    if verdict is not None and scored is not None:
        receipt.cell = CellRecord(
            table=scored.table.name,
            lookup=scored.rule,
            cell=str(verdict.cell),
            evidence=verdict.evidence,
            score=verdict.score,
            d_ttft=verdict.d_ttft,
            d_tpot=verdict.d_tpot,
            w_ttft=scored.weights.ttft,
            w_tpot=scored.weights.tpot,
        )
