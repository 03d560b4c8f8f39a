"""SPLITs that D's sidecar runs: the proxy sends one leg, and knows of P what the sidecar tells."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from ppd.proxy.config import EncoderUse, Mode, StageOrder
from ppd.servers.sidecar.allow_list import AllowList
from ppd.servers.sidecar.failed_legs import FailurePolicy, OnFailure
from ppd.servers.sim.core.fault_orders import FaultKind, FaultLeg, Faults, Order
from tests.e2e.encoders.test_encoders import picture, talk
from tests.servers.sidecar.sidecars import SidecarFleet, StrictFleet
from tests.support.fleet import Fleet, start_engine
from tests.support.proxy import ProxyClient, Turn

LONG = "Some words, so that there are blocks to move. " * 8
SPLIT: dict[str, Any] = {"mode": Mode.ALWAYS_SPLIT, "order": StageOrder.DECODE_FIRST, "canary_interval_s": 0.0}


class Wary(SidecarFleet):
    """Its sidecars may ask no P of this machine."""

    sidecar_options: ClassVar[Mapping[str, Any]] = {"allow_list": AllowList("10.0.0.0/8")}


async def right_texts(*says: str) -> list[str]:
    """A conversation of a replica."""
    async with Fleet.of("R1", mode=Mode.REPLICA) as fleet:
        chat = fleet.conversation()
        return [(await chat.say(text)).text for text in says]


def told(receipt: Mapping[str, Any]) -> list[tuple[str, str, str, str | None]]:
    return [(leg["kind"], leg["worker"], leg["told_by"], leg["error"]) for leg in receipt["legs"]]


async def leg_failures(fleet: ProxyClient, leg: str, phase: str, cause: str) -> float:
    return await fleet.metric(f'ppd_leg_failures_total{{cause="{cause}",leg="{leg}",phase="{phase}"}}')


async def pair_is_open(fleet: Fleet, said: str) -> bool:
    """Whether a new session goes without P, after so many failures in a row."""
    return (await fleet.conversation().say(said)).reason == "no_prefill_worker"


@pytest.mark.parametrize("order", StageOrder)
async def test_the_sidecar_runs_both_legs_and_the_receipt_has_them(order: StageOrder) -> None:
    async with SidecarFleet.of("P1 D1 D2", **{**SPLIT, "order": order}) as fleet:
        chat = fleet.conversation()
        turns = [await chat.say(LONG), await chat.say("And then?")]
        receipts = [await fleet.receipt(turn) for turn in turns]
        d = turns[0].headers["X-PPD-Decode"]
        assert [turn.text for turn in turns] == await right_texts(LONG, "And then?")
        for turn, receipt in zip(turns, receipts, strict=True):
            assert (turn.route, receipt["order"]) == ("SPLIT", order)
            assert told(receipt) == [("prefill", "P1", d, None), ("decode", d, "", None)]
            p, whole = receipt["legs"]
            assert whole["started_s"] <= p["started_s"] <= p["ended_s"] <= whole["first_event_s"]
            assert "X-PPD-Legs" not in turn.headers
        assert len(fleet.engines["P1"].received) == 2
        ids = [{k.lower(): v for k, v in leg.headers.items()}["x-request-id"] for leg in fleet.engines["P1"].received]
        assert [one.startswith(whole["legs"][-1]["id"]) for one, whole in zip(ids, receipts, strict=True)] == [True] * 2
        (session,) = fleet.proxy.state.sessions.recent(1)
        assert (session.prefill, session.decode) == (fleet.engines["P1"].address, fleet.sidecars[d].address)
        cached = [receipt["cached_tokens"] for receipt in receipts]
        assert cached[0] == 0 and receipts[0]["prompt_tokens"] - 16 <= cached[1] <= receipts[0]["prompt_tokens"]
        assert cached == [turn.body["usage"]["prompt_tokens_details"]["cached_tokens"] for turn in turns]
        await fleet.until(fleet.idle)


@pytest.mark.parametrize(
    ("at", "fault", "reason", "leg", "failure"),
    [
        ("P1", Faults(refuse=100, refuse_status=500), "prefill_failed", "prefill", ("headers", "5xx")),
        (
            "P1",
            Faults(orders=[Order(FaultKind.RESET, times=9)]),
            "prefill_failed",
            "prefill",
            ("request_sent", "reset"),
        ),
        ("D1", Faults(orders=[Order(FaultKind.ERROR, times=9, leg=FaultLeg.DECODE)]), "handoff_failed", "decode", None),
    ],
)
async def test_what_a_sidecar_did_without_p_is_a_local_turn_and_counts_against_the_pair(
    at: str, fault: Faults, reason: str, leg: str, failure: tuple[str, str] | None
) -> None:
    async with SidecarFleet.of("P1 D1", breaker_open_s=60.0, **SPLIT) as fleet:
        fleet.engines[at].faults = fault
        turns = [await fleet.conversation().say(f"{number} {LONG}") for number in range(3)]
        assert {(turn.status, turn.route, turn.reason) for turn in turns} == {(200, "LOCAL", reason)}
        assert not any("X-PPD-Prefill" in turn.headers for turn in turns)
        receipt = await fleet.receipt(turns[0])
        assert [kind for kind, *_ in told(receipt)][-2:] == [leg, "local"]
        assert [(worker, by) for _, worker, by, error in told(receipt) if error] == [(at, "D1")]
        if failure is not None:
            assert await leg_failures(fleet, leg, *failure) == 3
        fleet.engines[at].faults = Faults()
        assert await pair_is_open(fleet, f"4 {LONG}")
        assert {"P1": "up", "D1": "up"}.items() <= fleet.states().items()
        (text,) = await right_texts(f"0 {LONG}")
        assert turns[0].text == text
        if at == "P1":  # a handoff that D could not use stays until its lease ends
            await fleet.until(fleet.idle)


async def test_a_turn_without_p_is_learnt_as_one_of_d_alone() -> None:
    async with SidecarFleet.of("P1 D1", **SPLIT) as fleet:
        fleet.engines["P1"].faults = Faults(refuse=1, refuse_status=500)
        chat = fleet.conversation()
        first = await fleet.receipt(await chat.say(LONG))
        assert (first["route"], first["cached_tokens"]) == ("LOCAL", 0)
        (session,) = fleet.proxy.state.sessions.recent(1)
        assert (session.prefill, session.decode) == (None, fleet.sidecars["D1"].address)
        second = await fleet.receipt(await chat.say("And then?"))
        assert (second["route"], second["estimated_cached_tokens"] > 0) == ("SPLIT", True)


async def test_an_overloaded_p_is_passed_over_and_nobody_has_failed() -> None:
    async with SidecarFleet.of("P1 D1", **SPLIT) as fleet:
        fleet.engines["P1"].faults = Faults(refuse=1, refuse_status=503)
        turns = [await fleet.conversation().say(f"{number} {LONG}") for number in range(2)]
        assert [turn.reason for turn in turns] == ["prefill_failed", "no_prefill_worker"]
        assert not fleet.proxy.state.health.breakers.states(fleet.proxy.state.now())


async def test_a_p_that_hands_nothing_over_has_not_failed() -> None:
    async with SidecarFleet.of("P1 D1", **SPLIT) as fleet:
        fleet.engines["P1"].faults = Faults(orders=[Order(FaultKind.HANDOFF)])
        receipt = await fleet.receipt(await fleet.conversation().say(LONG))
        assert (receipt["route"], receipt["handoff_missing"]) == ("SPLIT", "by_sidecar")
        assert (await fleet.conversation().say("Something else, then.")).route == "SPLIT"


async def test_a_sidecar_that_may_not_ask_this_p_is_no_clients_fault() -> None:
    async with Wary.of("P1 D1 D2", **SPLIT) as fleet:
        turn = await fleet.conversation().say(LONG)
        receipt = await fleet.receipt(turn)
        assert (turn.status, turn.reason) == (200, "no_prefill_worker")
        assert ("prefill", "P1", "prefill_not_allowed") in [(kind, who, why) for kind, who, _, why in told(receipt)]
        assert not fleet.engines["P1"].received
        await fleet.until(fleet.idle)


@pytest.mark.parametrize("status", [404, 429, 500, 503])
async def test_where_its_sidecar_leaves_it_to_the_proxy_another_p_is_asked(status: int) -> None:
    async with StrictFleet.of("P1 P2 D1", **SPLIT) as fleet:
        fleet.engines["P1"].faults = Faults(refuse=100, refuse_status=status)
        turns = list[Turn]()
        while len(turns) < 8 or not fleet.engines["P1"].received:  # which of equal P is asked, a hash says
            turns.append(await fleet.conversation().say(f"{len(turns)} {LONG}"))
            assert len(turns) < 64, "it was asked first at least once"
        refused = [await fleet.receipt(turn) for turn in turns if turn.status != 200]
        if status == 404:  # the request's own fault, as an engine sees it
            assert refused and all(told(receipt)[0][3] == "4xx" for receipt in refused)
        else:
            assert {(turn.status, turn.headers["X-PPD-Prefill"]) for turn in turns} == {(200, "P2")}
        if status in (429, 503):
            assert not fleet.proxy.state.health.breakers.states(fleet.proxy.state.now()), "busy is no failure"
        assert {"P1": "up", "P2": "up", "D1": "up"}.items() <= fleet.states().items()
        await fleet.until(fleet.idle)


async def test_a_p_that_dies_in_its_leg_leaves_nothing_behind() -> None:
    async with SidecarFleet.of("P1 D1", engine={"time_scale": 10.0}, **SPLIT) as fleet:
        asking = asyncio.create_task(fleet.conversation().say(LONG))
        await fleet.until(lambda: bool(list(fleet.engines["P1"].scheduler.sequences)))
        booked = {view.name: view.inflight for view in fleet.proxy.state.registry.views()}
        assert booked == {"P1": 1, "D1": 1}
        await fleet.kill("P1")
        turn = await asking
        assert (turn.status, turn.route, turn.reason) == (200, "LOCAL", "prefill_failed")
        assert [turn.text] == await right_texts(LONG)
        del fleet.engines["P1"]
        await fleet.until(fleet.idle)


async def test_a_d_that_drains_gets_no_more_turns_and_one_whose_sidecar_dies_is_replaced() -> None:
    async with SidecarFleet.of("P1 D1 D2", **SPLIT) as fleet:
        chat = fleet.conversation()
        names = {(await chat.say(LONG)).headers["X-PPD-Decode"]}
        (first,) = names
        (other,) = {"D1", "D2"} - names
        status, _ = await fleet.admin("PATCH", f"/workers/{fleet.sidecars[first].address}", {"draining": True})
        second = await chat.say("And then?")
        assert (status, second.route, second.headers["X-PPD-Decode"]) == (200, "SPLIT", other)
        await fleet.admin("PATCH", f"/workers/{fleet.sidecars[first].address}", {"draining": False})
        await fleet.kill(f"{other}'s sidecar")
        third = await chat.say("And in the end?")
        assert (third.status, third.headers["X-PPD-Decode"]) == (200, first)
        assert [turn.text for turn in (second, third)] == (await right_texts(LONG, "And then?", "And in the end?"))[1:]


async def test_a_sidecar_that_tells_nothing_is_taken_to_have_asked_p() -> None:
    """Another project's: here an engine, which computes the prompt itself."""
    async with Fleet.of("P1", **SPLIT) as fleet:
        await fleet.add("D1", options=",sidecar=true")
        chat = fleet.conversation()
        turn = await chat.say(LONG)
        receipt = await fleet.receipt(turn)
        assert (turn.route, told(receipt)) == ("SPLIT", [("decode", "D1", "", None)])
        assert (receipt["cached_tokens"], receipt["counts_evidence"]) == (None, "usage")
        (asked,) = fleet.engines["D1"].received
        assert {k.lower(): v for k, v in asked.headers.items()}["x-prefiller-host-port"] == fleet.engines["P1"].address
        status, listed = await fleet.admin("GET", "/workers")
        assert (status, [worker["sidecar"] for worker in listed["workers"]]) == (200, [False, True])


