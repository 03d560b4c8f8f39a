"""The failure table as data: it has an answer to everything that can fail, one each, and none that breaks the rules."""

from __future__ import annotations

from itertools import product

import pytest

from ppd.proxy.errors import refusal
from ppd.proxy.failures import (
    ROWS,
    TABLE,
    Cause,
    ClientGets,
    Failure,
    FailureRule,
    HandoffEffect,
    HealthEffect,
    Leg,
    OtherLeg,
    Phase,
    ResidencyEffect,
)
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.upstream.call import BROKEN, GONE, LATE, NOT_HTTP, UNREACHABLE, Call

EVERY = tuple(product(Leg, Phase, Cause))
UNKNOWN = (Cause.UNKNOWN_MODEL, Cause.UNKNOWN_RESPONSE)
STATUSES = (Cause.REQUEST, *UNKNOWN, Cause.OVERLOADED, Cause.SERVER)
ANSWERING = (Leg.DECODE, Leg.LOCAL, Leg.REPLICA)
IN_BODY = (Cause.MALFORMED, Cause.ERROR_EVENT, Cause.NO_HANDOFF)
ENDS = (Cause.RESET, Cause.TIMEOUT, Cause.WORKER_GONE)

# What cannot be: legs, phases, causes, and why.
IMPOSSIBLE: tuple[tuple[tuple[Leg, ...], tuple[Phase, ...], tuple[Cause, ...], str], ...] = (
    (
        tuple(Leg),
        (Phase.QUEUE,),
        (Cause.REFUSED, Cause.RESET, Cause.REQUEST, *UNKNOWN, Cause.SERVER, *IN_BODY),
        "nobody was asked",
    ),
    (tuple(Leg), (Phase.CONNECT,), (Cause.RESET, *STATUSES, *IN_BODY), "nothing was asked yet"),
    (tuple(Leg), tuple(Phase)[2:], (Cause.REFUSED,), "there is a connection"),
    (tuple(Leg), (Phase.SENT,), (*STATUSES, Cause.ERROR_EVENT, Cause.NO_HANDOFF), "nothing of the answer is here"),
    (tuple(Leg), (Phase.HEADERS,), (Cause.ERROR_EVENT, Cause.NO_HANDOFF), "nothing of the body was read"),
    (
        tuple(Leg),
        (Phase.FIRST_EVENT,),
        (*ENDS, *UNKNOWN, Cause.SERVER),
        "it is here, and nothing is awaited; its status was 200",
    ),
    ((Leg.PREFILL,), (Phase.FIRST_EVENT,), (Cause.DRAINING,), "D is asked at once"),
    (ANSWERING, (Phase.FIRST_EVENT, Phase.STREAM, Phase.AFTER), (Cause.NO_HANDOFF,), "only P hands over"),
    (ANSWERING, (Phase.STREAM,), (Cause.WORKER_GONE,), "no probe ends a stream that runs"),
    (ANSWERING, (Phase.STREAM, Phase.AFTER), STATUSES, "its status was 200"),
    (ANSWERING, (Phase.AFTER,), (Cause.MALFORMED, Cause.ERROR_EVENT), "it was all there"),
    ((Leg.PREFILL, Leg.LOCAL, Leg.REPLICA), tuple(Phase)[:5], (Cause.STALE_HANDOFF,), "only D is sent a handoff"),
    ((Leg.LOCAL, Leg.REPLICA), tuple(Phase)[5:], (Cause.STALE_HANDOFF,), "only D is sent a handoff"),
    ((Leg.DECODE,), (Phase.QUEUE, *tuple(Phase)[3:]), (Cause.STALE_HANDOFF,), "D has the KV, or nobody is asked"),
    ((Leg.PREFILL,), (Phase.STREAM, Phase.AFTER), tuple(set(Cause) - {Cause.REFUSED}), "no client gets P's answer"),
)


def test_each_failure_has_one_answer_or_a_reason_why_it_cannot_be() -> None:
    impossible = [where for legs, phases, causes, _ in IMPOSSIBLE for where in product(legs, phases, causes)]
    assert len(impossible) == len(set(impossible))
    assert set(impossible) | set(ROWS) == set(EVERY)
    assert set(impossible) & set(ROWS) == set()


def test_no_two_rows_answer_one_failure() -> None:
    assert sum(len(row.legs) * len(row.phases) * len(row.causes) for row in TABLE) == len(ROWS)


@pytest.mark.parametrize("leg", Leg)
@pytest.mark.parametrize("phase", [Phase.HEADERS, Phase.FIRST_EVENT])
def test_every_error_of_a_worker_has_an_answer(leg: Leg, phase: Phase) -> None:
    for status in range(201, 600):
        # A status other than 200 is seen in the head; in a body of 200 only errors are read.
        if phase is Phase.HEADERS or status >= 400:
            assert (leg, phase, refusal(status, b"", worker="w", phase=phase).cause) in ROWS, status


# What a connection may do at each phase: before it stands there is no answer to be wrong.
TROUBLES = {
    Phase.CONNECT: (UNREACHABLE, LATE, GONE),
    Phase.SENT: (BROKEN, LATE, NOT_HTTP, GONE),
    Phase.HEADERS: (BROKEN, LATE, NOT_HTTP, GONE),
    Phase.STREAM: (BROKEN, LATE),
}


