"""What has failed in a turn so far: what may be tried again, without whom, and when it ends."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from ppd.proxy.admission.keys import Client
from ppd.proxy.admission.tenant_scope import TenantScope
from ppd.proxy.connectors.leg import Handoff
from ppd.proxy.errors import LegError, Overloaded
from ppd.proxy.failures import ROWS, Cause, ClientGets, Failure, HealthEffect, Leg, Phase
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Role, WorkerId
from ppd.proxy.health.circuit_breaker import RetryBudget
from ppd.proxy.health.poisoned_prompts import is_loss
from ppd.proxy.health.worker_health import Key
from ppd.proxy.openai.edits import Redaction
from ppd.proxy.routing.failed_attempts import FailedAttempts
from ppd.proxy.routing.router import MOST_SEARCHED, search_limit
from ppd.proxy.routing.service import in_class
from ppd.proxy.telemetry.receipts import LegRecord
from tests.support.attempts import decision, running, view
from tests.support.requests import parse

P1, P2, D1, D2 = view(Role.PREFILL, 1), view(Role.PREFILL, 2), view(Role.DECODE, 1), view(Role.DECODE, 2)
VIEWS = (P1, P2, D1, D2)
OWN, OTHER = (TenantScope(name, name) for name in (b"1" * 32, b"2" * 32))
NO_ERRORS = (Cause.CLIENT_GONE, Cause.DRAINING, Cause.NO_HANDOFF)
ERRORS = [each for each in ROWS if each[1] is not Phase.QUEUE and each[2] not in NO_ERRORS]
D_REFUSED = (Leg.DECODE, Phase.CONNECT, Cause.REFUSED)
D_RESET = (Leg.DECODE, Phase.SENT, Cause.RESET)
D_DEAD = (Leg.DECODE, Phase.SENT, Cause.WORKER_GONE)
P_REFUSED = (Leg.PREFILL, Phase.CONNECT, Cause.REFUSED)
P_RESET = (Leg.PREFILL, Phase.SENT, Cause.RESET)
P_BUSY = (Leg.PREFILL, Phase.HEADERS, Cause.OVERLOADED)
D_BUSY = (Leg.DECODE, Phase.HEADERS, Cause.OVERLOADED)
PAIR_TIMEOUT = (Leg.DECODE, Phase.HEADERS, Cause.TIMEOUT)


def fail(
    failed: FailedAttempts,
    failure: Failure,
    *,
    stream: bool = True,
    status: int = 503,
    retry_after_s: float = 0.0,
    prefill: WorkerView | None = None,
) -> bool:
    leg, phase, cause = failure
    begun = (Leg.PREFILL, Leg.DECODE) if leg is Leg.DECODE else (leg,)
    attempt = running(decision(leg, prefill), *begun, stream=stream)
    exc = LegError("", worker="", phase=phase, cause=cause, status=status, retry_after_s=retry_after_s)
    may = failed.may_try_again(attempt, exc, ROWS[failure])
    assert failed.last is exc
    return may


def asked(*views: WorkerView) -> list[LegRecord]:
    return [
        LegRecord(kind=Leg.LOCAL, worker=each.name, address=each.id, started_s=0.0, error="reset") for each in views
    ]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("failure", ERRORS, ids="-".join)
def test_a_turn_is_tried_again_where_its_row_says_so(failure: Failure, stream: bool) -> None:
    gets = ROWS[failure].client_gets(stream=stream)
    again = gets in (ClientGets.ANOTHER, ClientGets.ANOTHER_OR_QUEUE, ClientGets.AFRESH)
    assert fail(FailedAttempts(3), failure, stream=stream) is again


BROKEN = [each for each in ERRORS if ROWS[each].client is ClientGets.ANOTHER and each[2] is not Cause.OVERLOADED]


@pytest.mark.parametrize("failure", BROKEN, ids="-".join)
def test_the_next_try_does_without_whom_the_failure_was(failure: Failure) -> None:
    failed = FailedAttempts(3)
    fail(failed, failure)
    made = decision(failure[0])
    assert made.prefill is None or made.prefill.id == P1.id
    own = P1.id if failure[0] is Leg.PREFILL else made.decode.id
    expected = ((P1.id, D1.id), P1.id, D1.id) if ROWS[failure].health is HealthEffect.PAIR else (own,)
    assert failed.avoid(VIEWS, (), ()) == expected


@pytest.mark.parametrize(
    ("others", "busy", "blocked", "without"),
    [
        ((P2, D2), [], [], {P1.id, D1.id}),
        ((P2, D2), [P2.id], [], {D1.id, P2.id}),
        ((P2, D2), [D2.id], [], {P1.id, D2.id}),
        ((P2, D2), [], [P2.id], {D1.id}),
        ((P2, D2), [], [D2.id], {P1.id}),
        ((P2,), [], [], {P1.id}),
        ((D2,), [], [], {D1.id}),
        ((), [], [], set()),
    ],
    ids=["there are others", "P is busy", "D is busy", "P gets no turns", "D gets none", "no D", "no P", "neither"],
)
def test_after_a_failure_of_a_pair_another_p_and_another_d_come_first(
    others: tuple[WorkerView, ...], busy: list[WorkerId], blocked: list[WorkerId], without: set[Key]
) -> None:
    failed = FailedAttempts(3)
    fail(failed, PAIR_TIMEOUT)
    assert set(failed.avoid((P1, D1, *others), (), busy, blocked)) == {(P1.id, D1.id), *without}


@pytest.mark.parametrize(("own", "without"), [(D1.id, {P1.id}), (D2.id, {P1.id, D1.id}), (None, {P1.id, D1.id})])
def test_the_d_that_holds_the_session_is_asked_once_more(own: WorkerId | None, without: set[Key]) -> None:
    failed = FailedAttempts(3)
    fail(failed, PAIR_TIMEOUT)
    assert set(failed.avoid(VIEWS, (), (), (), own)) == {(P1.id, D1.id), *without}


def test_after_too_many_handoffs_no_p_is_asked_not_even_one_that_gets_no_turns() -> None:
    failed = FailedAttempts(1)
    fail(failed, PAIR_TIMEOUT)
    assert {P1.id, P2.id} <= set(failed.avoid(VIEWS, (), (), [P2.id]))


def test_a_turn_that_may_have_ended_two_at_once_is_asked_of_one() -> None:
    failed = FailedAttempts(9)
    failed.ask_one()
    assert {P1.id, P2.id} <= set(failed.avoid(VIEWS, (), ()))


def test_where_pairs_of_every_p_have_failed_each_may_be_tried_with_another_d() -> None:
    failed = FailedAttempts(9)
    fail(failed, PAIR_TIMEOUT)
    fail(failed, PAIR_TIMEOUT, prefill=P2)
    assert set(failed.avoid(VIEWS, (), ())) == {(P1.id, D1.id), (P2.id, D1.id), D1.id}


def test_answers_have_a_limit() -> None:
    failed = FailedAttempts(3)
    assert [fail(failed, D_RESET) for _ in range(3)] == [True, True, False]


def test_a_stored_response_is_looked_for_on_so_many_workers() -> None:
    """Without any limit of attempts: but a wrong id would be asked of each worker of a large fleet."""
    failed, leg = FailedAttempts(limit=1, search_limit=MOST_SEARCHED), Leg.LOCAL
    row = ROWS[leg, Phase.HEADERS, Cause.UNKNOWN_RESPONSE]
    exc = LegError("", worker="", phase=Phase.HEADERS, cause=Cause.UNKNOWN_RESPONSE, status=404)
    may = [failed.book(leg, WorkerId(f"d{at}"), exc, row, row.whole) for at in range(MOST_SEARCHED)]
    assert may == [True] * (MOST_SEARCHED - 1) + [False]
    assert failed.error() is exc


@pytest.mark.parametrize(
    ("client", "limit"),
    [
        (Client(name="", tenant=""), MOST_SEARCHED),  # anybody may have made the id up
        (Client(name="one", tenant="one", scope=OTHER), MOST_SEARCHED),  # known to be this tenant's in another way
        (Client(name="one", tenant="one", scope=OWN), sys.maxsize),
    ],
)
def test_an_id_that_was_made_for_the_tenant_is_looked_for_on_all_workers(client: Client, limit: int) -> None:
    assert search_limit(client, OWN.new_response_id()) == limit


@pytest.mark.parametrize("refused", [D_REFUSED, P_REFUSED])
def test_a_refused_connection_uses_up_no_try(refused: Failure) -> None:
    failed = FailedAttempts(1)
    assert all(fail(failed, refused) for _ in range(10))
    assert P2.id not in failed.avoid(VIEWS, (), ()), "nor one with a handoff"
    assert not fail(failed, D_RESET)


def test_with_hand_overs_used_up_the_turn_does_without_them() -> None:
    failed = FailedAttempts(2)
    assert fail(failed, P_RESET)
    assert P2.id not in failed.avoid(VIEWS, (), ())
    assert fail(failed, PAIR_TIMEOUT)
    assert {P1.id, P2.id} < set(failed.avoid(VIEWS, (), ()))
    assert D2.id not in failed.avoid(VIEWS, (), ())


def test_failing_ps_use_up_no_try_of_d() -> None:
    failed = FailedAttempts(2)
    assert all(fail(failed, P_RESET) for _ in range(10))
    assert fail(failed, D_RESET)
    assert not fail(failed, D_RESET)


TOO_OLD = (Leg.DECODE, Phase.CONNECT, Cause.STALE_HANDOFF)


def test_a_handoff_that_is_too_old_is_made_again_by_the_p_that_has_the_prompt_and_then_by_another() -> None:
    failed = FailedAttempts(3)
    left_out = []
    for _ in range(3):
        assert fail(failed, TOO_OLD)
        left_out.append(set(failed.avoid(VIEWS, (), ())))
    assert left_out == [{P2.id}, {P1.id}, {P1.id, P2.id}], "in the end D computes alone"


@pytest.mark.parametrize("failure", [TOO_OLD, P_RESET, D_RESET, PAIR_TIMEOUT])
def test_a_turn_is_lent_once_and_no_p_is_left_out_for_it(failure: Failure) -> None:
    failed = FailedAttempts(3)
    assert fail(failed, failure, prefill=D2)
    assert failed.is_lent
    assert not {P1.id, P2.id} & set(failed.avoid(VIEWS, (), ()))
    assert (D2.id in failed.avoid(VIEWS, (), ())) is (failure == P_RESET), "it may answer, unless it failed itself"
    failed = FailedAttempts(3)
    fail(failed, failure)
    assert not failed.is_lent


def test_a_p_that_has_the_prompt_and_fails_is_not_the_only_one_any_longer() -> None:
    failed = FailedAttempts(3)
    fail(failed, TOO_OLD)
    fail(failed, P_RESET)
    assert failed.avoid(VIEWS, (), ()) == (P1.id,)


@pytest.mark.parametrize(("failure", "may"), [(TOO_OLD, True), (D_REFUSED, False), (P_RESET, False)])
def test_without_budget_a_d_that_was_not_asked_computes_alone(failure: Failure, may: bool) -> None:
    failed = FailedAttempts(3)
    fail(failed, failure)
    assert failed.may_do_without() is may
    assert ({P1.id, P2.id} <= set(failed.avoid(VIEWS, (), ()))) is may


def test_a_d_that_was_not_reached_may_be_asked_again_after_a_wait_and_was_not_asked() -> None:
    failed = FailedAttempts(2)
    fail(failed, P_RESET)
    assert not failed.forgive_unreached()
    fail(failed, D_REFUSED)
    assert set(failed.avoid(VIEWS, (), ())) == {P1.id, D1.id}
    assert failed.forgive_unreached()
    unreached = asked(D1, D1, D1)
    for leg in unreached:
        leg.phase = Phase.CONNECT
    assert failed.avoid(VIEWS, unreached, ()) == (P1.id,)


def test_a_worker_is_left_out_while_it_is_busy_and_after_it_was_asked_twice() -> None:
    failed = FailedAttempts(3)
    fail(failed, P_RESET)
    fail(failed, D_BUSY)
    assert set(failed.avoid(VIEWS, asked(P1, D1), [D1.id])) == {P1.id, D1.id}
    assert failed.avoid(VIEWS, asked(P1, D1), []) == (P1.id,), "its Retry-After is over"
    assert set(failed.avoid(VIEWS, asked(P1, D1, D2, D1), [])) == {P1.id, D1.id}
    ended = asked(D1, D1)
    for leg in ended:
        leg.error = None
    assert failed.avoid(VIEWS, ended, []) == (P1.id,), "P's failure ended these"


@pytest.mark.parametrize(
    ("failures", "paid"),
    [
        ([D_RESET], "retried"),
        ([D_BUSY], "retried"),
        ([P_BUSY], "retried"),
        ([D_REFUSED], "moved"),
        ([D_DEAD], "moved"),
        ([P_REFUSED, D_RESET], "retried"),
    ],
)
def test_what_follows_the_death_of_a_worker_is_free(failures: list[Failure], paid: str) -> None:
    failed, budget = FailedAttempts(3), RetryBudget(0.0, 1)
    for failure in failures:
        fail(failed, failure)
    assert failed.is_moved is (D_DEAD in failures), "one that was not sent to it is as new"
    assert failed.pay(budget) == paid
    assert budget.tokens == (0 if paid == "retried" else 1)
    fail(failed, D_RESET)
    assert failed.pay(RetryBudget(0.0, 0)) == "no_budget"


@pytest.mark.parametrize(
    ("failures", "status", "retry_after_s"),
    [
        ([(D_BUSY, 429, 3.0), (D_BUSY, 429, 7.0), (D_BUSY, 429, 5.0)], 429, 7.0),
        ([(D_BUSY, 429, 3.0), (D_BUSY, 503, 1.0)], 503, 4.0),
        ([(D_BUSY, 503, 0.0)], 503, 4.0),
        ([(D_RESET, 502, 0.0), (D_BUSY, 429, 9.0)], 503, 9.0),
    ],
)
def test_what_the_client_hears_of_busy_workers(
    failures: list[tuple[Failure, int, float]], status: int, retry_after_s: float
) -> None:
    """429 only where every worker said so, and the longest Retry-After; another turn was told 4 s."""
    failed = FailedAttempts(3)
    for failure, said, after_s in failures:
        fail(failed, failure, status=said, retry_after_s=after_s)
    error = failed.error(4.0)
    assert isinstance(error, Overloaded)
    assert (error.reason, error.status, error.retry_after_s) == ("workers_overloaded", status, retry_after_s)


def test_another_failure_reaches_the_client_as_it_is() -> None:
    failed = FailedAttempts(3)
    fail(failed, D_BUSY, status=429)
    fail(failed, D_RESET, status=502)
    assert failed.error(4.0) is failed.last


@pytest.mark.parametrize("failure", ERRORS, ids="-".join)
def test_a_connection_that_ends_after_the_request_is_a_loss(failure: Failure) -> None:
    """Not one that was refused, nor a worker that is only slow."""
    _, phase, cause = failure
    ends = cause in (Cause.RESET, Cause.WORKER_GONE) and phase in (Phase.SENT, Phase.HEADERS)
    assert is_loss(LegError("", worker="", phase=phase, cause=cause)) is ends


@pytest.mark.parametrize(
    ("client", "asked", "priority"),
    [
        (Client(name="", tenant="t"), 5, 5),  # nobody is asked for a key
        (Client(name="a", tenant="t", priority=3), 5, 5),  # further back is always allowed
        (Client(name="a", tenant="t", priority=3), -5, 3),
        (Client(name="a", tenant="t", priority=3), None, None),
    ],
)
def test_a_key_bounds_the_priority_that_engines_see(client: Client, asked: int | None, priority: int | None) -> None:
    request = in_class(parse() if asked is None else parse(priority=asked), client)
    assert request.priority == priority
    assert ("priority" in request.fields) is (priority is not None)
    if priority is not None:
        assert bytes(request.fields["priority"]) == str(priority).encode()


@pytest.mark.parametrize(
    ("has_sidecar", "by_p", "told"),
    [
        (False, 64, 64),
        (False, None, 0),  # vLLM leaves a zero out, and D counts all that it has pulled
        (True, 64, 64),
        (True, None, None),  # the sidecar has seen to it
    ],
)
def test_the_client_is_told_ps_count_of_cached_tokens(has_sidecar: bool, by_p: int | None, told: int | None) -> None:
    worker = replace(D1.worker, has_sidecar=has_sidecar)
    decode = WorkerView(worker=worker, name=D1.name, incarnation=D1.incarnation)
    attempt = running(decision(Leg.DECODE, decode=decode), Leg.PREFILL, Leg.DECODE)
    record, redaction = attempt.receipt.legs[1], Redaction("", ())
    assert attempt.edits(record, redaction).cached_tokens is None, "nothing has been handed over yet"
    attempt.handoff = Handoff({}, 90, by_p)
    assert attempt.edits(record, redaction).cached_tokens == told
