"""Steps of one engine: batches, chunks, preemption, ends."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.proxy.laws.step_time import attention_pairs, step_time_s
from ppd.servers.sim.core.block_pool import Namespace
from ppd.servers.sim.core.scheduler import Step
from ppd.servers.sim.core.sequence import Finish
from tests.support.stepped_engine import PROFILE, Engine, alone, shape


def test_prompts_are_computed_in_chunks_after_the_decodes() -> None:
    engine = Engine(budget=10)
    engine.add("a", "x" * 8)
    assert shape(engine.step()) == [("a", 8)]
    engine.add("b", "y" * 25)
    assert [shape(engine.step()) for _ in range(3)] == [
        [("a", 1), ("b", 9)],
        [("a", 1), ("b", 9)],
        [("a", 1), ("b", 7)],
    ]
    assert engine.finishes == {"a": Finish.LENGTH}
    assert shape(engine.step()) == [("b", 1)]


def test_a_long_prompt_leaves_room_for_others_but_has_all_of_it_alone() -> None:
    engine = Engine(budget=12, cap=4)
    engine.add("long", "x" * 25)
    assert shape(engine.step()) == [("long", 12)]
    engine.add("short", "y" * 5)
    assert [shape(engine.step()) for _ in range(3)] == [
        [("long", 4), ("short", 4)],
        [("long", 4), ("short", 1)],
        [("long", 4), ("short", 1)],
    ]


def test_the_batch_has_a_limit() -> None:
    engine = Engine(seqs=2)
    for name in "abc":
        engine.add(name, name * 4, max_tokens=2)
    assert shape(engine.step()) == [("a", 4), ("b", 4)]
    assert (engine.scheduler.running, engine.scheduler.waiting) == (2, 1)
    engine.step()
    assert shape(engine.step()) == [("c", 4)]


def test_a_request_waits_until_blocks_are_free() -> None:
    engine = Engine(blocks=3, size=4)
    engine.add("a", "x" * 8, max_tokens=2)
    engine.add("b", "y" * 8, max_tokens=2)
    assert shape(engine.step()) == [("a", 8)]
    engine.step()
    assert engine.finishes == {"a": Finish.LENGTH}
    assert shape(engine.step()) == [("b", 8)]


def test_the_youngest_is_preempted_and_answers_as_if_it_were_not() -> None:
    engine = Engine(blocks=6, size=4)
    engine.add("a", "x" * 8, max_tokens=9)
    engine.add("b", "y" * 8, max_tokens=9)
    engine.run()
    assert engine.counters.preemptions > 0
    assert engine.texts == {"a": alone("x" * 8, max_tokens=9), "b": alone("y" * 8, max_tokens=9)}
    assert engine.counters.prompt_tokens == 16
    assert engine.counters.prefix_queries == 16
    assert engine.pool.used == 0


def test_a_repeated_prompt_is_a_hit_but_for_its_last_token() -> None:
    engine = Engine()
    engine.add("a", "x" * 8, max_tokens=1)
    engine.run()
    second = engine.add("b", "x" * 8, max_tokens=1)
    assert shape(engine.step()) == [("b", 4)]
    assert second.local_hits == engine.counters.local_cache_hit_tokens == 4
    assert engine.texts["b"] == engine.texts["a"]


def test_the_next_turn_hits_what_was_generated() -> None:
    engine = Engine()
    engine.add("a", "hello there", max_tokens=10)
    engine.run()
    engine.add("b", "hello there" + engine.texts["a"] + "more", max_tokens=1)
    assert shape(engine.step()) == [("b", 25 - 20)]
    assert engine.counters.local_cache_hit_tokens == 20  # 11 + 9 computed tokens fill five blocks


def test_salted_prompts_share_nothing() -> None:
    engine = Engine()
    engine.add("a", "x" * 9, max_tokens=1)
    engine.run()
    salted = engine.add("b", "x" * 9, max_tokens=1)
    salted.namespace = Namespace("m", cache_salt="s")
    assert shape(engine.step()) == [("b", 9)]


def test_a_step_takes_what_the_law_says() -> None:
    engine = Engine(budget=100)
    engine.add("a", "x" * 10)
    engine.step()
    engine.add("b", "y" * 50)
    step = engine.step()
    assert step.duration_s == step_time_s(PROFILE, 1, 11, 50, attention_pairs(50, 0))


def test_an_idle_engine_has_nothing_to_do() -> None:
    assert Engine().step() == Step()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_frees_every_block(steps: int) -> None:
    engine = Engine(budget=10)
    sequence = engine.add("a", "x" * 15)
    for _ in range(steps):
        engine.step()
    engine.scheduler.abort(sequence)
    engine.scheduler.abort(sequence)
    assert engine.pool.used == 0
    assert engine.counters.finished == {Finish.ABORT: 1}
    assert engine.step() == Step()


def test_an_abort_while_the_step_runs_drops_its_token() -> None:
    engine = Engine()
    sequence = engine.add("a", "x" * 5)
    step = engine.scheduler.plan()
    engine.scheduler.abort(sequence)
    assert engine.scheduler.complete(step) == []
    assert engine.pool.used == 0


@pytest.mark.parametrize(
    ("settings", "finish", "answered"),
    [
        ({"max_tokens": 3}, Finish.LENGTH, 3),
        ({"max_tokens": 500, "ignore_eos": False, "min_tokens": 200}, Finish.STOP, 201),
        ({"max_tokens": 300}, Finish.LENGTH, 300),
        ({"max_tokens": 300, "stop": tuple("aeiou")}, Finish.STOP, None),
        ({"max_tokens": 300, "stop_token_ids": tuple(map(ord, "aeiou"))}, Finish.STOP, None),
        ({"max_tokens": 300, "stop": tuple("aeiou"), "min_tokens": 300}, Finish.LENGTH, 300),
    ],
)
def test_answers_end(settings: dict[str, Any], finish: Finish, answered: int | None) -> None:
    engine = Engine(blocks=1000)
    sequence = engine.add("a", "x" * 5, **settings)
    engine.run()
    assert engine.finishes == {"a": finish}
    assert sequence.answered == answered if answered else sequence.answered < 10
    assert engine.pool.used == 0


def test_without_a_limit_answers_end_by_themselves() -> None:
    text = alone("x" * 5, max_tokens=5000, ignore_eos=False)
    assert 23 <= len(text) < 95


def test_what_is_cached_of_a_prompt_is_not_new() -> None:
    engine = Engine()
    first = engine.add("first", "abcdefgh")
    assert engine.scheduler.new_tokens(first) == 8
    engine.run()
    again = engine.add("again", "abcdefghijkl")
    assert engine.scheduler.new_tokens(again) == 4  # two blocks of four are there
