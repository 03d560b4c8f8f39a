"""What a process knows of its turns when it chooses their encoders."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from ppd.proxy.assembly import new_state
from ppd.proxy.bodies.named_media import with_named_media
from ppd.proxy.config import EncoderUse, ProxyConfig
from ppd.proxy.encoders.choosing import ItemDecision, NamedEncoders
from ppd.proxy.encoders.encoder_chooser import EncoderTurn
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.health.doubts import NO_DOUBTS
from ppd.proxy.openai.request import Endpoint, Request
from ppd.proxy.peers.channels import Member
from ppd.proxy.routing.state import State
from tests.e2e.encoders.test_encoders import asks, picture
from tests.support.clock import FakeClock
from tests.support.requests import parse


def seen(**members: Any) -> Request:
    """With a picture."""
    return with_named_media(parse(prompt=[{"role": "user", "content": asks(picture(1))}], **members), "tenant", 9)


def of_messages() -> Request:
    block = {"type": "image", "source": {"type": "base64", "data": picture(1).partition(",")[2]}}
    said = parse(Endpoint.MESSAGES, [{"role": "user", "content": [block]}], max_tokens=9)
    return with_named_media(said, "tenant", 9)


@pytest.fixture
def state(clock: FakeClock) -> State:
    return fleet(clock)


def fleet(clock: FakeClock, use: EncoderUse = EncoderUse.AUTO) -> State:
    """E and R."""
    made = new_state(ProxyConfig(encoder=use), Member(), clock)
    for role in (Role.ENCODE, Role.REPLICA):
        worker = Worker(role=role, address=f"{role}:1", models=("m",))
        made.registry.add_static(worker, clock())
        made.registry.probed(worker.id, worker, None, clock())
    return made


def turn(state: State, **changes: Any) -> EncoderTurn:
    consumer = next(view for view in state.registry.views() if view.role is Role.REPLICA)
    made = EncoderTurn(
        request=seen(),
        consumer=consumer,
        held_units=0,
        headers={},
        leg_id=lambda kind: kind,
        started_s=0.0,
        doubts=NO_DOUBTS,
    )
    return replace(made, **changes)


def decisions(state: State, made: EncoderTurn) -> list[ItemDecision]:
    choices = state.encoders.choose(made)
    assert choices is not None
    return list(choices.decisions.values())


@pytest.mark.parametrize(
    ("is_first", "decision"), [(False, ItemDecision.ENCODED), (True, ItemDecision.BUSY)], ids=["attempts", "turns"]
)
def test_the_share_of_turns_with_media_does_not_grow_by_attempts(
    state: State, clock: FakeClock, is_first: bool, decision: ItemDecision
) -> None:
    """Where it is more than a third an item goes to an idle E only if the worker encodes too."""
    for _ in range(10):
        state.arrivals.count(clock(), opens=True)
    assert decisions(state, turn(state)) == [ItemDecision.ENCODED]
    for _ in range(5):
        found = decisions(state, turn(state, is_first=is_first))
    assert found == [decision]


def test_encoders_that_are_named_need_no_fleet(clock: FakeClock, state: State) -> None:
    empty, named = new_state(ProxyConfig(), Member(), clock), turn(state)
    assert empty.encoders.choose(named) is None
    encoders = tuple(view for view in state.registry.views() if view.role is Role.ENCODE)
    assert decisions(empty, replace(named, named=NamedEncoders(encoders))) == [ItemDecision.ENCODED]


def test_media_with_another_salt_have_another_name() -> None:
    """As caches that salts keep apart: behind a picker, all tenants come by one key."""
    names = [each.media[0].name for each in (seen(), seen(), seen(cache_salt="a"), seen(cache_salt="b"))]
    assert names[0] == names[1] and len(set(names)) == 3


@pytest.mark.parametrize(
    ("engine", "takes"), [("vllm", True), ("sim", True), ("", True), ("sglang", False), ("trtllm", False)]
)
def test_only_some_engines_take_what_an_encoder_tells(state: State, engine: str, takes: bool) -> None:
    """`sim` is what an agent says of a simulated engine."""
    made = turn(state)
    view = replace(made.consumer, worker=dataclasses.replace(made.consumer.worker, engine=engine))
    assert (state.encoders.choose(turn(state, consumer=view)) is not None) is takes


@pytest.mark.parametrize("is_named", [False, True], ids=["chosen here", "named by a picker"])
@pytest.mark.parametrize(
    ("use", "decision"),
    [
        (EncoderUse.AUTO, ItemDecision.UNNAMED),
        (EncoderUse.ALWAYS, ItemDecision.UNNAMED),
        (EncoderUse.NEVER, ItemDecision.NEVER),
    ],
)
def test_media_without_names_in_engines_are_encoded_where_they_are_needed(
    clock: FakeClock, use: EncoderUse, decision: ItemDecision, is_named: bool
) -> None:
    """vLLM makes chat parts without a `uuid` of Messages, so nothing would find what E has encoded."""
    state = fleet(clock, use)
    encoders = tuple(view for view in state.registry.views() if view.role is Role.ENCODE)
    named = NamedEncoders(encoders) if is_named else None
    choices = state.encoders.choose(turn(state, request=of_messages(), named=named))
    assert choices is not None
    assert (list(choices.decisions.values()), choices.batches) == ([decision], [])


def test_what_a_worker_knows_by_no_name_is_not_held_by_it(state: State, clock: FakeClock) -> None:
    """Under its name it has no embedding of the same picture."""
    before, chat = turn(state, request=of_messages()), turn(state)
    assert before.request.media[0].name == chat.request.media[0].name
    choices = state.encoders.choose(before)
    assert choices is not None
    state.encoders.until_computed(before, choices.decisions)(True)
    for _ in range(10):
        state.arrivals.count(clock(), opens=True)
    assert decisions(state, chat) == [ItemDecision.ENCODED]


def timed(state: State, model: str = "m") -> tuple[Any, Any]:
    seconds = state.encoders.seconds(model)
    return seconds.on_encoder, seconds.in_place


def test_what_an_encoder_takes_is_learnt_from_its_legs(state: State, clock: FakeClock) -> None:
    """Of each item, those that came before it too; what it has already says nothing."""
    (encoder,) = (view for view in state.registry.views() if view.role is Role.ENCODE)
    made = turn(state)
    for number in range(20):
        item = replace(made.request.media[0], name=f"{number}")
        ahead = number % 3
        uses = [state.registry.reserve(encoder.id) for _ in range(ahead)]
        encoded = state.encoders.until_encoded(made, encoder, [item])
        clock.advance(0.1 * (1 + ahead))
        encoded()
        again = state.encoders.until_encoded(made, encoder, [item])
        clock.advance(0.001)
        again()
        for used in uses:
            state.registry.release(encoder.id, used)
    assert timed(state) == (pytest.approx(0.1), None)
    assert timed(state, "other") == (None, None)


@pytest.mark.parametrize(
    ("decision", "predicted_s", "well", "expected"),
    [
        (ItemDecision.BUSY, 0.05, True, 0.2),
        (ItemDecision.UNNAMED, 0.05, True, 0.2),
        (ItemDecision.BUSY, None, True, None),  # no laws, or an answer in one piece
        (ItemDecision.BUSY, 0.05, False, None),  # it failed
        (ItemDecision.FAILED, 0.05, True, None),  # E took part of the time
        (ItemDecision.SMALL, 0.05, True, None),
        (ItemDecision.HELD, 0.05, True, None),
    ],
)
def test_what_a_worker_takes_is_learnt_from_first_tokens_that_come_late(
    state: State,
    clock: FakeClock,
    decision: ItemDecision,
    predicted_s: float | None,
    well: bool,
    expected: float | None,
) -> None:
    made = turn(state)
    for _ in range(10):
        began = [
            state.encoders.until_computed(made, {made.request.media[0].name: decision}, predicted_s) for _ in range(2)
        ]
        clock.advance(0.25)
        began[0](well)  # of one item, before which there was none
        clock.advance(0.2)
        began[1](well)  # of one, after another
    assert timed(state) == (None, expected if expected is None else pytest.approx(expected))
