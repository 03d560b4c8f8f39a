"""One attempt at a turn while it runs: what it holds, and what it has of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from ..admission.gate import Seat
from ..admission.keys import Client
from ..connectors.leg import Handoff
from ..failures import Leg, Phase
from ..fleet.worker import WorkerId
from ..openai.answer import AnswerObserver
from ..openai.reply_key import ReplyKey
from ..openai.request import Request
from ..openai.stream_relay import StreamRelay
from ..policy import Decision, Route
from ..runtime.ids import new_id
from ..telemetry.receipts import LegRecord, Receipt
from ..upstream.answer import Answer
from ..upstream.call import Call

_ANSWERING = {Route.LOCAL: Leg.LOCAL, Route.SPLIT: Leg.DECODE, Route.REPLICA: Leg.REPLICA}
ABORTED = "abort"  # the finish reason of an engine that gave up


class Keeper(Protocol):
    """Whose places on workers an attempt holds."""

    def give_back(self, running: Attempt) -> None: ...


class Attempt(msgspec.Struct, kw_only=True, eq=False):
    """One attempt at a turn and all it holds; `close` gives everything back and may be called at any time, twice."""

    request: Request
    decision: Decision
    decode: WorkerId  # the decision's
    receipt: Receipt
    client: Client
    charged_tokens: int  # the estimate that its allowance was charged with
    headers: Mapping[str, str]  # what every leg carries: authorization, content type, tracing
    started_s: float  # the turn's arrival
    asked_s: float  # when this attempt began
    attempt_id: str = msgspec.field(default_factory=new_id)
    handoff: Handoff | None = None  # what P announced, whether D has it or not
    call: Call | None = None  # the answering leg's
    answer: Answer | None = None
    is_left: bool = False  # by its client: no further leg is asked
    leg: LegRecord | None = None  # the answering one, from its beginning on
    holds_prefill: bool = False  # P's place, which is free when P has answered
    keeper: Keeper | None = None  # None: no place is held
    seat: Seat | None = None  # the turn's, once this attempt is the one that answers it

    def close(self) -> None:
        if self.answer is not None:
            self.answer.close()
            self.answer = None
        if self.keeper is not None:
            keeper, self.keeper = self.keeper, None
            keeper.give_back(self)
        if self.seat is not None:
            self.seat.leave()  # the last to go: whoever waits then finds the worker's place free

    def leg_id(self, kind: str) -> str:
        """Unique, whatever ids clients send: engines and P2pNccl tell requests apart by it."""
        return f"{self.attempt_id}-{kind}"

    @property
    def answering_leg(self) -> Leg:
        return _ANSWERING[self.decision.route]

    @property
    def failed_leg(self) -> Leg:
        """After a failure: the leg that was the last to be begun."""
        return self.receipt.legs[-1].kind

    @property
    def has_asked_decode(self) -> bool:
        return self.call is not None and self.call.phase is not Phase.CONNECT


class OpenAnswer(msgspec.Struct):
    """An answer whose first event is here: for a stream the relay and its first bytes, else the whole body."""

    content_type: str
    first: bytes
    observer: AnswerObserver
    reply: ReplyKey  # fed by the observer
    relay: StreamRelay | None  # None: `first` is all of it
    handoff: Handoff | None
