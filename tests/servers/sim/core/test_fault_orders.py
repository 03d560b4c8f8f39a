from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from ppd.servers.sim.core.fault_orders import FaultKind, FaultLeg, Faults, Order

HI = [{"role": "user", "content": "hi"}]


def kinds(faults: Faults, *legs: FaultLeg) -> list[str | None]:
    return [order.kind if (order := faults.take(leg)) else None for leg in legs]


def test_faults_are_used_up_in_order() -> None:
    assert kinds(Faults(refuse=2, garbage=1), *4 * [FaultLeg.PLAIN]) == ["error", "error", "body", None]
    faults = Faults([Order(FaultKind.HANG, times=2), Order(FaultKind.RESET)], refuse=1)
    assert kinds(faults, *5 * [FaultLeg.PLAIN]) == ["hang", "hang", "reset", "error", None]


def test_an_order_for_one_leg_leaves_the_others_alone() -> None:
    faults = Faults(
        [
            Order(FaultKind.HANG, leg=FaultLeg.DECODE),
            Order(FaultKind.RESET, leg=FaultLeg.PREFILL),
            Order(FaultKind.CLOSE),
        ]
    )
    assert kinds(faults, FaultLeg.PREFILL, FaultLeg.PREFILL, FaultLeg.PLAIN, FaultLeg.DECODE) == [
        "reset",
        "close",
        None,
        "hang",
    ]


@pytest.mark.parametrize(
    "kind", [FaultKind.LOAD, FaultKind.ABSENT, FaultKind.EXPIRE, FaultKind.KILL_AT_TRANSFER, FaultKind.LEAK]
)
def test_faults_between_engines_are_counted_by_themselves(kind: FaultKind) -> None:
    faults = Faults([Order(kind)])
    assert faults.take(FaultLeg.DECODE) is None
    assert [faults.take_of_transfer(kind), faults.take_of_transfer(kind)] == [True, False]


@pytest.mark.parametrize(("wedge", "is_wedged"), [([], False), (["p"], True), (["q"], False), (["*"], True)])
def test_a_wedge_names_engines(wedge: list[str], is_wedged: bool) -> None:
    assert Faults(wedge=wedge).wedges("p") is is_wedged


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_refused(lab: Any, status: int) -> None:
    r = await lab.start()
    r.faults = Faults(refuse=1, refuse_status=status)
    answers = [await lab.chat(r, HI) for _ in range(2)]
    assert [answer.status for answer in answers] == [status, 200]
    assert answers[0].json["error"]["code"] == status


async def test_garbage(lab: Any) -> None:
    r = await lab.start()
    r.faults = Faults(garbage=1)
    answer = await lab.chat(r, HI)
    assert answer.status == 200
    with pytest.raises(ValueError, match=r"utf|Expecting"):
        json.loads(answer.body)


@pytest.mark.parametrize("events", [0, 1, 3])
async def test_a_stream_is_cut_after_so_many_events(lab: Any, events: int) -> None:
    r = await lab.start()
    r.faults = Faults(cut=1, cut_after_events=events)
    body, seen = {"messages": HI, "stream": True}, b""
    with suppress(aiohttp.ClientError):
        async with lab.session.post(f"http://{r.address}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            async for line in answer.content:
                seen += line
    assert seen.count(b"data:") <= events
    assert b"[DONE]" not in seen
    assert r.pool.used == 0


async def test_a_whole_answer_is_cut(lab: Any) -> None:
    r = await lab.start()
    r.faults = Faults(cut=1)
    with pytest.raises(aiohttp.ClientError):
        await lab.chat(r, HI)


async def test_hang(lab: Any) -> None:
    r = await lab.start()
    r.faults = Faults(hang=1)
    hung = asyncio.create_task(lab.chat(r, HI))
    async with asyncio.timeout(60):
        while r.faults.hang:
            await asyncio.sleep(0)
    assert (await lab.chat(r, HI)).status == 200
    assert not hung.done()
    hung.cancel()
    with suppress(asyncio.CancelledError):
        await hung


async def test_faults_are_set_over_http(lab: Any) -> None:
    r = await lab.start()
    assert (await lab.post(r, "/faults", {"refuse": 1})).status == 200
    assert (await lab.chat(r, HI)).status == 503
    assert (await lab.post(r, "/faults", {"refuze": 1})).status == 400
