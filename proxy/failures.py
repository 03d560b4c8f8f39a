"""What becomes of a turn when something fails: one row for each leg, phase and cause.

The router and the dispatcher read their next step here, docs/failures.md prints the table, and the fault matrix of the
tests provokes each row and checks what happens. A phase is what the leg was doing when it failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from types import MappingProxyType


class Leg(StrEnum):
    """One upstream request, by what it is for."""

    PREFILL = "prefill"  # P computes the prompt
    DECODE = "decode"  # D pulls the KV and answers
    LOCAL = "local"  # D answers from the prefix that it holds
    REPLICA = "replica"  # R does both


class Phase(StrEnum):
    QUEUE = "queue"  # the turn waits; no worker was asked
    CONNECT = "connect"
    SENT = "request_sent"  # waiting for the head of the answer
    HEADERS = "headers"  # the head is here; waiting for a stream's first event, or the rest of a whole body
    FIRST_EVENT = "first_event"  # the first event or the whole body is here, and is checked
    STREAM = "mid_stream"  # the client has received bytes
    AFTER = "after_last_event"  # the answer was complete


class Cause(StrEnum):
    REFUSED = "refused"  # no connection: refused, unreachable, no such host, no TLS
    RESET = "reset"  # the connection ended early
    TIMEOUT = "timeout"
    REQUEST = "4xx"  # the request's own fault, whichever worker is asked; also 508, a loop of proxies
    UNKNOWN_MODEL = "unknown_model"  # 404: the worker has unloaded what it had listed, as an adapter
    UNKNOWN_RESPONSE = "unknown_response"  # 404: another engine has stored the response that the request goes on from
    OVERLOADED = "overloaded"  # 429 or 503
    SERVER = "5xx"
    MALFORMED = "malformed"  # not HTTP, not JSON, empty, or aborted by the engine before its first token
    NO_HANDOFF = "no_handoff"  # P answered, but with nothing that D could use
    STALE_HANDOFF = "stale_handoff"  # P was asked so long ago that it may have given the KV's blocks to others
    ERROR_EVENT = "error_event"  # an error in a stream whose status was 200
    # By probes, or as its port was closed, before the leg's answer began.
    WORKER_GONE = "worker_gone"
    CLIENT_GONE = "client_gone"
    DRAINING = "draining"  # the proxy is being stopped


class ClientGets(StrEnum):
    ANOTHER = (
        "another worker, by the rules below; with none left 502, after a time-out 504, of no such model or response 404"
    )
    AFRESH = "the answer: the same P is asked again, then another; D computes alone after `attempts`, or without budget"
    ANOTHER_OR_QUEUE = "another worker, then the queue, then 503, or 429 if all say so, with Retry-After"
    RELAYED = "the worker's own error, unchanged; only its status if it names a worker"
    TIMED_OUT = "504: another try would take as long"
    REFUSED = "503 with Retry-After and the reason"
    GOES_ON = "the answer: the turn goes on"
    UNTIL_LIMIT = "the rest of the answer; at the shutdown limit 503 if none was sent, or an error event, no [DONE]"
    BROKEN_OFF = "an error event and no [DONE]"
    PASSED_ON = "the worker's own error event, or ours if it names a worker, and no [DONE]"
    NOTHING = "nothing more"


class OtherLeg(StrEnum):
    NONE = "there is none"
    NOT_ASKED = "D is not asked"
    ENDED = "D is asked for one token"
    ASKED = "D computes the prompt itself"
    REDONE = "P computes the prompt again for the next D"
    DONE = "P had finished"
    GOES_ON = "goes on"


class HandoffEffect(StrEnum):
    NONE = "there is none"
    ABORTED = "P is told to abort; if it announces one all the same, D takes it"
    RELEASED = (
        "up to three other D are asked for a token until one is reached; else P keeps the KV until the lease ends"
    )
    TAKEN = "D takes it, or frees it when it is told to abort"
    LEFT = "never used again; counted as outstanding until its lease ends"


class HealthEffect(StrEnum):
    UNTOUCHED = "untouched"
    COUNTED = "a failure of the worker"
    OPENED = "a failure that opens the worker's breaker"
    PAIR = "a failure of the pair of P and D"
    PASSED_OVER = "passed over until its Retry-After; no failure"


class ResidencyEffect(StrEnum):
    UNCHANGED = "unchanged"
    FALLS = "dropped if the worker comes back with another incarnation"
    LEARNT = "recorded: the turn was complete"


@dataclass(frozen=True, slots=True)
class FailureRule:
    """What follows failures of some legs, in some phases, from some causes."""

    legs: tuple[Leg, ...]
    phases: tuple[Phase, ...]
    causes: tuple[Cause, ...]
    client: ClientGets
    whole: ClientGets  # what the client gets if the answer is not streamed
    other_leg: OtherLeg
    handoff: HandoffEffect
    health: HealthEffect
    residency: ResidencyEffect

    def client_gets(self, *, stream: bool) -> ClientGets:
        return self.client if stream else self.whole


Failure = tuple[Leg, Phase, Cause]


_EVERY, _P, _D, _ALONE = tuple(Leg), (Leg.PREFILL,), (Leg.DECODE,), (Leg.LOCAL, Leg.REPLICA)
_QUEUE, _CONNECT, _SENT, _HEADERS, _FIRST, _STREAM, _AFTER = ((phase,) for phase in Phase)
_ASKED = _SENT + _HEADERS
_UNKNOWN = (Cause.UNKNOWN_MODEL, Cause.UNKNOWN_RESPONSE)
_UNSEEN = _CONNECT + _ASKED + _FIRST  # the client has had no byte
_Where = tuple[tuple[Leg, ...], tuple[Phase, ...], tuple[Cause, ...]]


def _row(
    where: _Where,
    client: ClientGets,
    other_leg: OtherLeg = OtherLeg.NONE,
    handoff: HandoffEffect = HandoffEffect.NONE,
    health: HealthEffect = HealthEffect.UNTOUCHED,
    residency: ResidencyEffect = ResidencyEffect.UNCHANGED,
    *,
    whole: ClientGets | None = None,
) -> FailureRule:
    return FailureRule(*where, client, whole or client, other_leg, handoff, health, residency)


# fmt: off
def _queue_rows() -> Iterator[FailureRule]:
    c, r = ClientGets, ResidencyEffect
    yield _row((_EVERY, _QUEUE, (Cause.OVERLOADED, Cause.TIMEOUT, Cause.DRAINING)), c.REFUSED)
    yield _row((_EVERY, _QUEUE, (Cause.CLIENT_GONE,)), c.NOTHING)
    yield _row((_EVERY, _QUEUE, (Cause.WORKER_GONE,)), c.GOES_ON, residency=r.FALLS)


def _prefill_rows() -> Iterator[FailureRule]:
    c, o, h, s, r = ClientGets, OtherLeg, HandoffEffect, HealthEffect, ResidencyEffect
    failed = (Cause.RESET, Cause.TIMEOUT, Cause.MALFORMED)
    yield _row((_P, _CONNECT, (Cause.REFUSED,)), c.ANOTHER, o.NOT_ASKED, h.NONE, s.OPENED, r.FALLS)
    yield _row((_P, _CONNECT, (Cause.TIMEOUT,)), c.ANOTHER, o.NOT_ASKED, h.NONE, s.COUNTED)
    yield _row((_P, _ASKED, failed), c.ANOTHER, o.NOT_ASKED, h.ABORTED, s.COUNTED)
    yield _row((_P, _HEADERS, (Cause.SERVER,)), c.ANOTHER, o.NOT_ASKED, h.NONE, s.COUNTED)
    yield _row((_P, _HEADERS + _FIRST, (Cause.OVERLOADED,)), c.ANOTHER, o.NOT_ASKED, h.NONE, s.PASSED_OVER)
    yield _row((_P, _HEADERS + _FIRST, (Cause.REQUEST,)), c.RELAYED, o.NOT_ASKED)
    yield _row((_P, _HEADERS, _UNKNOWN), c.ANOTHER, o.NOT_ASKED)
    yield _row((_P, _FIRST, (Cause.MALFORMED, Cause.ERROR_EVENT)), c.ANOTHER, o.NOT_ASKED, h.NONE, s.COUNTED)
    yield _row((_P, _FIRST, (Cause.NO_HANDOFF,)), c.GOES_ON, o.ASKED)
    yield _row((_P, _CONNECT + _ASKED, (Cause.WORKER_GONE,)), c.ANOTHER, o.NOT_ASKED, h.NONE, s.OPENED, r.FALLS)
    yield _row((_P, _CONNECT + _ASKED, (Cause.CLIENT_GONE,)), c.NOTHING, o.NOT_ASKED, h.ABORTED)
    yield _row((_P, _FIRST, (Cause.CLIENT_GONE,)), c.NOTHING, o.ENDED, h.TAKEN)
    yield _row((_P, _CONNECT + _ASKED, (Cause.DRAINING,)), c.UNTIL_LIMIT, o.GOES_ON, h.TAKEN)


def _decode_rows() -> Iterator[FailureRule]:  # before the client's first byte
    c, o, h, s, r = ClientGets, OtherLeg, HandoffEffect, HealthEffect, ResidencyEffect
    broken, gone = (Cause.RESET, Cause.MALFORMED), (Cause.REFUSED, Cause.WORKER_GONE)
    yield _row((_D, _CONNECT, gone), c.ANOTHER_OR_QUEUE, o.REDONE, h.RELEASED, s.OPENED, r.FALLS)
    yield _row((_D, _CONNECT, (Cause.TIMEOUT,)), c.ANOTHER_OR_QUEUE, o.REDONE, h.RELEASED, s.COUNTED)
    # A D that pulls late caches other prompts' KV as this one's: nothing may be released to it, nor asked of it again.
    yield _row((_D, _CONNECT, (Cause.STALE_HANDOFF,)), c.AFRESH, o.REDONE, h.LEFT)
    yield _row((_D, _SENT, (Cause.STALE_HANDOFF,)), c.ANOTHER, o.REDONE, h.LEFT, s.COUNTED)
    yield _row((_D, _ASKED, (Cause.TIMEOUT,)), c.ANOTHER, o.REDONE, h.LEFT, s.PAIR, whole=c.TIMED_OUT)
    yield _row((_D, _ASKED, broken), c.ANOTHER, o.REDONE, h.LEFT, s.COUNTED)
    # Its engine has failed the request, which it may as well do where it could not get P's KV.
    yield _row((_D, _HEADERS, (Cause.SERVER,)), c.ANOTHER, o.REDONE, h.LEFT, s.PAIR)
    yield _row((_D, _FIRST, (Cause.ERROR_EVENT,)), c.ANOTHER, o.REDONE, h.LEFT, s.PAIR)
    # A D that refuses a request tells P that its blocks are free, so no other D may read them.
    yield _row((_D, _HEADERS + _FIRST, (Cause.OVERLOADED,)), c.ANOTHER_OR_QUEUE, o.REDONE, h.LEFT, s.PASSED_OVER)
    yield _row((_D, _HEADERS + _FIRST, (Cause.REQUEST,)), c.RELAYED, o.DONE, h.LEFT)
    yield _row((_D, _HEADERS, _UNKNOWN), c.ANOTHER, o.REDONE, h.LEFT)
    yield _row((_D, _FIRST, (Cause.MALFORMED,)), c.ANOTHER, o.REDONE, h.LEFT, s.COUNTED)
    yield _row((_D, _ASKED, (Cause.WORKER_GONE,)), c.ANOTHER, o.REDONE, h.LEFT, s.OPENED, r.FALLS)
    yield _row((_D, _UNSEEN, (Cause.CLIENT_GONE,)), c.NOTHING, o.DONE, h.TAKEN)


def _single_leg_rows() -> Iterator[FailureRule]:  # before the client's first byte
    c, o, h, s, r = ClientGets, OtherLeg, HandoffEffect, HealthEffect, ResidencyEffect
    broken, wrong = (Cause.RESET, Cause.MALFORMED), (Cause.MALFORMED, Cause.ERROR_EVENT)
    gone = (Cause.REFUSED, Cause.WORKER_GONE)
    yield _row((_ALONE, _CONNECT, gone), c.ANOTHER_OR_QUEUE, o.NONE, h.NONE, s.OPENED, r.FALLS)
    yield _row((_ALONE, _CONNECT, (Cause.TIMEOUT,)), c.ANOTHER_OR_QUEUE, o.NONE, h.NONE, s.COUNTED)
    yield _row((_ALONE, _ASKED, (Cause.TIMEOUT,)), c.ANOTHER, o.NONE, h.NONE, s.COUNTED, whole=c.TIMED_OUT)
    yield _row((_ALONE, _ASKED, broken), c.ANOTHER, o.NONE, h.NONE, s.COUNTED)
    yield _row((_ALONE, _HEADERS, (Cause.SERVER,)), c.ANOTHER, o.NONE, h.NONE, s.COUNTED)
    yield _row((_ALONE, _HEADERS + _FIRST, (Cause.OVERLOADED,)), c.ANOTHER_OR_QUEUE, o.NONE, h.NONE, s.PASSED_OVER)
    yield _row((_ALONE, _HEADERS + _FIRST, (Cause.REQUEST,)), c.RELAYED)
    yield _row((_ALONE, _HEADERS, _UNKNOWN), c.ANOTHER)
    yield _row((_ALONE, _FIRST, wrong), c.ANOTHER, o.NONE, h.NONE, s.COUNTED)
    yield _row((_ALONE, _ASKED, (Cause.WORKER_GONE,)), c.ANOTHER, o.NONE, h.NONE, s.OPENED, r.FALLS)
    yield _row((_ALONE, _UNSEEN, (Cause.CLIENT_GONE,)), c.NOTHING)


def _stream_rows(legs: tuple[Leg, ...], o: OtherLeg, h: HandoffEffect) -> Iterator[FailureRule]:
    # Once the client has received bytes, nothing is tried again, and no probe ends the stream.
    c, s, r = ClientGets, HealthEffect, ResidencyEffect
    late = (Cause.RESET, Cause.TIMEOUT, Cause.WORKER_GONE, Cause.CLIENT_GONE, Cause.DRAINING)
    yield _row((legs, _UNSEEN + _STREAM, (Cause.DRAINING,)), c.UNTIL_LIMIT, o, h)
    yield _row((legs, _STREAM, (Cause.RESET, Cause.TIMEOUT)), c.BROKEN_OFF, o, h, s.COUNTED)
    yield _row((legs, _STREAM, (Cause.ERROR_EVENT,)), c.PASSED_ON, o, h, s.COUNTED)
    yield _row((legs, _STREAM, (Cause.MALFORMED,)), c.GOES_ON, o, h)
    yield _row((legs, _STREAM, (Cause.CLIENT_GONE,)), c.NOTHING, o, h)
    yield _row((legs, _AFTER, late), c.NOTHING, o, h, s.UNTOUCHED, r.LEARNT)
# fmt: on


TABLE: tuple[FailureRule, ...] = (
    *_queue_rows(),
    *_prefill_rows(),
    *_decode_rows(),
    *_single_leg_rows(),
    *_stream_rows(_D, OtherLeg.DONE, HandoffEffect.TAKEN),
    *_stream_rows(_ALONE, OtherLeg.NONE, HandoffEffect.NONE),
)
"""In the order in which docs/failures.md shows it."""

ROWS: Mapping[Failure, FailureRule] = MappingProxyType(
    {failure: row for row in TABLE for failure in product(row.legs, row.phases, row.causes)}
)
"""The row of every failure that is possible."""


def as_markdown() -> str:
    columns = (
        "leg",
        "phase",
        "cause",
        "client",
        "client, not streamed",
        "other leg",
        "handoff",
        "worker health",
        "residency",
    )
    lines = [columns, tuple("---" for _ in columns)]
    for row in TABLE:
        where = (_words(row.legs), _words(row.phases), _words(row.causes))
        whole = "" if row.whole is row.client else _word(row.whole)
        rest = (row.other_leg, row.handoff, row.health, row.residency)
        lines.append((*where, _word(row.client), whole, *(_word(value) for value in rest)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _words(values: tuple[StrEnum, ...]) -> str:
    return "any" if values == _EVERY else ", ".join(value.replace("_", " ") for value in values)


def _word(value: StrEnum) -> str:
    return "" if value.name in ("NONE", "UNTOUCHED", "UNCHANGED") else value.name.lower().replace("_", " ")
