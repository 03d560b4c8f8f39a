"""KV that the worker which computes a prompt fetches from the cache of any other worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.offline.simulation.workers.fleet import FinishedPrefill
from ppd.offline.simulation.workers.kv_cache import Span
from ppd.proxy.laws.step_time import EngineProfile
from tests.support.simulation.fleet import COSTS, HELD, LATER, Lab, after_first_turn


@pytest.mark.parametrize(("holder", "asked"), [("D1", "D2"), ("R1", "R2"), ("D1", "R1"), ("P1", "D1")])
def test_any_worker_fetches_from_any_other_what_it_would_compute_else(holder: str, asked: str) -> None:
    lab = after_first_turn(holder)
    job = lab.ask(asked, *LATER, source=holder)
    took_s = lab.run()
    assert job.work.fetched_tokens == job.cached_tokens == HELD
    assert job.work.computed_tokens == 1300 - HELD
    assert [(move.sender, move.receiver, move.tokens) for move in job.work.moves] == [(holder, asked, HELD)]
    assert lab.holds(holder) == HELD
    assert lab.holds(asked) == 1300 // 16 * 16
    assert lab.in_use == 0
    alone = after_first_turn(holder)
    alone.ask(asked, *LATER)
    saved_s = alone.run() - took_s
    assert saved_s == pytest.approx(HELD * (1e-3 - COSTS.kv_bytes_per_token / 1e9), rel=0.05)


@pytest.mark.parametrize(
    ("fetched", "expected"),
    [(1 << 20, HELD), (700, 688), (15, 0), (0, 0)],  # whole blocks of 16
)
def test_no_more_is_fetched_than_is_asked_for(fetched: int, expected: int) -> None:
    lab = after_first_turn("D1")
    job = lab.ask("D2", *LATER, source="D1", fetched=fetched)
    lab.run()
    assert (job.work.fetched_tokens, job.work.computed_tokens) == (expected, 1300 - expected)


def test_only_what_the_worker_lacks_is_fetched() -> None:
    lab = after_first_turn("D1")
    lab.ask("D2", Span(1, 600), output=Span(7, 1))
    lab.run()
    job = lab.ask("D2", *LATER, source="D1")
    lab.run()
    assert job.work.fetched_tokens == HELD - 592
    assert lab.workers["D1"].sends.bytes == (HELD - 592) * COSTS.kv_bytes_per_token


@pytest.mark.parametrize("source", ["D2", "R1"])  # itself, and one that holds nothing
def test_a_source_without_it_costs_nothing(source: str) -> None:
    fetching, alone = after_first_turn("D1"), after_first_turn("D1")
    job = fetching.ask("D2", *LATER, source=source)
    alone.ask("D2", *LATER)
    assert fetching.run() == alone.run()
    assert (job.work.fetched_tokens, job.work.moves) == (0, [])


def test_what_is_gone_when_the_transfer_begins_is_computed() -> None:
    lab = after_first_turn("D1", capacity=2000)
    lab.ask("D2", Span(8, 1500), output=Span(9, 300))  # D2 has no room until it ends
    lab.run_for(0.5)
    job = lab.ask("D2", *LATER, source="D1")
    lab.ask("D1", Span(10, 1500), output=Span(11, 2))  # evicts most of it meanwhile
    lab.run()
    assert 0 < job.work.fetched_tokens < 500
    assert job.work.computed_tokens == 1300 - job.work.fetched_tokens
    assert lab.in_use == 0


def test_what_is_being_sent_is_not_evicted() -> None:
    slow = EngineProfile(transfer_bytes_per_s=1e8, transfer_s=0.0)  # 1.5 s
    lab = after_first_turn("D1", capacity=2000, costs=slow)
    job = lab.ask("D2", *LATER, source="D1")
    other = lab.ask("D1", Span(10, 1500), output=Span(11, 2))  # has room when it was sent
    first_s = lab.timeline.now_s
    lab.run()
    assert job.work.fetched_tokens == HELD
    assert other.work.computed_tokens == 1500
    assert lab.first_s[-1] - first_s > 1.5
    assert lab.in_use == 0


def test_a_stream_of_the_source_gives_way_when_what_is_being_sent_takes_its_memory() -> None:
    """An engine plans many steps at once; what is pinned meanwhile is not there for them."""
    slow = EngineProfile(transfer_bytes_per_s=1e8, transfer_s=0.0)
    lab = after_first_turn("D1", capacity=2000, costs=slow)
    stream = lab.ask("D1", Span(10, 300), output=Span(11, 1200))
    lab.run_for(3.0)
    lab.ask("D2", *LATER, source="D1")
    lab.run()
    assert stream.preemptions == 1
    assert lab.ended == 3
    assert lab.in_use == 0


def test_a_request_that_fetches_is_waiting_and_holds_its_memory() -> None:
    slow = EngineProfile(transfer_bytes_per_s=1e8, transfer_s=0.0)
    lab = after_first_turn("D1", costs=slow)
    lab.ask("D2", *LATER, source="D1")
    lab.run_for(0.5)
    engine = lab.workers["D2"].engine
    assert (engine.running, engine.waiting) == (0, 1)
    assert engine.cache.used_tokens == 1300
    assert lab.workers["D1"].engine.cache.used_tokens == 1199  # pinned


@pytest.mark.parametrize(
    ("prefill", "decode", "source", "moves"),
    [
        ("P1", "D2", "D1", [("D1", "P1", HELD), ("P1", "D2", 1300)]),
        ("P1", "D1", "D1", [("D1", "P1", HELD), ("P1", "D1", 1300 - HELD)]),  # read back
        ("D1", "D2", "", [("D1", "D2", 1300)]),  # D1 lends itself as P
        ("R1", "D1", "D1", [("D1", "R1", HELD), ("R1", "D1", 1300 - HELD)]),
        ("R1", "R2", "D1", [("D1", "R1", HELD), ("R1", "R2", 1300)]),
    ],
)
def test_who_computes_a_prompt_for_a_d_may_be_any_worker_and_fetch_first(
    prefill: str, decode: str, source: str, moves: list[tuple[str, str, int]]
) -> None:
    lab = after_first_turn("D1")
    work = lab.split(prefill, decode, *LATER, source=source)
    lab.run()
    assert [(move.sender, move.receiver, move.tokens) for move in work.moves] == moves
    assert work.computed_tokens == 1300 - HELD + 1  # and the prompt's last token again
    assert lab.ended == 2
    assert lab.in_use == 0


def test_links_carry_one_fetch_at_a_time() -> None:
    lab = after_first_turn("D1")
    one, two = lab.ask("D2", *LATER, source="D1"), lab.ask("R1", *LATER, source="D1")
    lab.run()
    first, second = sorted(lab.first_s[-2:])
    assert one.work.fetched_tokens == two.work.fetched_tokens == HELD
    assert second - first == pytest.approx(HELD * COSTS.kv_bytes_per_token / 1e9, rel=0.01)


WORKERS = ("P1", "D1", "D2", "R1", "R2")
TURNS = st.lists(
    st.tuples(
        st.sampled_from(WORKERS),
        st.sampled_from(WORKERS),
        st.sampled_from(WORKERS),
        st.integers(1, 4),  # the conversation
        st.integers(1, 5),  # how long its prompt is
        st.integers(0, 2000),
        st.floats(0.0, 3.0),
        st.booleans(),
    ),
    min_size=1,
    max_size=25,
)


@given(TURNS, st.sampled_from([1500, 3000, 100_000]))
def test_all_turns_end_no_cache_holds_more_than_it_can_and_nothing_stays_pinned(
    turns: list[tuple[str, str, str, int, int, int, float, bool]], capacity: int
) -> None:
    lab = Lab(capacity=capacity)
    caches = [worker.engine.cache for worker in lab.fleet.workers]

    def send(prefill: str, decode: str, source: str, chat: int, length: int, fetched: int, splits: bool) -> None:
        prompt = tuple(Span(100 * chat + place, 200 + place) for place in range(length))
        output = Span(100 * chat + length, 50)
        leg = lab.leg(prompt, source, fetched, output)
        if splits and prefill != decode:
            to = lab.workers[decode]

            def handed_over(handoff: FinishedPrefill) -> None:
                lab.fleet.decode(to, leg, handoff)

            lab.fleet.prefill(lab.workers[prefill], leg, to, handed_over)
        else:
            lab.fleet.ask(lab.workers[decode], leg)

    for prefill, decode, source, chat, length, fetched, at_s, splits in turns:
        lab.timeline.at(at_s, send, prefill, decode, source, chat, length, fetched, splits)

    def is_wrong() -> bool:
        return any(not 0 <= cache.used_tokens <= cache.used_tokens + cache.kept_tokens <= capacity for cache in caches)

    lab.timeline.run(until=is_wrong)
    assert not is_wrong()
    assert lab.ended == len(lab.first_s) == len(turns)
    assert lab.in_use == 0
