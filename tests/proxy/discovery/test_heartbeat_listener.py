"""Whose a worker is on the encrypted port, on a clock that stands still."""

from __future__ import annotations

import pytest

from ppd.proxy.discovery.heartbeat_listener import Owners
from ppd.proxy.fleet.worker import WorkerId
from tests.support.clock import FakeClock

W, OTHER = WorkerId("10.0.0.1:80"), WorkerId("10.0.0.2:80")


@pytest.fixture
def owners(clock: FakeClock) -> Owners:
    return Owners(30.0, clock)


def test_a_worker_is_its_first_keys(owners: Owners) -> None:
    assert owners.may_speak(W, "a")
    assert not owners.may_speak(W, "b")
    assert owners.may_speak(W, "a")
    assert owners.may_speak(OTHER, "b")


@pytest.mark.parametrize(("silent_s", "may"), [(30.0, False), (30.1, True)])
def test_a_silent_owner_has_lost_its_worker(owners: Owners, clock: FakeClock, silent_s: float, may: bool) -> None:
    owners.may_speak(W, "a")
    clock.advance(silent_s)
    assert owners.may_speak(W, "b") is may


def test_who_is_refused_keeps_nobody_waiting_longer(owners: Owners, clock: FakeClock) -> None:
    owners.may_speak(W, "a")
    owners.may_speak(OTHER, "c")
    for _ in range(4):
        clock.advance(10)
        owners.may_speak(OTHER, "c")
        may = owners.may_speak(W, "b")
    assert may


def test_a_worker_that_is_given_up_is_anyones(owners: Owners) -> None:
    owners.may_speak(W, "a")
    owners.release(W)
    assert owners.may_speak(W, "b")
