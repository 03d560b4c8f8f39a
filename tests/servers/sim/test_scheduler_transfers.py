"""What is handed over and pulled, step by step; and properties of any load."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.servers.sim.core.counters import Trap
from ppd.servers.sim.core.handoffs import RemotePrefill, Transfer
from ppd.servers.sim.core.scheduler import EngineDied, Step
from ppd.servers.sim.core.sequence import Finish, Sampling, SequenceState
from tests.support.stepped_engine import Engine, alone, shape

# Handing over and pulling.

LEG = Sampling(max_tokens=1)
LONG = Sampling(max_tokens=4, ignore_eos=True)


def pulls(request_id: str, block_ids: tuple[int, ...], cached: int | None = None) -> Transfer:
    return Transfer(remote=RemotePrefill("p", request_id, "h", 1, block_ids, prefill_cached_tokens=cached))


def prefilled(prompt: str) -> tuple[Engine, tuple[int, ...]]:
    """A P that has finished the prompt, and the ids of its blocks."""
    p = Engine()
    p.add_sequence("leg", prompt, LEG, Transfer(hands_over=True))
    (output,) = p.scheduler.complete(p.scheduler.plan())
    assert output.handed_over is not None
    assert output.handed_over.tokens == len(prompt)
    return p, output.handed_over.block_ids


def test_a_finished_prefill_stays_pinned() -> None:
    p, ids = prefilled("x" * 10)
    assert len(ids) == p.handoffs.pinned_blocks == p.pool.used == 3
    p.handoffs.close("leg")
    assert p.pool.used == 0


def test_an_aborted_prefill_hands_nothing_over() -> None:
    p = Engine(budget=4)
    sequence = p.add_sequence("leg", "x" * 10, LEG, Transfer(hands_over=True))
    p.step()
    p.scheduler.abort(sequence)
    assert (len(p.handoffs), p.pool.used) == (0, 0)


def test_a_pulled_prompt_continues_as_if_computed_here() -> None:
    p, ids = prefilled("hello world")
    d = Engine()
    sequence = d.add_sequence("a", "hello world", LONG, pulls("leg", ids))
    (pull,) = d.step().pulls
    assert (pull.remote_ids, pull.tokens, sequence.state) == (ids, 11, SequenceState.PULLING)
    assert (d.scheduler.pulling, d.scheduler.waiting, d.scheduler.running) == (1, 0, 0)
    assert d.step() == Step()
    d.scheduler.pull_arrived(pull, p.handoffs.read("leg", pull.remote_ids))
    d.run()
    assert d.texts["a"] == alone("hello world")
    assert d.counters.external_kv_tokens == d.counters.external_hits == 11
    assert d.counters.local_compute_tokens == 0
    assert d.pool.used == 0


def test_only_the_missing_blocks_are_pulled() -> None:
    d = Engine()
    d.add("first", "hello wo", max_tokens=1)
    d.run()
    p, ids = prefilled("hello world and all")
    sequence = d.add_sequence("a", "hello world and all", LONG, pulls("leg", ids))
    (pull,) = d.step().pulls
    assert pull.remote_ids == ids[2:]
    assert (pull.tokens, sequence.local_hits) == (11, 8)
    d.scheduler.pull_arrived(pull, p.handoffs.read("leg", pull.remote_ids))
    d.run()
    assert d.texts["a"] == alone("hello world and all")
    assert d.counters.pulled_blocks == 3


@pytest.mark.parametrize(("cached", "reported"), [(7, 7), (0, 0), (None, 11)])
def test_usage_reports_what_p_found_in_its_cache(cached: int | None, reported: int) -> None:
    p, ids = prefilled("hello world")
    d = Engine()
    sequence = d.add_sequence("a", "hello world", LONG, pulls("leg", ids, cached))
    (pull,) = d.step().pulls
    d.scheduler.pull_arrived(pull, p.handoffs.read("leg", pull.remote_ids))
    assert sequence.cached_tokens == reported


def test_wrong_kv_shows_in_this_answer_and_in_the_next_turn() -> None:
    p, ids = prefilled("hello world")
    p.handoffs.close("leg")
    d = Engine()
    d.add_sequence("a", "hello world", LONG, pulls("leg", ids))
    (pull,) = d.step().pulls
    d.scheduler.pull_arrived(pull, p.handoffs.read("leg", pull.remote_ids))
    d.run()
    assert d.texts["a"] != alone("hello world")
    d.add("b", "hello world!")
    d.run()
    assert d.texts["b"] != alone("hello world!")


@pytest.mark.parametrize("recompute", [True, False])
def test_a_failed_pull_is_recomputed_or_ends_the_request(recompute: bool) -> None:
    d = Engine()
    sequence = d.add_sequence("a", "hello world", LONG, pulls("leg", (0, 1, 2)))
    (pull,) = d.step().pulls
    output = d.scheduler.pull_failed(pull, recompute=recompute)
    if recompute:
        assert output is None
        d.run()
        assert d.texts["a"] == alone("hello world")
        assert d.counters.local_compute_tokens == 11
    else:
        assert output is not None
        assert output.finish is Finish.ERROR
        assert sequence.state is SequenceState.FINISHED
    assert d.pool.used == 0


@pytest.mark.parametrize("report", ["arrived", "failed"])
def test_an_aborted_pull_keeps_its_blocks_until_it_reports(report: str) -> None:
    d = Engine()
    sequence = d.add_sequence("a", "hello world", LONG, pulls("leg", (0, 1, 2)))
    (pull,) = d.step().pulls
    d.scheduler.abort(sequence)
    assert d.pool.used == 3
    if report == "arrived":
        d.scheduler.pull_arrived(pull, [[0] * 4] * 3)
    else:
        assert d.scheduler.pull_failed(pull, recompute=False) is None
    assert (d.pool.used, d.scheduler.pulling) == (0, 0)
    assert d.counters.finished == {Finish.ABORT: 1}


def test_a_pull_waits_for_blocks_like_anything_else() -> None:
    d = Engine(blocks=3)
    d.add("first", "x" * 8, max_tokens=2)
    d.add_sequence("a", "hello world", LONG, pulls("leg", (0, 1, 2)))
    assert d.step().pulls == ()
    d.step()
    assert len(d.step().pulls) == 1


def test_a_pulled_prompt_takes_the_place_of_one_that_found_no_block() -> None:
    p, ids = prefilled("pulled ok")
    d = Engine(blocks=5, seqs=1)
    d.add_sequence("b", "pulled ok", LONG, pulls("leg", ids))
    (pull,) = d.step().pulls
    d.add("a", "x" * 8)
    assert shape(d.step()) == [("a", 8)]
    d.scheduler.pull_arrived(pull, p.handoffs.read("leg", pull.remote_ids))
    assert shape(d.step()) == [("b", 1)]
    d.run()
    assert d.texts == {"a": alone("x" * 8), "b": alone("pulled ok")}


@pytest.mark.parametrize(
    ("transfer", "trap"),
    [
        (Transfer(trap=Trap.NO_REMOTE_BLOCKS), Trap.NO_REMOTE_BLOCKS),
        (pulls("leg", (0, 1)), Trap.TOO_FEW_BLOCKS),
    ],
)
def test_a_scheduler_that_asserts_is_the_engines_end(transfer: Transfer, trap: Trap) -> None:
    d = Engine()
    d.add_sequence("a", "hello world", LONG, transfer)
    with pytest.raises(EngineDied):
        d.step()
    assert d.counters.traps == {trap: 1}


def test_a_pull_without_an_address_parks_the_request_until_its_client_leaves_and_loses_its_blocks() -> None:
    d = Engine()
    sequence = d.add_sequence("a", "hello world", LONG, Transfer(trap=Trap.NO_REMOTE_ADDRESS))
    assert [d.step() for _ in range(3)] == [Step()] * 3
    assert (d.scheduler.pulling, d.pool.used) == (1, 3)
    d.scheduler.abort(sequence)
    assert (d.scheduler.pulling, d.pool.used) == (0, 3)


def test_blocks_are_paired_from_the_end_as_vllm_does() -> None:
    d = Engine()
    d.add_sequence("a", "hello world", LONG, pulls("leg", (5, 6, 7, 8)))
    (pull,) = d.step().pulls
    assert pull.remote_ids == (6, 7, 8)


PROMPTS = st.lists(st.text("ab", min_size=1, max_size=24), min_size=1, max_size=8)


@given(prompts=PROMPTS, blocks=st.integers(9, 24), budget=st.integers(1, 40), seqs=st.integers(1, 6))
def test_no_load_changes_an_answer_or_loses_a_block(prompts: list[str], blocks: int, budget: int, seqs: int) -> None:
    engine = Engine(blocks=blocks, budget=budget, seqs=seqs)
    for at, prompt in enumerate(prompts):
        engine.add(str(at), prompt, max_tokens=12)
    engine.run()
    assert engine.texts == {str(at): alone(prompt, max_tokens=12) for at, prompt in enumerate(prompts)}
    assert engine.pool.used == 0
    counters = engine.counters
    assert counters.prompt_tokens == sum(map(len, prompts))
    assert counters.local_compute_tokens + counters.local_cache_hit_tokens == counters.prompt_tokens


@given(prompts=PROMPTS, aborts=st.lists(st.integers(0, 7), max_size=8), blocks=st.integers(9, 20))
def test_aborts_at_any_time_leave_nothing_behind(prompts: list[str], aborts: list[int], blocks: int) -> None:
    engine = Engine(blocks=blocks, budget=16, seqs=4)
    sequences = [engine.add(str(at), prompt, max_tokens=12) for at, prompt in enumerate(prompts)]
    for at in aborts:
        engine.step()
        engine.scheduler.abort(sequences[at % len(sequences)])
        assert engine.pool.used <= blocks
    engine.run()
    assert engine.pool.used == 0
    assert sum(engine.counters.finished.values()) == len(sequences)


def test_a_finished_sequence_cannot_move_again() -> None:
    engine = Engine()
    sequence = engine.add("a", "x")
    engine.run()
    move: Callable[[SequenceState], None] = sequence.move
    with pytest.raises(ValueError, match="finished -> running"):
        move(SequenceState.RUNNING)
