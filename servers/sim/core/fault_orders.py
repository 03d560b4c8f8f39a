"""Fault orders: what a test tells an engine to do wrong next. Pure; `api.fault_injection` carries them out.

    engine.faults = Faults([Order(FaultKind.RESET, phase=FaultPhase.HEAD, leg=FaultLeg.DECODE, times=2)])
    POST /faults  {"orders": [{"kind": "reset", "phase": "head", "leg": "decode", "times": 2}]}

Setting faults replaces the earlier ones and ends their lasting effects: a wedge, a closed port.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

_Status = Annotated[int, msgspec.Meta(ge=400, le=599)]
_Number = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class FaultKind(StrEnum):
    ERROR = "error"  # HTTP error `status`; an error event once a stream's head is sent
    PAGE = "page"  # `status` with a page of HTML, as from a gateway
    BODY = "body"  # 200 with `body` in place of an answer, or of the rest of a stream
    HANG = "hang"  # silence on an open connection, until the client leaves or the engine stops
    RESET = "reset"  # the connection ends with RST
    CLOSE = "close"  # the connection ends with FIN, in the middle of a body
    KILL = "kill"  # as by SIGKILL: port, side channel and memory are gone at once
    ABORT = "abort"  # the engine ends the answer with finish_reason abort
    SLOW = "slow"  # `delay_s` before each event, or before an answer that is not streamed (HEAD: after its head)
    HANDOFF = "handoff"  # P answers without kv_transfer_params, or without its `member`
    LOAD = "load"  # D fails to load the KV of a handoff, and follows its load failure policy
    ABSENT = "absent"  # of two legs that meet by a key, this one never comes; a P that sends KV sends none
    STOP = "stop"  # P's first token ends its answer
    EXPIRE = "expire"  # P's lease on a finished prefill is over at once; one that sends has nothing left to send
    KILL_AT_TRANSFER = "kill_at_transfer"  # KILL, of a P that a D asks for KV, or that begins to send it
    LEAK = "leak"  # D: an abort while KV is awaited leaves the sequence's blocks in use for good


_OF_TRANSFERS = frozenset(
    {FaultKind.LOAD, FaultKind.ABSENT, FaultKind.STOP, FaultKind.EXPIRE, FaultKind.KILL_AT_TRANSFER, FaultKind.LEAK}
)


class FaultPhase(StrEnum):
    """How much of an answer is sent before ERROR, BODY, HANG, RESET, CLOSE, KILL or ABORT happens.

    For an answer that is not streamed: nothing (REQUEST), its head (HEAD), or half of its body (any other). Only with
    REQUEST has the engine not seen the request.
    """

    REQUEST = "request"  # nothing
    HEAD = "head"  # the status and headers
    EVENTS = "events"  # `after_events` events
    LAST = "last"  # all events but the last, which may be [DONE]
    END = "end"  # all events, but not the end of the body


class FaultLeg(StrEnum):
    """The role of a request, as its protocol tells it."""

    PREFILL = "prefill"  # the engine hands its KV over
    DECODE = "decode"  # the engine pulls another one's KV
    PLAIN = "plain"  # neither


class BatchFate(StrEnum):
    """What becomes of one batch of KV events. Its number is used up and replay has it whole in any case."""

    SENT = "sent"
    LOST = "lost"  # as a message that a full queue drops
    GARBLED = "garbled"  # half of the payload is sent


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """One fault, for the next `times` requests of this `leg`."""

    kind: FaultKind
    times: _Number = 1
    phase: FaultPhase = FaultPhase.REQUEST
    leg: FaultLeg | None = None  # None: any
    after_events: _Number = 1
    status: _Status = 500
    retry_after_s: int | None = None  # sent as a header of an HTTP error
    body: str = ""
    delay_s: _Seconds = 0.0
    member: str = ""  # removed from kv_transfer_params; empty: all of it

    def fits(self, leg: FaultLeg) -> bool:
        return self.times > 0 and not self.strikes_transfer and self.leg in (None, leg)

    @property
    def strikes_transfer(self) -> bool:
        """Whether it strikes between engines, so that no request's answer takes it."""
        return self.kind in _OF_TRANSFERS


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """A request takes the first order that fits it and is not used up; the short forms come after `orders`."""

    orders: list[Order] = []
    refuse: _Number = 0  # requests answered with `refuse_status`
    refuse_status: _Status = 503
    hang: _Number = 0  # never answered
    garbage: _Number = 0  # answered with 200 and a body that is not JSON
    cut: _Number = 0  # reset after `cut_after_events` events, or within the body if not streamed
    cut_after_events: _Number = 1
    wedge: list[str] = []  # ids of P engines whose KV does not move, set on P or on D; "*": all
    deaf_s: _Seconds = 0.0  # for how long connections are refused, from now on
    lose_events: _Number = 0  # batches of KV events that are not sent
    garble_events: _Number = 0  # batches of KV events that are sent in part
    restart_events: bool = False  # once: KV events count from 0, replay has nothing, and the prefix cache is empty

    def take(self, leg: FaultLeg = FaultLeg.PLAIN) -> Order | None:
        for order in self.orders:
            if order.fits(leg):
                order.times -= 1
                return order
        for name, order in self._short_forms():
            if left := getattr(self, name):
                setattr(self, name, left - 1)
                return order
        return None

    def take_of_transfer(self, kind: FaultKind) -> bool:
        for order in self.orders:
            if order.kind is kind and order.times > 0:
                order.times -= 1
                return True
        return False

    def take_batch(self) -> BatchFate:
        if self.lose_events:
            self.lose_events -= 1
            return BatchFate.LOST
        if self.garble_events:
            self.garble_events -= 1
            return BatchFate.GARBLED
        return BatchFate.SENT

    def wedges(self, engine_id: str) -> bool:
        return "*" in self.wedge or engine_id in self.wedge

    def _short_forms(self) -> tuple[tuple[str, Order], ...]:
        return (
            ("refuse", Order(FaultKind.ERROR, status=self.refuse_status)),
            ("hang", Order(FaultKind.HANG)),
            ("garbage", Order(FaultKind.BODY, body="\x00garbage")),
            ("cut", Order(FaultKind.RESET, phase=FaultPhase.EVENTS, after_events=self.cut_after_events)),
        )
