"""One attempt of a turn: what it holds while it runs, and what is the same for all attempts."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping

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
from ..encoders.encoder_chooser import EncodedTurn, EncoderTurn
from ..errors import LegError
from ..failures import Leg, Phase
from ..fleet.booking import LegBooking
from ..fleet.view import BareViews, WorkerView
from ..fleet.worker import WorkerId
from ..health.doubts import NO_DOUBTS, Doubts
from ..laws.targets import GivenTargets
from ..leg_moves import Legs
from ..openai.answer import AnswerObserver
from ..openai.body_members import encoded, given, members
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
READ_BY_S = 0.5  # since it was sent a leg, an engine that is short of time has read it


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

    def unanswered_beside(self, failed: LegRecord) -> WorkerView | None:
        """Of two legs at once the worker of the other one, unless that had answered, or was not reached."""
        prefill, other = self.decision.prefill, self.leg
        if failed is other:  # D's
            other = next((leg for leg in self.receipt.legs[::-1] if leg.kind is Leg.PREFILL), None)
        if prefill is None or other is None or other.status is not None or other.phase is Phase.CONNECT:
            return None
        view = prefill if other.kind is Leg.PREFILL else self.decision.decode
        return view if view.worker.address == other.address else None

    @property
    def has_prefill_begun_to_answer(self) -> bool:
        """P has computed the prompt, and pins its KV; D was not asked yet."""
        leg = self.receipt.legs[-1]
        return leg.kind is Leg.PREFILL and leg.status == 200

    @property
    def has_asked_decode(self) -> bool:
        return self.call is not None and self.call.phase is not Phase.CONNECT

    def may_be_unread(self, now_s: float) -> bool:
        """D was sent its leg and may not have read it: nothing shows it, nor, where no stream was asked for, does time.

        now_s: by the loop's clock.
        """
        call = self.call
        return call is not None and call.may_arrive_late and (self.request.stream or now_s < call.sent_s + READ_BY_S)


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


def held_units(job: Job, turn: Turn, worker: WorkerId) -> int:
    """Messages or items whose KV a worker is believed to hold, by their bytes."""
    match, chain, request = job.match, job.request.prompt.chain, job.request
    held = turn.held.get(worker)
    if held is None or not match.held_tokens:
        return 0
    known_bytes = chain.size - match.new_bytes
    held_bytes = known_bytes * min(1.0, held.tokens / match.held_tokens)
    is_in_head = chain.marks.system > 0 and not any(given(request.fields, name) for name in ("system", "instructions"))
    return bisect_right(chain.ends, held_bytes) - 1 - chain.marks.head + is_in_head
