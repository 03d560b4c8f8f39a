"""The attempts of one turn: what a running one holds, what has failed, and whether another may follow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from ..admission.gate import Permit
from ..admission.keys import Client
from ..beliefs.held import PromptEntry
from ..beliefs.turn_touches import Touches
from ..bodies.shared_bytes import SharedBytes
from ..connectors import CONNECTORS
from ..connectors.leg import Handoff
from ..connectors.p2p_nccl import shown_id
from ..encoders.choosing import NamedEncoders
from ..encoders.encoder_chooser import EncoderTurn
from ..encoders.legs import EncodedTurn
from ..errors import TOO_MANY, WORKERS_LOST, LegError, Overloaded, PPDError, without_frames
from ..failures import Cause, ClientGets, FailureRule, HealthEffect, Leg, Phase
from ..fleet.booking import LegBooking
from ..fleet.view import BareViews, WorkerView
from ..fleet.worker import Role, WorkerId
from ..health.circuit_breaker import RetryBudget
from ..health.doubts import NO_DOUBTS, Doubts
from ..health.worker_health import Key, blamed
from ..laws.targets import GivenTargets
from ..leg_moves import Legs
from ..openai.answer import AnswerObserver
from ..openai.body_members import encoded, members
from ..openai.edits import Edits, Redaction, edits_of
from ..openai.reply_key import ReplyKey
from ..openai.request import CHOOSING, Request
from ..openai.stream_relay import StreamRelay
from ..policy import Decision, Route, Turn
from ..readback.handles import Handle
from ..sessions.table import SessionMatch
from ..telemetry.receipts import LegRecord, Receipt, new_id
from ..tokenizer.count_checks import CountCheck, CountedPrompt
from ..upstream.call import Answer, Call, Expiry
from ..upstream.two_legs import TwoLegs
from .foresight import Foreseen

_ANSWERING = {
    Route.LOCAL: Leg.LOCAL,
    Route.SPLIT: Leg.DECODE,
    Route.READBACK: Leg.DECODE,
    Route.REPLICA: Leg.REPLICA,
}
_NO_HEADERS: Mapping[str, str] = {}


class Attempt(msgspec.Struct, kw_only=True, eq=False):
    """One attempt and all that it holds. `close` gives everything back, at any time, and may be called twice."""

    request: Request
    decision: Decision
    decode: WorkerId  # the decision's
    receipt: Receipt
    client: Client
    booking: LegBooking
    touches: Touches
    charged_tokens: int  # the estimate that its key was charged with
    headers: Mapping[str, str]  # what every leg carries: authorization, content type, tracing
    started_s: float  # the turn's arrival
    asked_s: float  # when this attempt began; once encoders are done, when it went on
    history: int  # the session's, by which engines' events name it
    count: CountCheck | None = None  # where a tokenizer has counted the prompt
    doubts: Doubts = NO_DOUBTS  # the turn's
    foreseen: Foreseen | None = None  # what the decision says of its times
    held_units: int = 0  # of a prompt with media: messages whose KV the worker that computes it is believed to hold
    encoders: NamedEncoders | None = None  # that a gateway's picker has named; None: this process chooses
    encoded: EncodedTurn | None = None  # of a prompt with media, once encoders were asked
    handle: Handle | None = None  # by which P reads back, once its leg is begun
    asks_handle: bool = False  # D was asked for the tokens of what it keeps
    decode_asked_s: float = 0.0  # when, by `uptime_s`
    handoff: Handoff | None = None  # what P announced, whether or not D has pulled it; of both at once what is known
    legs: Legs | None = None  # of a SPLIT, once they are begun
    both: TwoLegs[OpenAnswer] | None = None  # while they run at once
    expiry: Expiry | None = None  # the handoff's, where P's blocks are a lease
    call: Call | None = None  # the answering leg's
    answer: Answer | None = None
    is_left: bool = False  # its client has gone, and `HandoffRelease` closes it
    is_finished_on_prefill: bool = False  # P's answer was all of it, and D was not asked
    leg: LegRecord | None = None  # the answering leg, once it is begun
    on_close: Callable[[Attempt], None] | None = None  # the dispatcher's
    permit: Permit | None = None  # the turn's, once this attempt answers it
    given_id: str = ""  # empty: it has one of its own, once that is asked for

    @property
    def attempt_id(self) -> str:
        """Made once it is asked for, as that takes a call of the system."""
        if not self.given_id:
            self.given_id = new_id()
        return self.given_id

    def close(self) -> None:
        if self.both is not None:
            both, self.both = self.both, None  # which may hold this attempt
            both.close()
        if self.answer is not None:
            self.answer.close()
            self.answer = None
        if self.on_close is not None:
            on_close, self.on_close = self.on_close, None
            on_close(self)
        if self.permit is not None:
            self.permit.release()  # last, so that the next turn finds the worker free

    def settle(self, known: BareViews) -> None:
        """The answer has begun, so no worker will be asked again: frees what only that would need."""
        decision = self.decision
        prefill = None if decision.prefill is None else known.of(decision.prefill)
        decode = known.of(decision.decode)
        self.decision = replace(
            decision, decode=decode, prefill=prefill, source=None, candidates=(), verdict=None, qps=0.0
        )
        self.request = self.request.without_prompt()
        self.headers, self.given_id = _NO_HEADERS, ""
        self.call, self.touches = None, self.touches.settled()

    def leg_id(self, kind: str) -> str:
        """Unique, whatever ids clients send: engines and P2pNccl tell requests apart by it."""
        return f"{self.attempt_id}-{kind}"

    @property
    def computes(self) -> WorkerView:
        """The worker that computes the prompt."""
        return self.decision.prefill or self.decision.decode

    def redaction(self, view: WorkerView) -> Redaction:
        """It is known where its P and its encoders are, also where the handoff does not say so in words."""
        handoff, prefill = self.handoff, self.decision.prefill
        peers = () if self.encoded is None else self.encoded.items.hosts
        if prefill is not None and (handoff is not None or self.is_by_sidecar):
            told = () if handoff is None else handoff.params.values()
            peers = (*peers, *told, encoded(prefill.worker.address))
        if self.handle is not None:
            peers = (*peers, *(members(msgspec.Raw(self.handle.params)) or {}).values())
        return Redaction(view.worker.address, peers)

    def edits(self, record: LegRecord, redaction: Redaction) -> Edits:
        """What the client does not see of the answer of this leg."""
        request = self.request
        hide_usage = not request.wants_usage and request.endpoint in CHOOSING
        hides = None
        if self.decision.prefill is not None and (shown := shown_id(record.id)) != record.id:
            hides = record.id, shown
        handoff = self.handoff
        if handoff is None and hides is None and not redaction.params:
            return edits_of(redaction, hide_usage=hide_usage, hide_token_ids=self.asks_handle)
        cached = None if handoff is None else self._found_cached(handoff)
        return Edits(hide_usage, cached, redaction, self.asks_handle, hides)

    def _found_cached(self, handoff: Handoff) -> int | None:
        """P's count, for the client: D counts what it has pulled too. None: a sidecar has seen to it."""
        found = handoff.cached_tokens
        return 0 if found is None and not self.is_by_sidecar else found  # vLLM leaves a zero out

    @property
    def decode_gets_all(self) -> bool:
        """D gets all of the prompt's KV from P, so it has no prompt to compute."""
        prefill = self.decision.prefill
        if prefill is None or self.handoff is None:
            return False
        return not CONNECTORS[prefill.worker.connector].finds_by_content

    @property
    def is_by_sidecar(self) -> bool:
        """D's sidecar asks P: this proxy sends one leg."""
        return self.decision.prefill is not None and self.decision.decode.worker.has_sidecar

    @property
    def encoder_turn(self) -> EncoderTurn:
        """Of a prompt with media."""
        prediction = self.decision.prediction if self.request.stream else None  # else no first token is seen
        return EncoderTurn(
            request=self.request,
            consumer=self.computes,
            held_units=self.held_units,
            headers=self.headers,
            leg_id=self.leg_id,
            started_s=self.started_s,
            doubts=self.doubts,
            is_first=self.receipt.encoder is None,
            named=self.encoders,
            predicted_s=None if prediction is None else prediction.ttft_s,
        )

    def has_answered(self) -> None:
        """The answering worker has computed the prompt, whatever becomes of its answer."""
        if not self.is_finished_on_prefill:
            self.touches.answering()

    @property
    def answering_leg(self) -> Leg:
        return _ANSWERING[self.decision.route]

    def failed(self, exc: LegError) -> LegRecord:
        """The leg that failed so: the last one on that worker."""
        legs = self.receipt.legs
        return next((leg for leg in reversed(legs) if leg.address == exc.worker), legs[-1])

    @property
    def has_prefill_begun_to_answer(self) -> bool:
        """P has computed the prompt, and pins its KV; D was not asked yet."""
        leg = self.receipt.legs[-1]
        return leg.kind is Leg.PREFILL and leg.status == 200

    @property
    def has_asked_decode(self) -> bool:
        return self.call is not None and self.call.phase is not Phase.CONNECT


