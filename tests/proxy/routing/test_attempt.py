"""What an attempt holds and gives back once, and what it says of its legs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from ppd.proxy.connectors.leg import Handoff
from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Leg, Phase
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Role
from ppd.proxy.openai.body_members import encoded
from ppd.proxy.routing.attempt import Attempt
from ppd.proxy.telemetry.receipts import LegRecord
from ppd.proxy.upstream.call import Call
from tests.support.attempts import decision, running, view

P, D = view(Role.PREFILL), view(Role.DECODE)
P_LEG: dict[str, Any] = {"kind": Leg.PREFILL, "worker": "P1", "address": P.id, "started_s": 0.0}
D_LEG: dict[str, Any] = {"kind": Leg.DECODE, "worker": "D1", "address": D.id, "started_s": 0.0}
HANDOFF = Handoff({"remote_host": encoded("10.0.0.9")}, 10, None)


def split(handoff: Handoff | None = None) -> Attempt:
    made = running(decision(Leg.DECODE, P, D), Leg.PREFILL, Leg.DECODE)
    made.handoff = handoff
    return made


class Held:
    """Something that is to be given back."""

    def __init__(self, name: str, said: list[str], then: Callable[[], None] = lambda: None) -> None:
        self._name, self._said, self._then = name, said, then

    def close(self) -> None:
        self._said.append(self._name)
        self._then()

    release = close


def test_all_that_is_held_is_given_back_once_the_place_in_the_fleet_last() -> None:
    made, said = split(), list[str]()
    made.both = cast(Any, Held("legs", said, made.close))  # one that ends may close the attempt itself
    made.answer = cast(Any, Held("answer", said))
    made.on_close = lambda _: said.append("workers")
    made.permit = cast(Any, Held("place", said))
    made.close()
    made.close()
    assert said[:4] == ["legs", "answer", "workers", "place"]
    assert set(said[4:]) == {"place"}, "whose second release does nothing"


@pytest.mark.parametrize(
    ("made", "text", "is_told"),
    [
        (split(HANDOFF), b"cannot read from p1:1", False),
        (split(HANDOFF), b"cannot read from 10.0.0.9", False),
        (split(), b"d1:1 is full", False),
        (split(HANDOFF), b"too long", True),
        (split(), b"cannot read from p1:1", True),  # D does not know it
    ],
)
def test_no_client_learns_where_workers_are(made: Attempt, text: bytes, is_told: bool) -> None:
    assert made.redaction(D).applies_to(text) == (not is_told)


@pytest.mark.parametrize(("worker", "leg"), [(P.id, 0), (D.id, 2), ("w:1", 2)])
def test_the_last_leg_on_a_worker_is_the_one_that_failed(worker: str, leg: int) -> None:
    made = running(decision(Leg.DECODE, P, D), Leg.PREFILL, Leg.DECODE, Leg.DECODE)
    for record, address in zip(made.receipt.legs, (P.id, D.id, D.id), strict=True):
        record.address = address
    failure = LegError("", worker=worker, phase=Phase.SENT, cause=Cause.RESET)
    assert made.failed(failure) is made.receipt.legs[leg]


@pytest.mark.parametrize(
    ("of_p", "of_d", "beside_p", "beside_d"),
    [
        (LegRecord(**P_LEG), LegRecord(**D_LEG), D, P),
        (LegRecord(**P_LEG), LegRecord(**D_LEG, phase=Phase.SENT), D, P),  # it has failed in the same round
        (LegRecord(**P_LEG), LegRecord(**D_LEG, phase=Phase.CONNECT), None, P),
        (LegRecord(**P_LEG), LegRecord(**D_LEG, status=200), None, P),
        (LegRecord(**P_LEG), None, None, None),
        (LegRecord(**P_LEG, status=200), LegRecord(**D_LEG), D, None),  # as P of a P, then D has before D is asked
        (LegRecord(**P_LEG, phase=Phase.CONNECT), LegRecord(**D_LEG), D, None),
        (LegRecord(**P_LEG | {"address": "p2:1"}), LegRecord(**D_LEG), D, None),  # of an attempt before
    ],
)
def test_the_worker_beside_one_that_failed_is_one_that_had_the_prompt_too(
    of_p: LegRecord, of_d: LegRecord | None, beside_p: WorkerView | None, beside_d: WorkerView | None
) -> None:
    made = split()
    made.receipt.legs = [of_p] if of_d is None else [of_p, of_d]
    made.leg = of_d
    assert made.unanswered_beside(of_p) is beside_p
    assert of_d is None or made.unanswered_beside(of_d) is beside_d


def test_of_one_leg_none_is_beside() -> None:
    made = running(decision(Leg.LOCAL, decode=D), Leg.LOCAL)
    made.leg = made.receipt.legs[0]
    assert made.unanswered_beside(made.leg) is None


def test_of_two_legs_each_has_an_id_of_its_own() -> None:
    made = split()
    assert made.leg_id("p") != made.leg_id("d") != split().leg_id("d")
    assert made.leg_id("p") == made.leg_id("p")


@pytest.mark.parametrize(("phase", "is_asked"), [(None, False), (Phase.CONNECT, False), (Phase.SENT, True)])
def test_d_is_asked_once_its_request_was_sent(phase: Phase | None, is_asked: bool) -> None:
    made = split()
    if phase is not None:
        made.call = Call(D.worker)
        made.call.phase = phase
    assert made.has_asked_decode == is_asked


@pytest.mark.parametrize(("status", "has_begun"), [(None, False), (200, True), (503, False)])
def test_a_p_that_has_begun_to_answer_pins_its_kv(status: int | None, has_begun: bool) -> None:
    made = running(decision(Leg.DECODE, P, D), Leg.PREFILL)
    made.receipt.legs[-1].status = status
    assert made.has_prefill_begun_to_answer == has_begun


def test_p_computes_where_there_is_one() -> None:
    assert split().computes is P
    assert running(decision(Leg.LOCAL, decode=D), Leg.LOCAL).computes is D
