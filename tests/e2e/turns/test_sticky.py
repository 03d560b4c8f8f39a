"""Conversations that carry no id stay where their KV is, and every D gets its share of them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.small import stickiness
from ppd.proxy.config import Mode

ENOUGH = 0.95  # of the hits that are possible at all


@pytest.mark.parametrize("mode", [Mode.ALWAYS_LOCAL, Mode.TABLE])
async def test_conversations_without_ids_hit_what_they_could(start_fleet: Any, mode: Mode) -> None:
    talks = stickiness.conversations(60, turns=5, seed=1)
    async with start_fleet("P1 D1 D2 D3 D4", mode=mode) as fleet:
        played = await stickiness.play(fleet.session, fleet.base_url, talks, at_once=12)
        assert played.failures == 0
        assert played.ideal_tokens > 100_000, "or there is nothing to hit"
        assert played.share >= ENOUGH, played
        shares = played.shares
        assert set(shares) == {"D1", "D2", "D3", "D4"}
        assert min(shares.values()) > 0.1


async def test_what_is_lost_is_seen_as_such(start_fleet: Any) -> None:
    """The measure itself: engines that hold two conversations each do not pass."""
    talks = stickiness.conversations(20, turns=4, seed=1)
    async with start_fleet(
        "P1 D1 D2 D3 D4", mode=Mode.ALWAYS_LOCAL, engine={"num_blocks": 128, "max_model_len": 2048}
    ) as fleet:
        played = await stickiness.play(fleet.session, fleet.base_url, talks, at_once=20)
        assert played.failures == 0
        assert played.share < ENOUGH


def test_the_ideal_is_what_an_earlier_prompt_and_its_answer_hold() -> None:
    ideal = stickiness.Ideal(block=4)
    assert ideal.of(tuple(range(10))) == 0
    ideal.learn(tuple(range(10)))
    assert ideal.of((*range(10), 99, 99)) == 8, "whole blocks only"
    assert ideal.of((*range(5), 99, 99, 99)) == 4, "an edit keeps what is before it"
    assert ideal.of(tuple(range(8))) == 4, "the last token is always computed"
    assert ideal.of((7, 7, 7)) == 0


def test_conversations_have_twins_regenerations_and_edits() -> None:
    talks = stickiness.conversations(40, turns=6, seed=0)
    openers = [talk.steps[0].text for talk in talks]
    assert len(set(openers)) < len(openers)
    assert {step.kind for talk in talks for step in talk.steps} == {*stickiness.StepKind}
    assert stickiness.conversations(40, turns=6, seed=0) == talks