async def test_a_client_cannot_name_a_p() -> None:
    async with SidecarFleet.of("P1 D1", mode=Mode.ALWAYS_LOCAL) as fleet:
        chat = fleet.conversation(X_Prefiller_Host_Port="10.9.9.9:1")
        turns: list[Turn] = [await chat.say(LONG), await chat.say("And then?")]
        assert [(turn.status, turn.route) for turn in turns] == [(200, "SPLIT"), (200, "LOCAL")]


async def test_encoders_are_not_asked_for_what_no_sidecar_lets_through() -> None:
    urls = [picture(1), picture(2)]
    async with Fleet.of("R1", mode=Mode.REPLICA) as fleet:
        texts = await talk(fleet, *urls)
    async with SidecarFleet.of("E1 P1 D1", encoder=EncoderUse.ALWAYS, **SPLIT) as fleet:
        assert await talk(fleet, *urls) == texts
        assert not fleet.engines["E1"].received


async def test_a_sidecar_may_ask_p_again_and_all_its_legs_are_told() -> None:
    class Patient(SidecarFleet):
        sidecar_options: ClassVar[Mapping[str, Any]] = {"policy": FailurePolicy(OnFailure.RETRY, 1)}

    async with Patient.of("P1 D1", **SPLIT) as fleet:
        fleet.engines["P1"].faults = Faults(refuse=1, refuse_status=503)
        turn = await fleet.conversation().say(LONG)
        receipt = await fleet.receipt(turn)
        assert (turn.status, turn.route, receipt["prefill"]) == (200, "SPLIT", "P1")
        assert [error for *_, error in told(receipt)] == ["overloaded", None, None]


