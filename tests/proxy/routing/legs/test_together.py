"""A SPLIT whose legs run at once: in every order of events both legs end, and what they held is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest

from ppd.proxy.assembly import assemble
from ppd.proxy.config import ProxyConfig
from ppd.proxy.failures import Cause, Leg, Phase
from ppd.proxy.settings import Settings
from tests.proxy.routing.legs.one_pair import D_USAGE, GOOD_D, GOOD_P, SOON_S, STREAM, TEXT, WHOLE, Lab, event, http


@pytest.fixture
async def lab(request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    async with AsyncExitStack() as stack:
        made = Lab(assemble(Settings(ProxyConfig(heartbeat_port=0))), getattr(request, "param", "sglang"))
        await made.start(stack)
        yield made
        made.attempt.close()
        await made.proxy.upstream.close()
        await made.until_hung_up(made.p, made.d)
        made.proxy.listener.close()


async def test_both_legs_are_asked_before_either_has_answered_and_share_a_room(lab: Lab) -> None:
    assert lab.p.body["bootstrap_room"] == lab.d.body["bootstrap_room"]
    lab.p.say(GOOD_P)
    lab.d.say(GOOD_D)
    first = (await lab.answer()).first
    assert isinstance(first, bytes) and b"hi" in first
    assert [leg.kind for leg in lab.attempt.receipt.legs] == [Leg.PREFILL, Leg.DECODE]
    lab.attempt.close()
    assert lab.is_all_given_back()


@pytest.mark.parametrize(
    ("says", "cause", "phase"),
    [
        (http(b"{}", 500), Cause.SERVER, Phase.HEADERS),
        (http(b"{}", 503), Cause.OVERLOADED, Phase.HEADERS),
        (http(b'{"error": {"message": "too long"}}', 400), Cause.REQUEST, Phase.HEADERS),
        (http(b'{"error": {"message": "no such key"}}', 401), Cause.REQUEST, Phase.HEADERS),  # the client's
        (http(b"{}", 408), Cause.SERVER, Phase.HEADERS),  # it is the worker that was slow
        (http(b"{}", 302), Cause.SERVER, Phase.HEADERS),
        (http(b"{}"), Cause.MALFORMED, Phase.FIRST_EVENT),
        (None, Cause.RESET, Phase.SENT),
    ],
)
@pytest.mark.parametrize("who", ["p", "d"])
async def test_the_leg_that_fails_first_ends_the_other(
    lab: Lab, who: str, says: bytes | None, cause: Cause, phase: Phase
) -> None:
    failing, other = (lab.p, lab.d) if who == "p" else (lab.d, lab.p)
    if says is None:
        failing.end()
    else:
        failing.say(says)
    error = await lab.fails()
    assert (error.worker, error.cause, error.phase) == (failing.address, cause, phase)
    assert lab.attempt.failed(error).kind is (Leg.PREFILL if who == "p" else Leg.DECODE)
    assert [leg.error for leg in lab.attempt.receipt.legs if leg.address == other.address] == [None]
    assert lab.attempt.failed(error).error == cause
    assert lab.is_all_given_back()
    await lab.until_hung_up(other)


async def test_how_long_a_busy_d_is_to_be_left_alone_is_known(lab: Lab) -> None:
    lab.d.say(b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n")
    assert (await lab.fails()).retry_after_s == 7.0


async def test_a_stream_that_begins_with_an_error_is_no_answer(lab: Lab) -> None:
    lab.d.say(STREAM + event({"error": {"message": "no room", "code": 503}}))
    error = await lab.fails()
    assert (error.worker, error.cause, error.phase) == (lab.d.address, Cause.OVERLOADED, Phase.FIRST_EVENT)


async def test_a_d_that_fails_after_p_has_answered_is_ds_failure(lab: Lab) -> None:
    lab.p.say(GOOD_P)
    await asyncio.sleep(0.01)
    lab.d.end()
    error = await lab.fails()
    assert (error.worker, error.cause) == (lab.d.address, Cause.RESET)
    assert lab.is_all_given_back()


async def test_an_error_of_d_that_names_p_is_told_without_its_text(lab: Lab) -> None:
    text = f'{{"error": {{"message": "no bootstrap at {lab.p.address}"}}}}'
    lab.d.say(http(text.encode(), 400))
    assert lab.p.address.encode() not in ((await lab.fails()).body or b"")


async def test_a_client_that_leaves_ends_both_legs(lab: Lab) -> None:
    lab.turn.cancel()
    await asyncio.wait({lab.turn})
    assert lab.turn.cancelled()
    assert lab.is_all_given_back()
    await lab.until_hung_up(lab.p, lab.d)


async def test_an_answer_that_ends_before_p_has_done_ends_ps_leg(lab: Lab) -> None:
    lab.d.say(GOOD_D)
    await lab.answer()
    lab.attempt.close()
    await lab.until_hung_up(lab.p, lab.d)
    assert lab.is_all_given_back()


@pytest.mark.parametrize("is_late", [False, True])
async def test_the_client_is_told_how_many_tokens_p_found_cached(lab: Lab, is_late: bool) -> None:
    if not is_late:
        lab.p.say(GOOD_P)
        await asyncio.sleep(0.01)
    lab.d.say(GOOD_D)
    opened = await lab.answer()
    if is_late:
        lab.p.say(GOOD_P)
        await asyncio.sleep(0.01)
    assert opened.relay is not None and lab.attempt.handoff is not None
    assert b'"cached_tokens":64' in opened.relay.feed(event(D_USAGE))
    assert lab.attempt.handoff.cached_tokens == 64


async def test_a_p_that_fails_after_d_began_is_noted_and_the_answer_goes_on(lab: Lab) -> None:
    lab.d.say(GOOD_D)
    opened = await lab.answer()
    lab.p.end()
    await lab.until_hung_up(lab.p)
    await asyncio.sleep(0.01)
    failures = lab.proxy.state.metrics.failures.labels(Leg.PREFILL, Phase.SENT, Cause.RESET)
    assert failures._value.get() == 1
    assert [leg.error for leg in lab.attempt.receipt.legs] == [Cause.RESET, None]
    lab.d.say(event({**TEXT, "choices": [{"index": 0, "delta": {"content": "more"}}]}))
    assert lab.attempt.answer is not None and opened.relay is not None
    assert b"more" in opened.relay.feed(await lab.attempt.answer.chunk())
    assert not lab.d.hung_up.is_set()


# -- a P that hands nothing over, as its first token ended its answer

STOPPED_P = http(msgspec.json.encode({**WHOLE, "choices": [{**WHOLE["choices"][0], "finish_reason": "stop"}]}))  # type: ignore[index]
KEEPING_BACK = pytest.mark.parametrize("lab", ["mooncake", "moriio"], indirect=True)


@KEEPING_BACK
@pytest.mark.parametrize("has_head", [False, True])
async def test_a_d_that_would_wait_for_nothing_is_asked_again_without_p(lab: Lab, has_head: bool) -> None:
    if has_head:
        lab.d.say(STREAM)
        await asyncio.sleep(0.01)
    lab.d.asked.clear()
    lab.p.say(STOPPED_P)
    await lab.until_hung_up(lab.d)
    async with asyncio.timeout(SOON_S):
        await lab.d.asked.wait()
    assert "kv_transfer_params" not in lab.d.body
    lab.d.say(GOOD_D)
    first = (await lab.answer()).first
    assert isinstance(first, bytes) and b"hi" in first
    legs = lab.attempt.receipt.legs
    assert [(leg.kind, leg.error) for leg in legs] == [(Leg.PREFILL, None), (Leg.DECODE, None), (Leg.DECODE, None)]
    assert legs[1].ended_s is not None and legs[1].id != legs[2].id
    lab.attempt.close()
    assert lab.timed_legs() == {"prefill": 1, "decode": 2}
    assert (lab.attempt.receipt.handoff_missing, lab.attempt.handoff) == ("not_ended_by_length", None)


@KEEPING_BACK
async def test_a_client_that_leaves_while_d_is_asked_again_ends_that(lab: Lab) -> None:
    lab.d.asked.clear()
    lab.p.say(STOPPED_P)
    async with asyncio.timeout(SOON_S):
        await lab.d.asked.wait()
    lab.d.hung_up.clear()
    lab.turn.cancel()
    await asyncio.wait({lab.turn})
    await lab.until_hung_up(lab.d)
    async with asyncio.timeout(SOON_S):
        while lab.attempt.booking.holds_prefill or lab.attempt.on_close is not None:
            await asyncio.sleep(0.001)
    assert [(view.inflight, view.queued_prefill_tokens) for view in lab.proxy.state.registry.views()] == [(0, 0)] * 2


@KEEPING_BACK
@pytest.mark.parametrize(
    ("p_says", "d_says", "fate"),
    [
        (GOOD_P, STREAM, "taken"),
        (GOOD_P, None, "taken"),
        (STOPPED_P, None, "aborted"),
        (http(b"{}", 500), None, "aborted"),
        (None, b"?", "aborted"),
    ],
)
async def test_the_kv_of_a_client_that_has_left_is_written_or_there_is_none(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, p_says: bytes | None, d_says: bytes | None, fate: str
) -> None:
    """No P keeps any until a lease ends."""
    monkeypatch.setattr("ppd.proxy.routing.legs.handoff_release.READ_ON_S", 0.1)
    lab.turn.cancel()
    await asyncio.wait({lab.turn})
    for engine, said in (lab.p, p_says), (lab.d, d_says):
        if said is not None:
            engine.say(said)
    await lab.proxy.handoff_release.close(SOON_S)
    (family,) = lab.proxy.state.metrics.abandoned.collect()
    fates = {sample.labels["fate"]: sample.value for sample in family.samples if sample.name.endswith("_total")}
    assert fates == {fate: 1}


@KEEPING_BACK
async def test_a_d_that_has_begun_without_p_goes_on(lab: Lab) -> None:
    lab.d.say(GOOD_D)
    opened = await lab.answer()
    lab.p.say(STOPPED_P)
    await asyncio.sleep(0.01)
    assert not lab.d.hung_up.is_set()
    assert opened.relay is not None
    assert not list(lab.proxy.state.metrics.failures._metrics), "it is nobody's failure"


# -- TensorRT-LLM's P, whose first token ended the answer: whether it hands over all the same, nobody tells

ENDING = pytest.mark.parametrize("lab", ["trtllm_gen_first"], indirect=True)


@ENDING
async def test_its_answer_is_all_of_it_where_d_waits_for_what_may_never_come(lab: Lab) -> None:
    lab.p.say(STOPPED_P)
    opened = await lab.answer()
    assert isinstance(opened.first, bytes) and b'"content":"x"' in opened.first
    assert (opened.relay, lab.attempt.is_finished_on_prefill) == (None, True)
    assert opened.content_type.startswith("text/event-stream")
    await lab.until_hung_up(lab.d)
    assert [leg.error for leg in lab.attempt.receipt.legs] == [None, None]
    lab.attempt.close()
    assert lab.timed_legs() == {"prefill": 1, "decode": 1}


@ENDING
async def test_a_d_that_it_has_handed_over_to_goes_on(lab: Lab) -> None:
    lab.d.say(GOOD_D)
    opened = await lab.answer()
    lab.p.say(STOPPED_P)
    await asyncio.sleep(0.01)
    assert isinstance(opened.first, bytes) and b"hi" in opened.first
    assert not lab.attempt.is_finished_on_prefill and not lab.d.hung_up.is_set()