@pytest.mark.parametrize(
    ("phase", "leg"), [each for each in product(TROUBLES, Leg) if each != (Phase.STREAM, Leg.PREFILL)]
)
def test_every_broken_connection_has_an_answer(phase: Phase, leg: Leg) -> None:
    for trouble in TROUBLES[phase]:
        call = Call(Worker(role=Role.DECODE, address="d:1"))
        call.phase = phase
        failure = call.error(*trouble)
        assert (leg, failure.phase, failure.cause) in ROWS, (leg, failure.phase, failure.cause)


def is_sent(leg: Leg, phase: Phase) -> bool:
    """Whether the worker may know of the turn; a P that does not is done without."""
    return leg is Leg.PREFILL or phase is not Phase.CONNECT


CLAIMS = {
    "nothing is tried again that a client has read from": lambda leg, phase, cause, row: (
        phase not in (Phase.STREAM, Phase.AFTER)
        or row.client not in (ClientGets.ANOTHER, ClientGets.ANOTHER_OR_QUEUE, ClientGets.RELAYED)
    ),
    "what is not the worker's fault is not held against it": lambda leg, phase, cause, row: (
        cause not in (Cause.REQUEST, *UNKNOWN, Cause.CLIENT_GONE, Cause.DRAINING)
        or row.health is HealthEffect.UNTOUCHED
    ),
    "a busy worker has not failed": lambda leg, phase, cause, row: (
        cause is not Cause.OVERLOADED or row.health in (HealthEffect.PASSED_OVER, HealthEffect.UNTOUCHED)
    ),
    "a worker is passed over for being busy alone": lambda leg, phase, cause, row: (
        row.health is not HealthEffect.PASSED_OVER or cause is Cause.OVERLOADED
    ),
    "a pair can fail only where KV moves": lambda leg, phase, cause, row: (
        row.health is not HealthEffect.PAIR or leg is Leg.DECODE
    ),
    "there is a handoff only in a hand-over": lambda leg, phase, cause, row: (
        row.handoff is HandoffEffect.NONE or leg in (Leg.PREFILL, Leg.DECODE)
    ),
    "a handoff is given to another D only if its own was not reached": lambda leg, phase, cause, row: (
        row.handoff is not HandoffEffect.RELEASED or (leg, phase) == (Leg.DECODE, Phase.CONNECT)
    ),
    "only P can be told to abort a handoff": lambda leg, phase, cause, row: (
        row.handoff is not HandoffEffect.ABORTED or leg is Leg.PREFILL
    ),
    "a lone leg has no other": lambda leg, phase, cause, row: (
        leg not in (Leg.LOCAL, Leg.REPLICA) or row.other_leg is OtherLeg.NONE
    ),
    "what is learnt is complete": lambda leg, phase, cause, row: (
        (row.residency is ResidencyEffect.LEARNT) == (phase is Phase.AFTER)
    ),
    "who leaves gets nothing": lambda leg, phase, cause, row: (
        cause is not Cause.CLIENT_GONE or row.client is ClientGets.NOTHING
    ),
    "the request's own fault is told as it is": lambda leg, phase, cause, row: (
        cause is not Cause.REQUEST or row.client is ClientGets.RELAYED
    ),
    "busy workers come before the queue, and the queue before a refusal": lambda leg, phase, cause, row: (
        cause is not Cause.OVERLOADED
        or phase is Phase.QUEUE
        or leg is Leg.PREFILL  # D can do without
        or row.client is ClientGets.ANOTHER_OR_QUEUE
    ),
    "what fails before the client's first byte is tried elsewhere": lambda leg, phase, cause, row: (
        phase in (Phase.QUEUE, Phase.STREAM, Phase.AFTER)
        or cause not in (Cause.REFUSED, Cause.RESET, Cause.MALFORMED, Cause.SERVER, Cause.WORKER_GONE)
        or row.client is (ClientGets.ANOTHER if is_sent(leg, phase) else ClientGets.ANOTHER_OR_QUEUE)
    ),
    "a worker that is gone opens its breaker at once": lambda leg, phase, cause, row: (
        cause not in (Cause.WORKER_GONE, Cause.REFUSED)
        or phase in (Phase.QUEUE, Phase.AFTER)
        or row.health is HealthEffect.OPENED
    ),
    "streamed or not, only a time-out makes a difference": lambda leg, phase, cause, row: (
        row.client is row.whole or (cause is Cause.TIMEOUT and row.whole is ClientGets.TIMED_OUT)
    ),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_no_row_breaks_the_rules(claim: str) -> None:
    def breaks(failure: Failure, row: FailureRule) -> bool:
        return not CLAIMS[claim](*failure, row)

    assert [failure for failure, row in ROWS.items() if breaks(failure, row)] == []


def test_every_answer_is_given_somewhere() -> None:
    for kind, used in (
        (ClientGets, {client for row in TABLE for client in (row.client, row.whole)}),
        (OtherLeg, {row.other_leg for row in TABLE}),
        (HandoffEffect, {row.handoff for row in TABLE}),
        (HealthEffect, {row.health for row in TABLE}),
        (ResidencyEffect, {row.residency for row in TABLE}),
    ):
        assert used == set(kind)
