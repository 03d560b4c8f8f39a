"""Where a turn goes: its session, its place in the queue, and the decision, with what that reserves.

The caller carries the attempt out, and tells what became of it. A failed attempt may be followed by a new decision,
without the workers that failed.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from ..admission.queue import Ticket, effective_priority
from ..admission.scoped_requests import named_afresh
from ..beliefs.held import PromptEntry
from ..beliefs.turn_touches import NONE_HELD, TurnCaches, TurnTouches
from ..config import ProxyConfig, StageOrder
from ..errors import TOO_MANY, AllBusy, AllDown, NoWorkerError, Overloaded
from ..fleet.booking import LegBooking
from ..fleet.view import Fleet, WorkerView
from ..fleet.worker import Role, WorkerId
from ..health.doubts import NO_DOUBTS, Doubts
from ..health.worker_health import Key
from ..openai.request import Request
from ..policy import Decision, Excluded, Route, Rules, Turn, can_stand_in, decide, has_room, route_alone
from ..policy.profiles.prompt_blocks import NO_BLOCKS, PromptBlocks, blocks_of
from ..policy.profiles.schedule import Schedule
from ..sessions.prefix_chain import Chain
from ..sessions.session import marks_of_prompt, points_of_prompt
from ..sessions.table import SessionMatch
from ..telemetry.receipts import Receipt
from ..tokenizer.count_checks import CountedPrompt, form_of
from ..tokenizer.prompt_tokenizer import PromptTokenizer
from .attempt import Attempt, Job, TurnContext, held_units
from .failed_attempts import FailedAttempts
from .foresight import foresee
from .learning import Learner
from .reading_back import with_readable
from .receipt_notes import JudgedWays, note_decision, note_turn, noting_wait
from .state import State

BUSY_S = 0.05  # until a turn that found every worker busy looks again
DOWN_S = 1.0  # the same where every worker is down
NEXT_BEST = "next_best"  # reason of a turn that a gateway has taken to a worker that was named behind another
RULED = "ruled"  # of a turn that another picker has placed


READBACK = Route.READBACK  # quicker to look up


class Chooser:
    """Chooses workers for turns. `rules` is replaced whole when weights, mode or table change."""

    def __init__(
        self,
        config: ProxyConfig,
        rules: Rules,
        state: State,
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
        self._learner = learner
        self._passed_over = passed_over
        self._tokenizer = tokenizer
        self._now = state.now
        self._sessions, self._beliefs, self._registry = state.sessions, state.beliefs, state.registry
        self._receipts, self._poisoned = state.receipts, state.poisoned
        self._tokens, self._caches = state.tokens, state.engine_caches
        self._admission, self._arrivals, self._rate_limits = state.admission, state.arrivals, state.rate_limits

    async def enter(self, request: Request, receipt: Receipt, context: TurnContext) -> Job:
        """Finds the turn's session, charges its key, and waits for a place. PPDError where it gets none.

        A job that comes to no answer ends by `left`; else its permit is the caller's to release.
        """
        started_s = now_s = self._now()
        counted = None
        if self._tokenizer is not None:
            counted, now_s = await self._counted(self._tokenizer, request), self._now()
        match = self._sessions.find(request.prompt, now_s)
        self._learner.began(match, request.model, now_s)
        priority = effective_priority(context.client.priority, request.priority)
        entry, turn = self._turn(request, match, context, counted, priority)
        note_turn(receipt, match, turn, counted)
        if self._poisoned.suspects:
            self._poisoned.check(request.prompt.chain.end(), now_s)
        self._charge(context, turn, now_s)
        self._arrivals.count(now_s, opens=turn.number == 1)
        self._receipts.open(receipt)
        try:
            ticket = self._ticket(turn, context, started_s, priority)
            permit = self._admission.try_enter(ticket)
            if permit is None:
                permit = await self._admission.wait(ticket)
                receipt.waited_s = self._now() - started_s
        except BaseException as exc:
            receipt.waited_s = self._now() - started_s
            self._left(turn, receipt, context, started_s, exc)
            raise
        self._state.retries.deposit()
        doubts = Doubts(any(item.is_by_url for item in request.media)) if request.media else NO_DOUBTS
        return Job(request, match, turn, entry, receipt, context, started_s, permit, doubts, counted)

    async def choose(self, job: Job, failed: FailedAttempts | None = None) -> Attempt:
        """Decides, waiting in the queue where no worker takes a turn now. Nothing is reserved yet.

        failed: what has failed in this turn so far. PPDError where no worker is left, or none in time.
        """
        while True:
            now_s = self._now()
            if self._poisoned.suspects:
                self._poisoned.check(job.request.prompt.chain.end(), now_s)
            try:
                fleet = self._registry.fleet(job.turn.model)
                turn = self._with_beliefs(job, fleet, now_s)
                decision = self._decide(job, turn, fleet, now_s, failed)
            except AllBusy:
                with noting_wait(job.receipt, self._now):
                    await job.permit.wait_again(self._now() + BUSY_S, is_moved=failed is not None and failed.is_moved)
            except NoWorkerError as exc:
                with noting_wait(job.receipt, self._now):
                    await self._until_one_may_be_asked(job, failed, exc, now_s)
            else:
                if failed is None or self._may_pay(failed):
                    return self._attempt(job, turn, decision, now_s)

    def next_best(self, job: Job, attempt: Attempt, count: int) -> list[WorkerId]:
        """Who would be chosen, best first, if the attempt's worker could not be asked; at most so many.

        Each can take the same request as it stands.
        """
        found, gone = list[WorkerId](), [attempt.decode]
        if job.turn.stored_response:  # by that engine
            return found
        now_s, fleet = self._now(), self._registry.fleet(job.turn.model)
        turn = self._with_beliefs(job, fleet, now_s)
        for _ in range(2 * count):
            try:
                decision = self._decide(job, turn, fleet, now_s, without=tuple(gone))
            except NoWorkerError:
                break
            gone.append(decision.decode.id)
            if can_stand_in(decision.decode.worker, attempt.decision):
                found.append(decision.decode.id)
                if len(found) == count:
                    break
        return found

    def moved(self, job: Job, attempt: Attempt, to: WorkerView) -> Attempt:
        """The same turn on the worker that a gateway chose, whose answer has begun. Nothing is reserved yet."""
        before = attempt.decision
        prefill = before.prefill if can_stand_in(to.worker, before) else None
        moved = self._placed(job, attempt, to, prefill, NEXT_BEST)
        moved.request, moved.permit = attempt.request, attempt.permit
        moved.handoff = attempt.handoff if prefill is not None else None
        return moved

    def ruled(self, job: Job, attempt: Attempt, to: WorkerView, prefill: WorkerView | None) -> Attempt:
        """The same turn where another picker has placed it, whatever this one would do. Nothing is reserved yet."""
        return self._placed(job, attempt, to, prefill, RULED)

    def _placed(self, job: Job, attempt: Attempt, to: WorkerView, prefill: WorkerView | None, reason: str) -> Attempt:
        before, now_s, fleet = attempt.decision, self._now(), self._registry.fleet(job.turn.model)
        turn = self._with_beliefs(job, fleet, now_s)
        decision = Decision(
            route=route_alone(to) if prefill is None else Route.SPLIT,
            reason=reason,
            decode=to,
            prefill=prefill,
            order=StageOrder.MODE if reason == RULED else before.order,
            wanted=before.wanted,
            qps=before.qps,
            held=turn.held.get(to.id),
        )
        return self._attempt(job, turn, decision, now_s)

    def left(self, job: Job, exc: BaseException) -> None:
        """The turn has ended without an answer: refused, failed, or its client has gone."""
        job.permit.release()
        self._left(job.turn, job.receipt, job.context, job.started_s, exc)

    def _left(self, turn: Turn, receipt: Receipt, context: TurnContext, started_s: float, exc: BaseException) -> None:
        # A prompt that was sent to a worker is charged, or leaving early would make it free.
        charged, spent = charged_tokens(turn), turn.prompt_tokens if receipt.has_been_sent else 0
        self._rate_limits.settle(context.client, charged, spent, self._now())
        self._learner.unanswered(receipt, exc, self._now() - started_s)

    def _charge(self, context: TurnContext, turn: Turn, now_s: float) -> None:
        if context.is_counted:
            self._rate_limits.settle(context.client, 0, charged_tokens(turn), now_s)
        else:
            self._rate_limits.take(context.client, charged_tokens(turn), now_s)

    def _may_pay(self, failed: FailedAttempts) -> bool:
        """False where the turn must be decided anew, without P; raises what failed last if the budget is used up."""
        result = failed.pay(self._state.retries)
        self._state.metrics.retries.labels(result).inc()
        if result == "no_budget" and not failed.may_do_without():
            raise failed.error()
        return result != "no_budget"

    async def _until_one_may_be_asked(
        self, job: Job, failed: FailedAttempts | None, exc: NoWorkerError, now_s: float
    ) -> None:
        """Waits in the queue until a worker that was busy, or not reached, may be asked again; or one that is down.

        Raises where there is none, or none in time. now_s: when none was found; who was busy then may be so no more.
        """
        times_s = list[float]()
        if isinstance(exc, AllDown) and (failed is None or not failed.keys):
            times_s.append(now_s + DOWN_S)
        if failed is None:
            if not times_s:
                raise exc
            await job.permit.wait_again(times_s[0])
            return
        fleet, busy = self._registry.fleet(job.turn.model), self._state.health.breakers.busy(now_s)
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

    def _with_beliefs(self, job: Job, fleet: Fleet, now_s: float) -> Turn:
        """What workers hold, as it is believed now: the turn may have waited, and a worker may have restarted since."""
        turn, entry, counted, observed = job.turn, job.entry, job.counted, None
        source, last, held_tokens, by_tokens = entry.source, entry.last, turn.held_tokens, None
        if source is not None:
            observed = self._caches.observed(source, held_tokens, last, now_s)
        if counted is not None and counted.is_proven:
            by_tokens = self._caches.found(counted.tokens, turn.model, fleet.views, source, last, now_s)
        held = self._beliefs.held(fleet.views, entry, held_tokens, observed, by_tokens)
        turn = replace(turn, held=held, lost=self._beliefs.why_lost(last))
        if not self._state.handles.kept:  # nearly always
            return turn
        return with_readable(self._state, turn, job.match, job.request, counted)

    def _decide(
        self,
        job: Job,
        turn: Turn,
        fleet: Fleet,
        now_s: float,
        failed: FailedAttempts | None = None,
        without: Excluded = (),
    ) -> Decision:
        rules, avoid, blocked, only = self.rules, without, self._passed_over(now_s), job.context.only
        if only is not None:
            answering = (view.id for view in fleet.views.values() if view.role is not Role.PREFILL)
            avoid = (*avoid, *(worker for worker in answering if worker not in only))
        counts_turns = rules.scored is not None and rules.scored.table.axes.qps_counts == "turns"
        qps = (self._arrivals.turns if counts_turns else self._arrivals.conversations).rate_rps(now_s)
        if failed is not None:
            if failed.is_lent:
                rules = replace(rules, moves_kv=False)
            busy = self._state.health.breakers.busy(now_s)
            views = (*fleet.prefills, *fleet.decodes)
            avoid = failed.avoid(views, job.receipt.legs, (*busy, *avoid), blocked, turn.decode)
        return decide(turn, fleet, rules, qps=qps, now_s=now_s, avoid=avoid, blocked=blocked)

    def _attempt(self, job: Job, turn: Turn, decision: Decision, now_s: float) -> Attempt:
        request, receipt, context, entry, rules = job.request, job.receipt, job.context, job.entry, self.rules
        if decision.candidates or receipt.route:  # else no ways were judged, now or before
            self._receipts.judged(receipt, JudgedWays.of(turn, decision) if decision.candidates else None)
        note_decision(receipt, turn, decision, rules)
        if (schedule := rules.schedule) is not None:
            schedule.memory.sent(turn, filter(None, (decision.prefill, decision.decode)))
        decode, prefill = decision.decode.id, None if decision.prefill is None else decision.prefill.id
        source = None if decision.source is None else decision.source.id
        caches = TurnCaches(decode, None if decision.route is READBACK else prefill)
        estimates = decision.estimates(turn, shows_first_token=request.stream)
        return Attempt(
            request=named_afresh(request, context.client) if receipt.legs else request,
            decision=decision,
            decode=decode,
            receipt=receipt,
            client=context.client,
            booking=LegBooking(self._registry, decode, prefill, estimates, source),
            touches=TurnTouches(
                self._beliefs,
                entry,
                turn.held if request.counts_tell else NONE_HELD,
                receipt.estimated_prompt_tokens,
                caches,
            ),
            charged_tokens=charged_tokens(job.turn),
            headers=context.headers,
            started_s=job.started_s,
            asked_s=now_s,
            doubts=job.doubts,
            history=entry.history,
            count=None if job.counted is None else job.counted.check,
            held_units=held_units(job, turn, prefill or decode) if request.media else 0,
            # Of an answer that is not streamed no time is measured.
            foreseen=foresee(decision, turn, self._state.laws, rules.scored) if request.stream else None,
        )

    def _ticket(self, turn: Turn, context: TurnContext, now_s: float, priority: int) -> Ticket:
        client, model, is_response = context.client, turn.model, turn.is_response
        return Ticket(
            tenant=client.tenant,
            weight=client.weight,
            priority=priority,
            cost=turn.new_tokens + turn.output_tokens,
            arrived_s=now_s,
            deadline_s=now_s + context.patience_s,
            needs=(model, is_response and self.rules.prefills_answer),  # else all of a model fit alike
            fits=lambda: has_room(self._registry.fleet(model), self.rules, self._blocked, is_response=is_response),
        )

    def _blocked(self) -> Excluded:
        return self._passed_over(self._now())

    async def _counted(self, tokenizer: PromptTokenizer, request: Request) -> CountedPrompt | None:
        """The prompt in tokens, if it knows them soon."""
        tokens = await tokenizer.tokens(request)
        if tokens is None:
            return None
        return self._state.count_checks.of(tokens, form_of(request.prompt.model, request.endpoint, request.fields))

    def _turn(
        self,
        request: Request,
        match: SessionMatch,
        context: TurnContext,
        counted: CountedPrompt | None,
        priority: int,
    ) -> tuple[PromptEntry, Turn]:
        tokens, prompt, model = self._tokens, request.prompt, request.model
        rules, client, held_tokens = self.rules, context.client, match.held_tokens
        prompt_tokens = held_tokens + tokens.estimate(model, match.added)
        if counted is not None and counted.is_proven:
            prompt_tokens = counted.tokens.count
        marks, points = marks_of_prompt(prompt, prompt_tokens), points_of_prompt(prompt, prompt_tokens)
        entry = PromptEntry(match.history, match.source, marks, match.decode, points, held_tokens)
        turn = Turn(
            model=model,
            session_id=match.session_id,
            number=match.turn,
            prompt_tokens=prompt_tokens,
            held_tokens=held_tokens if held_tokens < prompt_tokens else prompt_tokens,
            output_tokens=tokens.expected_output(model, match.output_tokens, request.max_output_tokens),
            decode=None if match.decode is None else match.decode.worker,
            affinity=match.affinity,
            single_engine=request.single_engine,
            endpoint=request.endpoint,
            stored_response=prompt.previous_response_id is not None,
            forced=context.forced,
            slo=rules.targets.of(priority, client.slo, context.slo),
            weights=rules.weighing.of(model, client.weights),
            blocks=NO_BLOCKS if rules.schedule is None else _blocks(prompt.chain, rules.schedule),
        )
        return entry, turn


def _blocks(chain: Chain, schedule: Schedule) -> PromptBlocks:
    rule = schedule.memory.rule
    return NO_BLOCKS if rule is None else blocks_of(chain.keys, chain.ends, chain.size, rule)


def charged_tokens(turn: Turn) -> int:
    """That its key is charged with, by estimate."""
    return turn.prompt_tokens + turn.output_tokens
