"""The tries of one turn: what may be tried again, without whom, and when it ends."""

from __future__ import annotations

import pytest

from ppd.proxy.admission.keys import Client
from ppd.proxy.errors import LegError
from ppd.proxy.failures import ROWS, Cause, ClientGets, Failure, HealthEffect, Leg, Phase
from ppd.proxy.fleet.worker import Role
from ppd.proxy.health.worker_health import OVERLOAD_S
from ppd.proxy.routing.attempt import FailedAttempts, in_class
from tests.support.attempts import decision, running, view
from tests.support.requests import parse

NOW_S = 100.0
P1, P2, D1, D2 = view(Role.PREFILL, 1), view(Role.PREFILL, 2), view(Role.DECODE, 1), view(Role.DECODE, 2)
VIEWS = (P1, P2, D1, D2)
NO_ERRORS = (Cause.CLIENT_GONE, Cause.DRAINING, Cause.NO_HANDOFF)
ERRORS = [each for each in ROWS if each[1] is not Phase.QUEUE and each[2] not in NO_ERRORS]
D_REFUSED = (Leg.DECODE, Phase.CONNECT, Cause.REFUSED)
D_RESET = (Leg.DECODE, Phase.SENT, Cause.RESET)
P_RESET = (Leg.PREFILL, Phase.SENT, Cause.RESET)
D_BUSY = (Leg.DECODE, Phase.HEADERS, Cause.OVERLOADED)
PAIR_TIMEOUT = (Leg.DECODE, Phase.HEADERS, Cause.TIMEOUT)


def fail(failed: FailedAttempts, failure: Failure, *, stream: bool = True, retry_after_s: float = 0.0) -> bool:
    leg, phase, cause = failure
    begun = (Leg.PREFILL, Leg.DECODE) if leg is Leg.DECODE else (leg,)
    attempt = running(decision(leg), *begun, stream=stream)
    exc = LegError("", worker="", phase=phase, cause=cause, retry_after_s=retry_after_s)
    may = failed.may_try_again(attempt, exc, ROWS[failure], NOW_S)
    assert failed.last is exc
    return may


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("failure", ERRORS, ids="-".join)
def test_a_turn_is_tried_again_where_its_row_says_so(failure: Failure, stream: bool) -> None:
    gets = ROWS[failure].client_gets(stream=stream)
    again = gets in (ClientGets.ANOTHER, ClientGets.ANOTHER_OR_QUEUE, ClientGets.AFRESH)
    assert fail(FailedAttempts(3), failure, stream=stream) is again


@pytest.mark.parametrize("failure", [each for each in ERRORS if ROWS[each].client is ClientGets.ANOTHER], ids="-".join)
def test_the_next_try_does_without_whom_the_failure_was(failure: Failure) -> None:
    failed = FailedAttempts(3)
    fail(failed, failure)
    made = decision(failure[0])
    assert made.prefill is None or made.prefill.id == P1.id
    own = P1.id if failure[0] is Leg.PREFILL else made.decode.id
    expected = (P1.id, D1.id) if ROWS[failure].health is HealthEffect.PAIR else own
    assert failed.avoid(VIEWS) == (expected,)


def test_answers_have_a_limit() -> None:
    failed = FailedAttempts(3)
    assert [fail(failed, D_RESET) for _ in range(3)] == [True, True, False]


def test_with_hand_overs_used_up_the_turn_does_without_them() -> None:
    failed = FailedAttempts(2)
    assert fail(failed, P_RESET)
    assert P2.id not in failed.avoid(VIEWS)
    assert fail(failed, PAIR_TIMEOUT)
    assert {P1.id, P2.id} < set(failed.avoid(VIEWS))
    assert D2.id not in failed.avoid(VIEWS)


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
        left_out.append(set(failed.avoid(VIEWS)))
    assert left_out == [{P2.id}, {P1.id}, {P1.id, P2.id}], "in the end D computes alone"


def test_a_p_that_has_the_prompt_and_fails_is_not_the_only_one_any_longer() -> None:
    failed = FailedAttempts(3)
    fail(failed, TOO_OLD)
    fail(failed, P_RESET)
    assert failed.avoid(VIEWS) == (P1.id,)


@pytest.mark.parametrize(("failure", "may"), [(TOO_OLD, True), (D_REFUSED, False), (P_RESET, False)])
def test_without_budget_a_d_that_was_not_asked_computes_alone(failure: Failure, may: bool) -> None:
    failed = FailedAttempts(3)
    fail(failed, failure)
    assert failed.may_do_without(ROWS[failure]) is may
    assert ({P1.id, P2.id} <= set(failed.avoid(VIEWS))) is may


@pytest.mark.parametrize(("asked_s", "until_s"), [((7.0,), 7.0), ((7.0, 3.0), 3.0), ((0.0,), OVERLOAD_S)])
def test_busy_workers_are_waited_for_until_the_first_may_be_asked(asked_s: tuple[float, ...], until_s: float) -> None:
    failed = FailedAttempts(2)
    assert all(fail(failed, D_BUSY, retry_after_s=seconds) for seconds in asked_s)
    assert failed.overloaded_until_s == NOW_S + until_s


@pytest.mark.parametrize("failure", [D_BUSY, D_REFUSED])
def test_busy_and_unreached_workers_use_up_no_try_and_may_be_asked_again_after_a_wait(failure: Failure) -> None:
    failed = FailedAttempts(2)
    assert fail(failed, D_RESET)
    failed.keys = {"other:1": failed.keys.popitem()[1]}  # type: ignore[dict-item]
    assert all(fail(failed, failure) for _ in range(10))
    assert len(failed.avoid(VIEWS)) == 2
    failed.forgive()
    assert failed.avoid(VIEWS) == ("other:1",)


def test_a_busy_p_is_no_reason_to_wait() -> None:
    failed = FailedAttempts(3)
    assert fail(failed, (Leg.PREFILL, Phase.HEADERS, Cause.OVERLOADED), retry_after_s=60.0)
    assert failed.overloaded_until_s is None


def test_after_a_wait_busy_workers_are_asked_again_and_broken_ones_are_not() -> None:
    failed = FailedAttempts(3)
    fail(failed, P_RESET)
    fail(failed, D_BUSY)
    assert set(failed.avoid(VIEWS)) == {P1.id, D1.id}
    failed.forgive()
    assert failed.avoid(VIEWS) == (P1.id,)
    assert failed.overloaded_until_s is None


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
