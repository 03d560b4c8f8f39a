from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ppd.offline.bench.workloads import ConversationShape, Pace, scripts_for, with_outputs, with_pauses_of, within
from ppd.offline.load.server_tokenizer import Tokenizer
from ppd.offline.traces.turns import Message, TracedConversation, TracedTurn
from ppd.proxy.errors import ConfigError


def conversation(arrival_s: float | None, *turns: TracedTurn) -> TracedConversation:
    return TracedConversation("c", arrival_s, turns or (TracedTurn(new_tokens=1, output_tokens=1),))


def text(reply: str = "", **fields: Any) -> TracedTurn:
    return TracedTurn(messages=(Message("user", "Hi"),), reply=reply, **fields)


class Words:
    async def encode(self, text: str) -> list[int]:
        return [0] * len(text.split())

    async def render(self, messages: object) -> list[int]:
        raise AssertionError("not asked for")


class NoTokenizer(Words):
    async def encode(self, text: str) -> list[int]:
        raise ConfigError("/tokenize: answered 404")


def test_a_shape_makes_conversations_of_its_lengths() -> None:
    shape = ConversationShape(first=(128, 64), later=(16, 32), turns=3, think_s=1.5, shared_prefix_tokens=100)
    (one,) = shape.conversations(1)
    assert [(turn.new_tokens, turn.output_tokens, turn.think_s) for turn in one.turns] == [
        (128, 64, 0.0),
        (16, 32, 1.5),
        (16, 32, 1.5),
    ]
    assert str(shape) == "128:64, then 2 x 16:32, 1.5 s apart, 100 of them shared"
    assert str(ConversationShape(first=(9, 1), later=(1, 1), turns=1)) == "9:1"


def test_every_so_many_requests_have_an_image() -> None:
    shape = ConversationShape(first=(9, 1), later=(5, 1), turns=2, image_every=3)
    images = [[turn.images for turn in one.turns] for one in shape.conversations(3)]
    assert images == [[0, 0], [1, 0], [0, 1]]
    assert str(shape) == "9:1, then 1 x 5:1, an image in every 3. request"


def test_a_shape_cannot_share_more_than_it_has() -> None:
    with pytest.raises(ConfigError, match="below the 128 tokens"):
        ConversationShape(first=(128, 1), later=(1, 1), turns=1, shared_prefix_tokens=128)


def test_recorded_arrivals_and_pauses_shrink_alike() -> None:
    later = TracedTurn(new_tokens=1, output_tokens=1, think_s=6.0, gap_s=8.0)
    played = scripts_for([conversation(20.0), conversation(10.0, later)], Pace(speed=2.0), seed=0)
    assert [script.arrival_s for script in played] == [0.0, 5.0]
    assert [(turn.think_s, turn.gap_s) for turn in played[0].turns] == [(3.0, 4.0)]
    assert [script.number for script in played] == [0, 1]


def test_poisson_arrivals_have_the_rate_and_depend_on_the_seed() -> None:
    many = [conversation(None)] * 2000
    first = scripts_for(many, Pace(qps=4.0), seed=1)
    assert first == scripts_for(many, Pace(qps=4.0), seed=1)
    assert first != scripts_for(many, Pace(qps=4.0), seed=2)
    assert first[-1].arrival_s == pytest.approx(500, rel=0.1)


def test_without_recorded_arrivals_a_pace_must_be_given() -> None:
    with pytest.raises(ConfigError, match="give --qps or --concurrency"):
        scripts_for([conversation(1.0), conversation(None)], Pace(), seed=0)


@pytest.mark.parametrize(("limit", "turns"), [(300, 3), (130, 2), (129, 1)])
def test_a_conversation_ends_before_its_context_is_too_long(limit: int, turns: int) -> None:
    lengths = (TracedTurn(new_tokens=100, output_tokens=10), TracedTurn(new_tokens=15, output_tokens=5))
    long = conversation(0.0, *lengths, TracedTurn(new_tokens=150, output_tokens=20))
    assert [len(one.turns) for one in within([long], limit)] == [turns]


def test_a_prompt_that_starts_afresh_has_a_context_of_its_own() -> None:
    lengths = (TracedTurn(new_tokens=100, output_tokens=10), TracedTurn(new_tokens=80, output_tokens=5, restarts=True))
    assert [len(one.turns) for one in within([conversation(0.0, *lengths)], 110)] == [2]


def test_conversations_that_never_fit_are_left_out() -> None:
    assert within([conversation(0.0, TracedTurn(new_tokens=100, output_tokens=10))], 50) == []


def test_pauses_have_a_limit() -> None:
    pause = TracedTurn(new_tokens=1, output_tokens=1, think_s=9.0, gap_s=1.0)
    (one,) = with_pauses_of([conversation(0.0, pause)], 2.0)
    assert one.turns == (replace(pause, think_s=2.0),)


@pytest.mark.parametrize(
    ("turn", "asked", "tokenizer", "tokens"),
    [
        (text("one two three"), None, Words(), 3),
        (text("one two three"), None, NoTokenizer(), 3),  # 13 characters
        (text("one two three", output_tokens=9), None, Words(), 9),
        (text(), None, Words(), 128),
        (text("one two three", output_tokens=9), 5, NoTokenizer(), 5),
    ],
)
async def test_an_answers_length_is_asked_recorded_counted_or_usual(
    turn: TracedTurn, asked: int | None, tokenizer: Tokenizer, tokens: int
) -> None:
    (one,) = await with_outputs([conversation(None, turn)], asked, 128, tokenizer)
    assert one.turns == (replace(turn, output_tokens=tokens),)