async def test_a_sidecar_whose_engine_is_the_p_that_is_named_answers_alone() -> None:
    async with SidecarFleet.of("P1", **SPLIT) as fleet:
        await fleet.join("D1", fleet.engines["P1"], fleet.engines["P1"].address)
        turn = await fleet.conversation().say(LONG)
        receipt = await fleet.receipt(turn)
        assert (turn.status, turn.route, turn.reason) == (200, "LOCAL", "prefill_not_asked")
        assert told(receipt) == [("local", "D1", "", None)]
        assert not fleet.proxy.state.health.breakers.states(fleet.proxy.state.now())


async def test_a_first_token_that_ends_the_answer_is_ps_and_d_is_not_asked() -> None:
    class TensorRT(SidecarFleet):
        sidecar_options: ClassVar[Mapping[str, Any]] = {"connector": "trtllm"}

    told_of = ",connector=trtllm,engine=trtllm"
    async with TensorRT.of("", **SPLIT) as fleet:
        for name in ("P1", "D1"):
            await fleet.add(name, options=told_of, connector="trtllm")
        reference, chat = await start_engine(fleet.stack, "R1"), fleet.conversation()
        body = {"model": "sim", "messages": [{"role": "user", "content": LONG}], "return_token_ids": True}
        async with fleet.session.post(f"http://{reference.address}/v1/chat/completions", json=body) as answer:
            (choice,) = (await answer.json())["choices"]
        turn = await chat.say(LONG, stop_token_ids=choice["token_ids"][:1])
        receipt = await fleet.receipt(turn)
        assert (turn.status, turn.route, told(receipt)[0]) == (200, "SPLIT", ("prefill", "P1", "D1", None))
        assert (len(fleet.engines["P1"].received), len(fleet.engines["D1"].received)) == (1, 0)
        (session,) = fleet.proxy.state.sessions.recent(1)
        assert (session.prefill, session.decode) == (fleet.engines["P1"].address, None)
        second = await chat.say("And then?")
        assert (second.status, second.route, len(fleet.engines["D1"].received)) == (200, "SPLIT", 1)
