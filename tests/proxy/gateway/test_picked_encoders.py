"""The encoders that a picker chooses: what the sidecar is told of them, and what the books say meanwhile and after."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.proxy.config import EncoderUse, Mode
from ppd.proxy.discovery.turn_report import FailedLeg, TurnReport
from ppd.proxy.encoders.choosing import Choices, ItemDecision
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.gateway.headers import ENCODER_ITEMS, ENCODERS
from ppd.proxy.gateway.picked_encoders import NAMED_LIMIT, headers_of
from tests.e2e.encoders.test_encoders import asks, picture
from tests.proxy.encoders.test_choosing import encoder, item
from tests.proxy.gateway.envoy import D1, SPLITS, Envoy, chat, mutation, proxy_of

E1, E2 = "10.0.3.1:8000", "10.0.3.2:8000"
FLEET = (*SPLITS, f"E={E1}", f"E={E2}")
ALWAYS: dict[str, Any] = {"encoder": EncoderUse.ALWAYS}


def seen(*seeds: int, **members: Any) -> bytes:
    """A body with a picture for each seed."""
    return chat(
        messages=[{"role": "user", "content": [part for seed in seeds for part in asks(picture(seed))]}], **members
    )


def told(envoy: Envoy) -> dict[str, str]:
    """What the sidecar is told of encoders."""
    sent, _ = mutation(envoy.answers[-1])
    return {name: sent[name] for name in (ENCODERS, ENCODER_ITEMS) if name in sent}


def requests(envoy: Envoy) -> int:
    """On all encoders, as they are booked."""
    views = [envoy.proxy.state.registry.view(WorkerId(each)) for each in (E1, E2)]
    return sum(view.requests for view in views if view is not None)


def head(envoy: Envoy, status: int = 200) -> None:
    envoy.tell("response_headers", headers={":status": str(status), "content-type": "application/json"})


def report(envoy: Envoy, *failed: FailedLeg, **changes: Any) -> TurnReport:
    made = {"route": "LOCAL", "outcome": "completed", "status": 200, "prompt_tokens": 9, "completion_tokens": 1}
    return TurnReport(
        request_id=envoy.receipt.id,
        failed_legs=list(failed),
        decode_cached_tokens=0,
        ended_s=1.0,
        **{**made, **changes},
    )


def encoded_total(envoy: Envoy, decision: ItemDecision) -> float:
    return float(envoy.proxy.state.metrics.encoder_items.labels(decision)._value.get())


@pytest.mark.parametrize(
    ("body", "settings", "expected"),
    [
        (chat(), ALWAYS, {}),
        (seen(1), {"encoder": EncoderUse.NEVER}, {}),
        (seen(1), ALWAYS, {ENCODERS: E1}),
        (seen(1, 2, 1), ALWAYS, {ENCODERS: f"{E1},{E2}"}),
        (seen(1, 2, 3), ALWAYS, {ENCODERS: f"{E1},{E2},{E1}"}),
    ],
)
@pytest.mark.parametrize("mode", [Mode.ALWAYS_SPLIT, Mode.ALWAYS_LOCAL])
async def test_the_sidecar_is_told_who_encodes(
    body: bytes, settings: dict[str, Any], expected: dict[str, str], mode: Mode
) -> None:
    envoy = Envoy(proxy_of(FLEET, mode=mode, **settings))
    forged = {ENCODERS: "10.9.9.9:1", ENCODER_ITEMS: "0"}
    await envoy.turn(body, forged)
    assert told(envoy) == expected
    assert set(mutation(envoy.answers[-1])[1]) == set(forged) - set(expected), "what a client claims goes no further"
    envoy.call.lost()
    assert envoy.is_idle and requests(envoy) == 0


async def test_without_an_encoder_in_the_fleet_none_is_named() -> None:
    envoy = Envoy(proxy_of(**ALWAYS))
    await envoy.turn(seen(1))
    assert told(envoy) == {} and envoy.receipt.encoder is None


async def test_items_that_the_worker_has_are_left_to_it() -> None:
    proxy = proxy_of((f"D={D1}", f"E={E1}"), encoder_min_pixels=0)
    for seed in range(9):  # most turns are text
        await (text := Envoy(proxy)).turn(chat(seed=seed))
        text.call.lost()
    first = Envoy(proxy)
    await first.turn(seen(1))
    assert told(first) == {ENCODERS: E1}
    head(first)
    first.call.half_closed()
    second = Envoy(proxy)
    await second.turn(seen(1, 2, seed=1))
    assert told(second) == {ENCODERS: E1, ENCODER_ITEMS: "1"}
    assert second.receipt.encoder is not None
    assert second.receipt.encoder.items == ["image: held", "image: encoded"]


async def test_encoders_are_booked_until_the_answer_begins() -> None:
    envoy = Envoy(proxy_of(FLEET, **ALWAYS))
    await envoy.turn(seen(1, 2))
    assert requests(envoy) == 2
    head(envoy)
    assert requests(envoy) == 0
    envoy.call.half_closed()
    assert envoy.is_idle
    assert encoded_total(envoy, ItemDecision.ENCODED) == 2
    # Where an item has been encoded it is sent again, whoever has less to do.
    busy = Envoy(envoy.proxy)
    await busy.turn(seen(3, seed=1))
    assert told(busy) == {ENCODERS: E1}
    again = Envoy(envoy.proxy)
    await again.turn(seen(1, seed=2))
    assert told(again) == {ENCODERS: E1}


@pytest.mark.parametrize("is_late", [False, True])
async def test_an_encoder_that_a_sidecar_could_not_reach_is_avoided(is_late: bool) -> None:
    envoy = Envoy(proxy_of(FLEET, **ALWAYS))
    await envoy.turn(seen(1))
    if is_late:
        head(envoy)
    envoy.reports.taken(report(envoy, FailedLeg("encode", E1, "connect", "refused")))
    envoy.call.half_closed()
    assert (envoy.receipt.outcome, requests(envoy), envoy.is_idle) == ("completed", 0, True)
    assert envoy.receipt.encoder is not None and envoy.receipt.encoder.items == ["image: failed"]
    assert encoded_total(envoy, ItemDecision.FAILED) == 1
    breakers = envoy.proxy.state.health.breakers
    assert set(breakers.states(envoy.proxy.state.now())) == {E1}
    later = Envoy(envoy.proxy)
    await later.turn(seen(1, seed=1))
    assert told(later) == {ENCODERS: E2}


async def test_a_report_may_name_encoders_of_a_turn_that_had_none() -> None:
    envoy = Envoy(proxy_of(FLEET, **ALWAYS))
    await envoy.turn(chat())
    failed = [FailedLeg("encode", each, "connect", "refused") for each in (E1, "10.9.9.9:1")]
    envoy.reports.taken(report(envoy, *failed, FailedLeg("encode", E2, "somewhere", "somehow")))
    assert envoy.receipt.outcome == "completed"
    assert set(envoy.proxy.state.health.breakers.states(envoy.proxy.state.now())) == {E1}


BY_URL = [{"role": "user", "content": asks("http://gone.invalid/a.png")}]


@pytest.mark.parametrize(
    ("outcome", "status", "avoided"), [("failed", 500, set()), ("completed", 200, {E1})], ids=["failed", "answered"]
)
async def test_a_url_may_be_to_blame_until_a_worker_answers(outcome: str, status: int, avoided: set[str]) -> None:
    envoy = Envoy(proxy_of(FLEET, breaker_failures=1, **ALWAYS))
    await envoy.turn(chat(messages=BY_URL))
    envoy.reports.taken(report(envoy, FailedLeg("encode", E1, "headers", "5xx"), outcome=outcome, status=status))
    assert set(envoy.proxy.state.health.breakers.states(envoy.proxy.state.now())) == avoided


@pytest.mark.parametrize(("body", "is_avoided"), [(chat(messages=BY_URL), False), (seen(1), True)], ids=["url", "data"])
async def test_so_may_it_for_the_worker(body: bytes, is_avoided: bool) -> None:
    envoy = Envoy(proxy_of((f"D={D1}",), breaker_failures=1))
    await envoy.turn(body)
    envoy.tell("response_headers", headers={":status": "500"}, end_of_stream=True)
    assert bool(envoy.proxy.state.health.breakers.states(envoy.proxy.state.now())) is is_avoided


@pytest.mark.parametrize("status", [500, None])
async def test_of_a_turn_that_came_to_nothing_nothing_is_believed(status: int | None) -> None:
    envoy = Envoy(proxy_of(FLEET, **ALWAYS))
    await envoy.turn(seen(1))
    assert told(envoy) == {ENCODERS: E1}
    if status is not None:
        head(envoy, status)
    envoy.call.lost()
    assert envoy.is_idle and requests(envoy) == 0
    busy, again = Envoy(envoy.proxy), Envoy(envoy.proxy)
    await busy.turn(seen(2, seed=1))
    assert told(busy) == {ENCODERS: E1}
    await again.turn(seen(1, seed=2))
    assert told(again) == {ENCODERS: E2}, "the other one would be asked if it had the item"


def test_the_head_is_bounded() -> None:
    fleet = [encoder(f"E{number}") for number in range(3)]
    decisions = {f"item {number}": ItemDecision.ENCODED for number in range(500)}
    placed: list[Any] = [(fleet[number % 3], [item(name)]) for number, name in enumerate(decisions)]
    sent = headers_of(Choices(decisions, placed))
    assert sent[ENCODERS].split(",") == [f"E{number % 3}:1" for number in range(NAMED_LIMIT)]
    assert ENCODER_ITEMS not in sent
