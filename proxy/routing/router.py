"""One turn from request to answer: find its session, wait for admission, decide, run the legs, learn.

As long as no byte has gone to the client, a failed attempt is followed by a new decision without the workers that
failed. With no P left, the policy falls back to a turn without a handoff.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from ..admission.gate import Permit
from ..admission.queue import Ticket, effective_priority
from ..beliefs.held import PromptEntry
from ..beliefs.turn_touches import TurnCaches, TurnTouches
from ..config import ProxyConfig
from ..errors import TOO_MANY, AllBusy, AllDown, LegError, NoWorkerError, Overloaded, PPDError, Refused
from ..failures import Cause, FailureRule, HandoffEffect
from ..fleet.booking import LegBooking
from ..fleet.worker import WorkerId
from ..health.poisoned_prompts import life_of
from ..health.worker_health import Key, blamed_view
from ..openai.request import Request
from ..policy import Decision, Excluded, Rules, Turn, decide, has_room
from ..sessions.session import marks_of_prompt, points_of_prompt
from ..sessions.table import SessionMatch
from ..telemetry.receipts import Receipt
from ..tokenizer.count_checks import CountedPrompt, form_of
from ..tokenizer.prompt_tokenizer import PromptTokenizer
from .attempt import Attempt, FailedAttempts, Job, OpenAnswer, TurnContext, is_loss, workers_lost
from .dispatch import Dispatcher
from .foresight import foresee
from .learning import Learner
from .receipt_notes import decision_headers, note_decision, note_turn
from .state import State
from .stream import LargeBody, StreamedBody, Streaming, complete

log = logging.getLogger(__name__)

BUSY_S = 0.05  # until a turn that found every worker busy looks again
DOWN_S = 1.0  # the same where every worker is down


class TurnReply(msgspec.Struct):
    content_type: str
    headers: dict[str, str]
    body: bytes | StreamedBody
    status: int = 200


class Router:
    """Routes turns. `rules` is replaced whole when weights, mode or table change."""

    def __init__(
        self,
        config: ProxyConfig,
        rules: Rules,
        state: State,
        dispatcher: Dispatcher,
        learner: Learner,
        *,
        passed_over: Callable[[float], Excluded],
        tokenizer: PromptTokenizer | None = None,
    ) -> None:
        """passed_over(now_s): workers and pairs that get no turn while there are others.

        tokenizer: None: prompts' tokens are estimated.
        """
        self.rules = rules
        self._attempts = config.attempts
        self._state = state
        self._dispatcher = dispatcher
        self._learner = learner
        self._passed_over = passed_over
        self._tokenizer = tokenizer
        self._now = state.now

    async def answer(self, request: Request, receipt: Receipt, context: TurnContext) -> TurnReply:
        """Raises PPDError where the client gets an error."""
        started_s = self._now()
        counted, now_s = await self._counted(request), self._now()
        match = self._state.sessions.find(request.prompt, now_s)
        self._learner.began(match, request.model, now_s)
        entry, turn = self._turn(request, match, context, counted)
        note_turn(receipt, match, turn, counted)
        self._check_poison(request)
        tokens = self._charge(context, turn, now_s)
        self._state.arrivals.count(now_s, opens=turn.number == 1)
        self._state.receipts.open(receipt)
        permit: Permit | None = None
        try:
            permit = await self._state.admission.enter(self._ticket(request, turn, context, started_s))
            receipt.waited_s = self._now() - started_s
            job = Job(request, turn, entry, receipt, context, started_s, permit, counted)
            attempt, opened = await self._first_success(job)
        except BaseException as exc:
            if permit is None:
                receipt.waited_s = self._now() - started_s
            else:
                permit.release()
            # A prompt that was sent to a worker is charged, or leaving early would make it free.
            self._state.rate_limits.settle(
                context.client, tokens, turn.prompt_tokens if receipt.legs else 0, self._now()
            )
            if isinstance(exc, PPDError):
                receipt.status, receipt.error = exc.status, _error_name(exc)
                self._learner.failed(receipt, self._now() - started_s)
            elif isinstance(exc, asyncio.CancelledError):
                self._learner.cancelled(receipt, self._now() - started_s, is_answered=False)
            raise
        attempt.permit = permit
        if opened.relay is not None:
            stream = Streaming(self._state, self._learner, match, attempt, opened)
            return TurnReply(opened.content_type, {**opened.headers, **decision_headers(receipt)}, stream)
        complete(self._state, self._learner, match, attempt, opened)
        attempt.close()
        whole = opened.first if isinstance(opened.first, bytes) else LargeBody(opened.first)
        return TurnReply(opened.content_type, {**opened.headers, **decision_headers(receipt)}, whole)

    def _charge(self, context: TurnContext, turn: Turn, now_s: float) -> int:
        """The tokens that its key is charged with."""
        tokens = turn.prompt_tokens + turn.output_tokens
        if context.is_counted:
            self._state.rate_limits.settle(context.client, 0, tokens, now_s)
        else:
            self._state.rate_limits.take(context.client, tokens, now_s)
        return tokens

    async def _first_success(self, job: Job) -> tuple[Attempt, OpenAnswer]:
        """Attempts until one succeeds, each without the workers that failed before."""
        failed: FailedAttempts | None = None
        self._state.retries.deposit()
        while True:
            self._check_poison(job.request)
            now_s = self._now()
            try:
                turn = self._with_beliefs(job)
                decision = self._decide(job, turn, failed, now_s)
            except AllBusy:
                await job.permit.wait_again(self._now() + BUSY_S, is_moved=failed is not None and failed.is_moved)
                continue
            except NoWorkerError as exc:
                await self._until_one_may_be_asked(job, failed, exc)
                continue
            if failed is not None and not self._may_pay(failed):
                continue
            attempt = self._attempt(job, turn, decision, now_s)
            try:
                self._state.health.asked(decision)
                opened = await self._opened(attempt)
            except LegError as exc:
                row = self._give_up(attempt, exc)
                failed = failed or FailedAttempts(self._attempts)
                may = failed.may_try_again(attempt, exc, row)
                if is_loss(exc) and self._is_poisoned(job.request, attempt):
                    raise workers_lost(exc) from exc
                if not may:
                    raise failed.error() from None
            except BaseException:
                self._state.health.left(decision)
                raise
            else:
                self._state.health.began(decision, moved=opened.handoff is not None)
                if poisoned := self._state.poisoned:
                    poisoned.answered(job.request.prompt.chain.end())
                return attempt, opened

    async def _opened(self, attempt: Attempt) -> OpenAnswer:
        try:
            return await self._dispatcher.open(attempt)
        except LegError as exc:
            view = blamed_view(attempt.failed_leg, attempt.decision)
            found = await self._dispatcher.examine(exc, view.worker)
            if found is exc:
                raise
            attempt.receipt.legs[-1].fail(found)
            raise found from exc

    def _check_poison(self, request: Request) -> None:
        """Raises PoisonedPrompt for a prompt that has ended workers."""
        if poisoned := self._state.poisoned:
            poisoned.check(request.prompt.chain.end(), self._now())

    def _is_poisoned(self, request: Request, attempt: Attempt) -> bool:
        """Notes that a worker ended this prompt's connection; whether it is not to be asked of another."""
        life = life_of(blamed_view(attempt.failed_leg, attempt.decision))
        return self._state.poisoned.lost(request.prompt.chain.end(), life, self._now())

    def _may_pay(self, failed: FailedAttempts) -> bool:
        """False where the turn must be decided anew, without P; raises what failed last if the budget is used up."""
        result = failed.pay(self._state.retries)
        self._state.metrics.retries.labels(result).inc()
        if result == "no_budget" and not failed.may_do_without():
            raise failed.error()
        return result != "no_budget"

    async def _until_one_may_be_asked(self, job: Job, failed: FailedAttempts | None, exc: NoWorkerError) -> None:
        """Waits in the queue until a worker that was busy, or not reached, may be asked again; or one that is down.

        Raises where there is none, or none in time.
        """
        now_s, times_s = self._now(), list[float]()
        if isinstance(exc, AllDown) and (failed is None or not failed.keys):
            times_s.append(now_s + DOWN_S)
        if failed is None:
            if not times_s:
                raise exc
            await job.permit.wait_again(times_s[0])
            return
        fleet, busy = self._state.registry.fleet(job.turn.model), self._state.health.breakers.busy(now_s)
        spent = set(failed.avoid((), job.receipt.legs, ()))
        answering = [view.id for view in (*fleet.decodes, *fleet.replicas) if view.id in busy]
        error = failed.error(max((busy[worker] - now_s for worker in answering), default=0.0))
        times_s += [busy[worker] for worker in answering if worker not in spent]
        able: set[Key] = {view.id for view in (*fleet.decodes, *fleet.replicas, *fleet.down)}
        if failed.forgive_unreached() & able:
            times_s.append(now_s + DOWN_S)
        if not times_s:
            raise error from None
        try:
            await job.permit.wait_again(min(times_s), is_moved=failed.is_moved)
        except Overloaded as late:
            if error.status == TOO_MANY and late.reason != "draining":
                raise error from late
            raise

    def _with_beliefs(self, job: Job) -> Turn:
        """What workers hold, as it is believed now: the turn may have waited, and a worker may have restarted since."""
        beliefs, turn = self._state.beliefs, job.turn
        views, caches = self._state.registry.fleet(turn.model).views, self._state.engine_caches
        source, last, now_s = job.entry.source, job.entry.last, self._now()
        observed = None if source is None else caches.observed(source, turn.held_tokens, last, now_s)
        by_tokens = None
        if job.counted is not None and job.counted.is_proven:
            by_tokens = caches.found(job.counted.tokens, turn.model, views, source, last, now_s)
        held = beliefs.held(views, job.entry, turn.held_tokens, observed, by_tokens)
        return replace(turn, held=held, lost=beliefs.why_lost(job.entry.last))

    def _decide(self, job: Job, turn: Turn, failed: FailedAttempts | None, now_s: float) -> Decision:
        rules = self.rules
        counts_turns = rules.scored is not None and rules.scored.table.axes.qps_counts == "turns"
        arrivals = self._state.arrivals
        qps = (arrivals.turns if counts_turns else arrivals.conversations).rate_rps(now_s)
        fleet = self._state.registry.fleet(turn.model)
        avoid: Excluded = ()
        if failed is not None:
            if failed.is_lent:
                rules = replace(rules, moves_kv=False)
            avoid = failed.avoid(fleet.views.values(), job.receipt.legs, self._state.health.breakers.busy(now_s))
        blocked = self._passed_over(now_s)
        return decide(turn, fleet, rules, qps=qps, now_s=now_s, avoid=avoid, blocked=blocked)

    def _attempt(self, job: Job, turn: Turn, decision: Decision, now_s: float) -> Attempt:
        note_decision(job.receipt, turn, decision, self.rules)
        laws = self._state.laws
        decode, prefill = decision.decode.id, None if decision.prefill is None else decision.prefill.id
        prompt = job.receipt.estimated_prompt_tokens
        beliefs = self._state.beliefs
        estimates = decision.estimates(turn, shows_first_token=job.request.stream)
        return Attempt(
            request=job.request,
            decision=decision,
            decode=decode,
            receipt=job.receipt,
            client=job.context.client,
            booking=LegBooking(self._state.registry, decode, prefill, estimates),
            touches=TurnTouches(beliefs, job.entry, turn.held, prompt, TurnCaches(decode, prefill)),
            charged_tokens=job.turn.prompt_tokens + job.turn.output_tokens,
            headers=job.context.headers,
            started_s=job.started_s,
            asked_s=now_s,
            history=job.entry.history,
            count=None if job.counted is None else job.counted.check,
            foreseen=foresee(decision, turn, laws, self.rules.scored),
        )

    def _give_up(self, attempt: Attempt, exc: LegError) -> FailureRule:
        """Books a leg's failure, and has a handoff taken that P still pins KV for."""
        leg = attempt.failed_leg
        row = self._state.health.failed(leg, exc, attempt.decision, attempt.asked_s)
        self._state.metrics.failures.labels(leg, exc.phase, exc.cause).inc()
        log.log(
            logging.DEBUG if exc.cause is Cause.REQUEST else logging.WARNING,
            "request %s: %s on %s %s: %s at %s",
            *(attempt.receipt.id, leg, attempt.receipt.legs[-1].worker, exc.worker, exc.cause, exc.phase),
        )
        if exc.cause is Cause.UNKNOWN_MODEL:
            self._state.registry.lost_model(WorkerId(exc.worker), attempt.request.model)
        if row.handoff is HandoffEffect.RELEASED and attempt.handoff is not None:
            self._dispatcher.release(attempt)
        return row

    def _ticket(self, request: Request, turn: Turn, context: TurnContext, now_s: float) -> Ticket:
        client, model = context.client, request.model  # the ticket outlives the prompt, so it must not hold the request
        return Ticket(
            tenant=client.tenant,
            weight=client.weight,
            priority=_priority(request, context),
            cost=turn.new_tokens + turn.output_tokens,
            arrived_s=now_s,
            deadline_s=now_s + context.patience_s,
            needs=model,
            fits=lambda: has_room(self._state.registry.fleet(model), self.rules, self._passed_over(self._now())),
        )

    async def _counted(self, request: Request) -> CountedPrompt | None:
        """The prompt in tokens, if a tokenizer knows them soon."""
        tokens = None if self._tokenizer is None else await self._tokenizer.tokens(request)
        if tokens is None:
            return None
        return self._state.count_checks.of(tokens, form_of(request.prompt.model, request.endpoint, request.fields))

    def _turn(
        self, request: Request, match: SessionMatch, context: TurnContext, counted: CountedPrompt | None
    ) -> tuple[PromptEntry, Turn]:
        tokens, prompt = self._state.tokens, request.prompt
        prompt_tokens = match.held_tokens + tokens.estimate(request.model, match.added)
        if counted is not None and counted.is_proven:
            prompt_tokens = counted.tokens.count
        marks, points = (of(prompt, prompt_tokens) for of in (marks_of_prompt, points_of_prompt))
        rules, client = self.rules, context.client
        entry = PromptEntry(match.history, match.source, marks, match.decode, points, match.held_tokens)
        forecast = self._state.forecasts.output(
            request.model, match.output_tokens, match.turn, request.max_output_tokens
        )
        turn = Turn(
            model=request.model,
            session_id=match.session_id,
            number=match.turn,
            prompt_tokens=prompt_tokens,
            held_tokens=min(match.held_tokens, prompt_tokens),
            output_tokens=tokens.expected_output(request.model, match.output_tokens, request.max_output_tokens),
            output_p90_tokens=forecast.p90,
            decode=None if match.decode is None else match.decode.worker,
            affinity=match.affinity,
            single_engine=request.single_engine,
            stored_response=prompt.previous_response_id is not None,
            forced=context.forced,
            slo=rules.targets.of(_priority(request, context), client.slo, context.slo),
            weights=rules.weighing.of(request.model, client.weights),
        )
        return entry, turn


def _priority(request: Request, context: TurnContext) -> int:
    return effective_priority(context.client.priority, request.priority)


def _error_name(exc: PPDError) -> str:
    if isinstance(exc, LegError):
        return exc.code or f"{exc.phase}: {exc.cause}"
    return exc.reason if isinstance(exc, Refused) else type(exc).__name__