class OpenAnswer(msgspec.Struct):
    """An answer whose first event has come: of a stream the relay and the first bytes, else the whole body."""

    content_type: str
    first: bytes | SharedBytes
    observer: AnswerObserver
    reply: ReplyKey  # fed by the observer
    relay: StreamRelay | None  # None: `first` is all of it
    headers: Mapping[str, str] = {}  # of the worker's that go on to the client


class TurnContext(msgspec.Struct, frozen=True, gc=False):
    """Who sent a request, the headers that each leg carries, and what its own headers ask of the proxy."""

    client: Client
    headers: Mapping[str, str]
    forced: Route | None = None
    slo: GivenTargets | None = None
    patience_s: float = math.inf  # in the queue; the proxy's own limit may be shorter
    is_counted: bool = False  # one of a list whose prompts have been counted: only its tokens count
    only: frozenset[WorkerId] | None = None  # of D and R; None: all
    given: Mapping[str, str] = {}  # the request's own, names in lower case


class Job(msgspec.Struct, frozen=True):
    """What is the same for all attempts of a turn."""

    request: Request
    match: SessionMatch
    turn: Turn
    entry: PromptEntry
    receipt: Receipt
    context: TurnContext
    started_s: float
    permit: Permit
    doubts: Doubts
    counted: CountedPrompt | None = None  # by a tokenizer


