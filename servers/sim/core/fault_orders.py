"""Faults to order: what a test tells an engine to do wrong next. Pure; `sabotage` does it.

    engine.faults = Faults([Order(Kind.RESET, phase=Phase.HEAD, leg=Leg.DECODE, times=2)])
    POST /faults  {"orders": [{"kind": "reset", "phase": "head", "leg": "decode", "times": 2}]}

Setting faults replaces those that were set before, and heals what they had broken off: a wedge, a closed port.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec

_Status = Annotated[int, msgspec.Meta(ge=400, le=599)]
_Number = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class FaultKind(StrEnum):
    ERROR = "error"  # `status`: an HTTP error, or an event once a stream's head is sent
    PAGE = "page"  # `status` with a page of HTML, as something in between answers
    BODY = "body"  # 200 with `body` in place of an answer, or of the rest of a stream
    HANG = "hang"  # silence on an open connection, until the client leaves or the engine stops
    RESET = "reset"  # the connection ends with RST
    CLOSE = "close"  # the connection ends with FIN, in the middle of a body
    KILL = "kill"  # the engine is gone at once, with its port, its side channel and its memory
    ABORT = "abort"  # the engine ends the answer with finish_reason abort
    SLOW = "slow"  # `delay_s` before each event, or before an answer that is not streamed
    HANDOFF = "handoff"  # P answers without kv_transfer_params, or without its `member`
    LOAD = "load"  # D fails to load the KV of a handoff, and does what its policy says


class FaultPhase(StrEnum):
    """How far an answer comes before ERROR, BODY, HANG, RESET, CLOSE, KILL or ABORT strikes.

    What is not streamed has three: nothing of it is sent, its head, or half of its body (EVENTS, LAST). Before the
    engine has seen the request is REQUEST only.
    """

    REQUEST = "request"  # nothing is sent
    HEAD = "head"  # the status and headers are
    EVENTS = "events"  # `after_events` events are
    LAST = "last"  # all events but the last are: [DONE], where there is one
    END = "end"  # all events are, but not the end of the body


class FaultLeg(StrEnum):
    """What a request asks of an engine, by its kv_transfer_params."""

    PREFILL = "prefill"  # to hand its KV over
    DECODE = "decode"  # to pull another engine's
    PLAIN = "plain"  # neither


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """One fault, for the next `times` requests that are of its `leg`."""

    kind: FaultKind
    times: _Number = 1
    phase: FaultPhase = FaultPhase.REQUEST
    leg: FaultLeg | None = None  # None: any
    after_events: _Number = 1
    status: _Status = 500
    retry_after_s: int | None = None  # as a header, where there is one to send
    body: str = ""
    delay_s: _Seconds = 0.0
    member: str = ""  # empty: all of kv_transfer_params

    def fits(self, leg: FaultLeg) -> bool:
        return self.times > 0 and self.kind is not FaultKind.LOAD and self.leg in (None, leg)


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """Each request takes the first order that fits it and is not used up; the short forms come after the orders."""

    orders: list[Order] = []
    refuse: _Number = 0  # requests answered with `refuse_status`
    refuse_status: _Status = 503
    hang: _Number = 0  # never answered
    garbage: _Number = 0  # answered 200 with a body that is not JSON
    cut: _Number = 0  # reset after `cut_after_events` streamed events, or within the body where not streamed
    cut_after_events: _Number = 1
    wedge: list[str] = []  # ids of the P engines from which no KV comes, on P or on D; "*": all
    deaf_s: _Seconds = 0.0  # connections are refused for so long, from now on

    def take(self, leg: FaultLeg = FaultLeg.PLAIN) -> Order | None:
        """The fault that the request at hand gets."""
        for order in self.orders:
            if order.fits(leg):
                order.times -= 1
                return order
        for name, order in self._short_forms():
            if left := getattr(self, name):
                setattr(self, name, left - 1)
                return order
        return None

    def take_load(self) -> bool:
        """Whether the load of KV at hand fails."""
        for order in self.orders:
            if order.kind is FaultKind.LOAD and order.times > 0:
                order.times -= 1
                return True
        return False

    def wedges(self, engine_id: str) -> bool:
        return "*" in self.wedge or engine_id in self.wedge

    def _short_forms(self) -> tuple[tuple[str, Order], ...]:
        return (
            ("refuse", Order(FaultKind.ERROR, status=self.refuse_status)),
            ("hang", Order(FaultKind.HANG)),
            ("garbage", Order(FaultKind.BODY, body="\x00garbage")),
            ("cut", Order(FaultKind.RESET, phase=FaultPhase.EVENTS, after_events=self.cut_after_events)),
        )


def leg_of(body: bytes) -> FaultLeg:
    """By a request's body; one that cannot be read is PLAIN."""
    try:
        params = msgspec.json.decode(body, type=_Asked).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return FaultLeg.PLAIN
    if not isinstance(params, dict):
        return FaultLeg.PLAIN
    if params.get("do_remote_prefill"):
        return FaultLeg.DECODE
    return FaultLeg.PREFILL if params.get("do_remote_decode") else FaultLeg.PLAIN


class _Asked(msgspec.Struct):
    kv_transfer_params: Any = None
