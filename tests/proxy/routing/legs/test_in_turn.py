"""A SPLIT whose legs run one after the other: which legs are asked, and where that leaves them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from ppd.proxy.assembly import assemble
from ppd.proxy.beliefs.turn_touches import NoTouches
from ppd.proxy.config import ProxyConfig
from ppd.proxy.failures import Cause, Leg, Phase
from ppd.proxy.leg_moves import LegsState
from ppd.proxy.settings import Settings
from tests.proxy.routing.legs.one_pair import GOOD_D, GOOD_P, SOON_S, STREAM, WHOLE, Lab, http

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "10.0.0.9",
    "remote_port": 5600,
    "tp_size": 1,
}
HANDING_OVER = http(msgspec.json.encode({**WHOLE, "kv_transfer_params": PARAMS}))
STOPPED = http(msgspec.json.encode({**WHOLE, "choices": [{**WHOLE["choices"][0], "finish_reason": "stop"}]}))  # type: ignore[index]
TRTLLM = pytest.mark.parametrize("lab", ["trtllm"], indirect=True)


@pytest.fixture
async def lab(request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    async with AsyncExitStack() as stack:
        made = Lab(assemble(Settings(ProxyConfig(heartbeat_port=0))), getattr(request, "param", "nixl"))
        await made.start(stack)
        yield made
        made.attempt.close()
        await made.proxy.handoff_release.close()
        await made.proxy.upstream.close()
        made.proxy.listener.close()


def state(lab: Lab) -> LegsState:
    assert lab.attempt.legs is not None
    return lab.attempt.legs.state


def outstanding(lab: Lab) -> int:
    return lab.proxy.state.handoffs.outstanding(lab.proxy.state.now())


def fates(lab: Lab) -> dict[str, float]:
    samples = (sample for metric in lab.proxy.state.metrics.abandoned.collect() for sample in metric.samples)
    return {sample.labels["fate"]: sample.value for sample in samples if sample.name.endswith("_total")}


async def until_d_is_asked(lab: Lab) -> dict[str, Any]:
    async with asyncio.timeout(SOON_S):
        await lab.d.asked.wait()
    return lab.d.body


async def wound_up(lab: Lab) -> None:
    await asyncio.wait({lab.turn})
    assert lab.turn.cancelled()
    async with asyncio.timeout(SOON_S):
        while not fates(lab):
            await asyncio.sleep(0.001)
    assert [(view.inflight, view.queued_prefill_tokens) for view in lab.proxy.state.registry.views()] == [(0, 0)] * 2


async def test_d_is_asked_with_what_p_announced_and_once_it_begins_has_the_kv(lab: Lab) -> None:
    assert not lab.d.asked.is_set()
    lab.p.say(HANDING_OVER)
    assert (await until_d_is_asked(lab))["kv_transfer_params"] == PARAMS
    assert (state(lab), outstanding(lab)) == (LegsState.PULL, 1)
    lab.d.say(GOOD_D)
    await lab.answer()
    assert (state(lab), outstanding(lab)) == (LegsState.ANSWERED, 0)
    assert len({leg.id for leg in lab.attempt.receipt.legs}) == 2
    decision = lab.attempt.decision
    assert decision.prefill is not None
    held = {view.id: (view.inflight, view.queued_prefill_tokens) for view in lab.proxy.state.registry.views()}
    assert held == {decision.prefill.id: (0, 0), decision.decode.id: (1, 0)}, "P has done its part, and D its prompt"
    assert lab.proxy.state.health.moved_s((decision.prefill.id, decision.decode.id)) > 0


async def test_d_computes_alone_what_p_does_not_hand_over(lab: Lab) -> None:
    lab.p.say(GOOD_P)
    assert "kv_transfer_params" not in await until_d_is_asked(lab)
    assert state(lab) is LegsState.ALONE
    lab.d.say(GOOD_D)
    await lab.answer()
    assert [leg.kind for leg in lab.attempt.receipt.legs] == [Leg.PREFILL, Leg.DECODE]
    assert (state(lab), lab.attempt.handoff) == (LegsState.ANSWERED, None)


@TRTLLM
async def test_an_answer_that_ps_first_token_ended_is_the_clients(lab: Lab) -> None:
    lab.p.say(STOPPED)
    opened = await lab.answer()
    assert opened.relay is None and lab.attempt.is_finished_on_prefill
    assert (state(lab), lab.d.asked.is_set()) == (LegsState.ANSWERED, False)


async def test_a_p_that_fails_ends_the_attempt_before_d_is_asked(lab: Lab) -> None:
    lab.p.end()
    error = await lab.fails()
    assert (error.worker, error.cause) == (lab.p.address, Cause.RESET)
    assert (state(lab), lab.d.asked.is_set()) == (LegsState.OVER, False)


async def test_a_d_that_fails_with_the_handoff_has_used_it(lab: Lab) -> None:
    lab.p.say(HANDING_OVER)
    await until_d_is_asked(lab)
    lab.d.end()
    assert (await lab.fails()).worker == lab.d.address
    assert (state(lab), outstanding(lab)) == (LegsState.OVER, 1)


async def test_a_d_that_is_not_reached_leaves_the_handoff_to_another(lab: Lab) -> None:
    lab.d.refuse()
    lab.p.say(HANDING_OVER)
    error = await lab.fails()
    assert (error.worker, error.phase, error.cause) == (lab.d.address, Phase.CONNECT, Cause.REFUSED)
    assert state(lab) is LegsState.UNTAKEN


async def test_a_p_that_answers_after_the_client_left_is_relieved_by_d(lab: Lab) -> None:
    lab.turn.cancel()
    await asyncio.sleep(0)
    lab.p.say(HANDING_OVER)
    assert (await until_d_is_asked(lab))["max_tokens"] == 1
    lab.d.say(GOOD_P)
    await wound_up(lab)
    assert (state(lab), fates(lab), outstanding(lab)) == (LegsState.UNTAKEN, {"taken": 1}, 0)


async def test_a_client_that_leaves_between_both_legs_has_d_asked_for_one_token_alone(lab: Lab) -> None:
    head, rest = HANDING_OVER[:-10], HANDING_OVER[-10:]
    lab.p.say(head)
    async with asyncio.timeout(SOON_S):
        while lab.attempt.receipt.legs[0].status is None:
            await asyncio.sleep(0)
    lab.turn.cancel()
    lab.p.say(rest)
    body = await until_d_is_asked(lab)
    assert (body["max_tokens"], body["kv_transfer_params"]) == (1, PARAMS)
    lab.d.say(GOOD_P)
    await wound_up(lab)
    assert [leg.kind for leg in lab.attempt.receipt.legs] == [Leg.PREFILL], "no leg of the turn"
    assert (fates(lab), outstanding(lab)) == ({"taken": 1}, 0)


async def test_a_client_that_leaves_while_d_computes_alone_ends_that_at_once(lab: Lab) -> None:
    lab.p.say(GOOD_P)
    await until_d_is_asked(lab)
    lab.turn.cancel()
    await wound_up(lab)
    assert (state(lab), fates(lab)) == (LegsState.OVER, {"aborted": 1})
    await lab.until_hung_up(lab.d)


@pytest.mark.parametrize("d_says", [STREAM, b""], ids=["a head", "nothing"])
async def test_a_d_that_was_asked_as_the_client_left_is_ended_and_has_the_kv(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, d_says: bytes
) -> None:
    monkeypatch.setattr("ppd.proxy.routing.legs.handoff_release.READ_ON_S", 0.1)
    lab.p.say(HANDING_OVER)
    await until_d_is_asked(lab)
    if d_says:
        lab.d.say(d_says)
    lab.turn.cancel()
    await wound_up(lab)
    assert (state(lab), fates(lab), outstanding(lab)) == (LegsState.TAKEN, {"taken": 1}, 0)
    await lab.until_hung_up(lab.d)


class Noted(NoTouches):
    """What workers' caches are told."""

    is_answering: bool = False
    is_over: bool = False

    def answering(self) -> None:
        self.is_answering = True

    def close(self) -> None:
        self.is_over = True


async def test_a_d_that_begins_as_its_client_leaves_holds_the_prompt(lab: Lab) -> None:
    lab.attempt.touches = noted = Noted()
    lab.p.say(HANDING_OVER)
    await until_d_is_asked(lab)
    lab.turn.cancel()
    lab.d.say(GOOD_D)
    await wound_up(lab)
    assert (noted.is_answering, noted.is_over) == (True, True)
    assert (state(lab), outstanding(lab)) == (LegsState.TAKEN, 0)
    await lab.until_hung_up(lab.d)