MOST_ASKED = 2  # requests of one turn to one worker
MOST_SEARCHED = 64  # workers asked for a stored response: one wrong id shall not cost a large fleet a request each
_ENDS_WITH_THE_FLEET = (Cause.OVERLOADED, Cause.UNKNOWN_MODEL, Cause.UNKNOWN_RESPONSE)  # all may be asked


@dataclass(slots=True)
class FailedAttempts:
    """What has failed in one turn so far: what may follow, without whom, and at what price.

    Failed handoffs and failed answers are limited separately: after too many handoffs the turn is computed without one.
    """

    limit: int
    last: LegError | None = None
    handing_over: int = 0
    answering: int = 0
    owes_retry: bool = False  # the next attempt is paid from the retry budget
    is_moved: bool = False  # by the death of a worker that had been sent the turn
    is_afresh: bool = False  # it needs no budget if D computes alone what P was to compute once more
    computed_by: WorkerId | None = None  # the P whose handoff was too old: the prompt is in its cache
    is_lent: bool = False  # one of them was: a turn is lent once, as the lender itself could answer it
    keys: dict[Key, LegError] = field(default_factory=dict)  # not to be asked again
    refusals: list[LegError] = field(default_factory=list)  # of workers that were overloaded

    def avoid(
        self,
        views: Collection[WorkerView],
        legs: Iterable[LegRecord],
        busy: Iterable[Key],
        blocked: Collection[Key] = (),
        own: WorkerId | None = None,
    ) -> tuple[Key, ...]:
        """Workers and pairs that the next attempt leaves out.

        legs: this turn's; busy: who has said so, to any turn; blocked: who gets no turns now. Of a pair that failed it
        may be P whose KV nobody gets, or D, so others come first while there are some; but not in place of `own`, the
        session's D.
        """
        asked = Counter(WorkerId(leg.address) for leg in legs if _has_had_its_turn(leg))
        spent = (worker for worker, times in asked.items() if times >= MOST_ASKED)
        avoided = dict.fromkeys((*self.keys, *spent, *busy))
        prefills = {view.id for view in views if view.role is Role.PREFILL}
        if self.handing_over >= self.limit:
            avoided |= dict.fromkeys(prefills)
        elif self.computed_by is not None:
            avoided |= dict.fromkeys(prefills - {self.computed_by})
        pairs = [key for key in self.keys if isinstance(key, tuple) and key[0] in prefills]  # a lender may answer alone
        if not pairs:
            return tuple(avoided)
        decodes = {view.id for view in views if view.role is Role.DECODE}
        for workers, doubted in (prefills, {key[0] for key in pairs}), (decodes, {key[1] for key in pairs} - {own}):
            if doubted and not workers <= doubted.union(avoided, blocked):
                avoided |= dict.fromkeys(doubted)
        return tuple(avoided)

    def may_do_without(self) -> bool:
        """Whether the next attempt needs no budget, as D then computes alone."""
        if self.is_afresh:
            self.handing_over, self.owes_retry = self.limit, False
        return self.is_afresh

    def may_try_again(self, attempt: Attempt, exc: LegError, row: FailureRule) -> bool:
        """Books the failure. True where its row of the failure table and the limit allow another attempt."""
        without_frames(exc)
        leg, decision = attempt.failed(exc).kind, attempt.decision
        self.is_lent |= decision.lender is not None
        gets = row.client_gets(stream=attempt.request.stream)
        computed_by, self.computed_by = self.computed_by, None
        self.is_afresh = gets is ClientGets.AFRESH and decision.prefill is not None
        if self.is_afresh and decision.prefill is not None:
            self.last, self.owes_retry = exc, True
            self.handing_over += 1
            if decision.lender is None and computed_by is None:
                self.computed_by = decision.prefill.id
            elif decision.lender is None:
                self.keys[decision.prefill.id] = exc
            return True
        key: Key = blamed(leg, decision)
        if row.health is HealthEffect.PAIR and decision.prefill is not None:
            key = (decision.prefill.id, decision.decode.id)
        return self.book(leg, key, exc, row, gets)

    def book(self, leg: Leg, key: Key, exc: LegError, row: FailureRule, client: ClientGets) -> bool:
        self.last = exc
        if client not in (ClientGets.ANOTHER, ClientGets.ANOTHER_OR_QUEUE):
            return False
        is_death = row.health is HealthEffect.OPENED  # for which the breaker has paid
        is_unreached = exc.phase is Phase.CONNECT and (is_death or leg is not Leg.PREFILL)
        # An engine that has not stored a response has computed nothing; after a restart every turn may meet some.
        self.owes_retry = not (is_death or is_unreached or exc.cause is Cause.UNKNOWN_RESPONSE)
        self.is_moved |= is_death and not is_unreached
        if exc.cause is Cause.OVERLOADED:
            self.refusals.append(exc)
        else:
            self.keys[key] = exc
        if is_unreached:  # nothing was sent, which is no attempt; a P that is slow to connect is, as D can do without
            return True
        if leg is Leg.PREFILL or isinstance(key, tuple):
            self.handing_over += 1
        elif exc.cause not in _ENDS_WITH_THE_FLEET:
            self.answering += 1
        searched = sum(failure.cause is Cause.UNKNOWN_RESPONSE for failure in self.keys.values())
        return self.answering < self.limit and searched < MOST_SEARCHED

    def forgive_unreached(self) -> set[Key]:
        """Workers that were not reached may be asked again: these."""
        unreached = {key for key, exc in self.keys.items() if exc.phase is Phase.CONNECT}
        for key in unreached:
            del self.keys[key]
        return unreached

    def pay(self, retries: RetryBudget) -> str:
        """Before the next attempt: how it is paid, `no_budget` where it cannot be."""
        if not self.owes_retry:
            return "moved"
        self.owes_retry = False
        return "retried" if retries.take() else "no_budget"

    def error(self, busy_s: float = 0.0) -> PPDError:
        """What the client gets. busy_s: for how long the last of the overloaded workers is to be left alone."""
        assert self.last is not None, "something has failed"
        if self.last.cause is not Cause.OVERLOADED:
            return self.last
        longest_s = max(busy_s, *(exc.retry_after_s for exc in self.refusals))
        error = Overloaded("the workers are overloaded", reason="workers_overloaded", retry_after_s=longest_s)
        if not self.keys and all(exc.status == TOO_MANY for exc in self.refusals):
            error.status = TOO_MANY
        return error


def _has_had_its_turn(leg: LegRecord) -> bool:
    """Whether the worker was reached, and ended its leg: well, as a P does, or not. The other leg may have ended it."""
    is_done = leg.kind is Leg.PREFILL and leg.status == 200
    return leg.phase is not Phase.CONNECT and (leg.error is not None or is_done)


def workers_lost(exc: LegError) -> LegError:
    """For a turn that has ended the connections of two workers: it may be what ends them."""
    said = "workers ended the connection when they were sent this request, so no other is"
    lost = LegError(said, worker=exc.worker, phase=exc.phase, cause=exc.cause, status=502)
    lost.code = WORKERS_LOST
    return lost
