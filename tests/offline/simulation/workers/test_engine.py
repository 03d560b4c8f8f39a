"""One engine in virtual time: several steps in one event must be what single steps are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.offline.simulation.timeline import Timeline
from ppd.offline.simulation.workers.encoder import Embeddings, PlacedItem
from ppd.offline.simulation.workers.engine import Engine, SimulatedSequence
from ppd.offline.simulation.workers.kv_cache import KvCache, Span
from ppd.proxy.laws.step_time import EngineProfile, attention_pairs, step_time_s
from ppd.proxy.media.items import MediaItem, MediaKind
from ppd.servers.sim.core.embeddings import MediaInput, PlacedMedia
from tests.support.stepped_engine import Engine as SteppedEngine

PROFILE = EngineProfile(max_batched_tokens=64, first_sequence_s=1e-4, mean_context_token_s=1e-7)


class Bench:
    """An engine, and the times at which its jobs' tokens came."""

    def __init__(self, *, capacity: int = 100_000, seqs: int = 16, encoder_item_s: float = 0.0, cap: int = 0) -> None:
        self.timeline = Timeline()
        cache = KvCache(capacity, 4)
        profile = replace(PROFILE, long_prefill_tokens=cap)
        self.engine = Engine(self.timeline, profile, cache, max_num_seqs=seqs, encoder_item_s=encoder_item_s)
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.jobs: dict[int, SimulatedSequence] = {}

    def add(
        self,
        name: int,
        prompt: tuple[Span, ...] | int,
        output: int,
        at_s: float = 0.0,
        *,
        keeps_kv: bool = False,
        media: tuple[PlacedItem, ...] = (),
    ) -> SimulatedSequence:
        spans = (Span(100 + name, prompt),) if isinstance(prompt, int) else prompt
        job = self.jobs[name] = SimulatedSequence(
            spans,
            (Span(200 + name, output),),
            output,
            lambda: self.first.update({name: self.timeline.now_s}),
            lambda: self.last.update({name: self.timeline.now_s}),
            keeps_kv=keeps_kv,
            media=media,
        )
        self.timeline.at(at_s, self.engine.add, job)
        return job

    def run(self) -> None:
        self.timeline.run(until=lambda: False)


def decode_s(context: int, sequences: int = 1) -> float:
    return step_time_s(PROFILE, sequences, context, 0, 0)


def test_one_request_takes_its_prefill_and_a_step_for_each_further_token() -> None:
    bench = Bench()
    bench.add(1, 20, 3)
    bench.run()
    prefill_s = step_time_s(PROFILE, 0, 0, 20, attention_pairs(20, 0))
    assert bench.first[1] == pytest.approx(prefill_s)
    assert bench.last[1] == pytest.approx(prefill_s + decode_s(21) + decode_s(22))


def test_who_comes_while_others_decode_waits_for_the_step_under_way_only() -> None:
    bench = Bench()
    bench.add(1, 20, 1000)
    bench.add(2, 10, 1, at_s=1.0)
    bench.run()
    alone = Bench()
    alone.add(1, 20, 1000)
    alone.run()
    prefill_s = step_time_s(PROFILE, 1, 0, 10, attention_pairs(10, 0))
    waited_s = bench.first[2] - 1.0 - prefill_s
    assert 0 <= waited_s - PROFILE.context_token_s * 150 < decode_s(200)
    assert bench.last[1] > alone.last[1]  # it was held up once


def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    bench = Bench()
    bench.add(1, 150, 1)
    bench.run()
    chunks = ((64, 0), (64, 64), (22, 128))
    assert bench.first[1] == pytest.approx(
        sum(step_time_s(PROFILE, 0, 0, tokens, attention_pairs(tokens, before)) for tokens, before in chunks)
    )


def test_a_second_turn_computes_what_the_first_did_not_leave_behind() -> None:
    bench = Bench()
    bench.add(1, 40, 9)
    bench.run()
    later = bench.add(2, (Span(101, 40), Span(201, 9), Span(7, 12)), 1, at_s=bench.timeline.now_s)
    bench.run()
    assert later.cached_tokens == 48  # 40 + 8 written of 9 generated


def test_the_youngest_gives_way_when_memory_is_short_and_all_still_end() -> None:
    bench = Bench(capacity=100)
    bench.add(1, 30, 40)
    bench.add(2, 30, 40)
    bench.run()
    assert bench.jobs[2].preemptions > 0
    assert bench.jobs[2].cached_tokens == 0  # when it came; what it left behind itself is no hit
    assert bench.jobs[1].preemptions == 0
    assert bench.last[1] < bench.last[2]
    assert bench.engine.cache.used_tokens == 0


def test_a_sequence_that_just_fits_runs_beside_its_own_cached_prefix() -> None:
    bench = Bench(capacity=100)
    bench.add(1, 50, 34)
    bench.run()
    bench.add(2, (Span(101, 50), Span(201, 34), Span(7, 15)), 1, at_s=bench.timeline.now_s)
    bench.run()
    assert 2 in bench.last
    assert bench.engine.cache.used_tokens == 0


def test_no_more_sequences_run_than_the_engine_takes() -> None:
    bench = Bench(seqs=1)
    bench.add(1, 10, 5)
    bench.add(2, 10, 5)
    bench.run()
    assert bench.first[2] > bench.last[1]


def test_a_handoff_keeps_its_memory_until_it_is_let_go() -> None:
    bench = Bench()
    job = bench.add(1, 40, 1, keeps_kv=True)
    bench.run()
    assert bench.engine.cache.used_tokens == 40
    bench.engine.let_go(job)
    assert bench.engine.cache.used_tokens == 0
    assert bench.add(2, (Span(101, 40), Span(8, 4)), 1, at_s=bench.timeline.now_s)
    bench.run()
    assert bench.jobs[2].cached_tokens == 40


REQUESTS = st.lists(st.tuples(st.integers(2, 120), st.integers(1, 30), st.floats(0.0, 0.3)), min_size=1, max_size=8)


@given(REQUESTS, st.sampled_from([0, 16, 24, 64]))
def test_the_times_are_those_of_the_scheduler_that_goes_step_by_step(
    requests: list[tuple[int, int, float]], cap: int
) -> None:
    """The simulated engine's scheduler works on tokens and blocks; both share the timing law, and must agree."""
    requests = sorted(requests, key=lambda request: request[2])
    bench = Bench(cap=cap)
    for name, (prompt, output, at_s) in enumerate(requests):
        bench.add(name, prompt, output, at_s)
    bench.run()
    first, last = _stepped(requests, cap=cap)
    assert bench.first == pytest.approx(first)
    assert bench.last == pytest.approx(last)


def _stepped(
    requests: list[tuple[int, int, float]], media: list[int] | None = None, cap: int = 0
) -> tuple[dict[int, float], dict[int, float]]:
    """media: the number of each one's image."""
    budget = PROFILE.max_batched_tokens
    engine = SteppedEngine(blocks=4096, size=4, budget=budget, cap=cap, encoder_item_s=ITEM_S)
    coming = list(enumerate(requests))
    now_s = 0.0
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    while coming or engine.scheduler.sequences:
        if not engine.scheduler.sequences:
            now_s = max(now_s, coming[0][1][2])
        while coming and coming[0][1][2] <= now_s:
            name, (prompt, output, _) = coming.pop(0)
            text = chr(65 + name) * prompt  # no prefix in common
            sequence = engine.add(str(name), text, max_tokens=output)
            if media is not None and (number := media[name]):
                sequence.media = (PlacedMedia(prompt // 2, MediaInput(f"image {number}", ())),)
        step = engine.scheduler.plan()
        now_s += step.duration_s
        for produced in engine.scheduler.complete(step):
            first.setdefault(int(produced.sequence.id), now_s)
            last[int(produced.sequence.id)] = now_s
    return first, last


# -- images

ITEM_S = 0.05
WITH_IMAGES = st.lists(
    st.tuples(st.integers(20, 120), st.integers(1, 30), st.floats(0.0, 0.3), st.integers(0, 3)), min_size=1, max_size=8
)


@given(WITH_IMAGES)
def test_images_take_the_time_that_they_take_in_the_scheduler_that_goes_step_by_step(
    requests: list[tuple[int, int, float, int]],
) -> None:
    """Each has one of three images, or none; whoever has it encoded first spares it the others."""
    requests = sorted(requests, key=lambda request: request[2])
    bench = Bench(encoder_item_s=ITEM_S)
    for name, (prompt, output, at_s, image) in enumerate(requests):
        bench.add(name, prompt, output, at_s, media=images(image, prompt))
    bench.run()
    first, last = _stepped([request[:3] for request in requests], [request[3] for request in requests])
    assert bench.first == pytest.approx(first)
    assert bench.last == pytest.approx(last)


def images(number: int, prompt: int) -> tuple[PlacedItem, ...]:
    """At the same place as `_media`."""
    return (PlacedItem(prompt // 2, MediaItem(MediaKind.IMAGE, f"image {number}", 0, 0, 0)),) if number else ()


def test_an_embedding_that_was_sent_costs_nothing_and_one_that_is_cached_with_its_tokens_neither() -> None:
    bench, alone = Bench(encoder_item_s=ITEM_S), Bench()
    bench.engine.embeddings.add(["image 1"])
    for one in (bench, alone):
        one.add(1, 40, 1, media=images(1, 40))
        one.run()
    assert bench.first == alone.first
    bench = Bench(encoder_item_s=ITEM_S)
    bench.add(1, 40, 1, media=images(1, 40))
    bench.run()
    assert bench.first[1] == pytest.approx(alone.first[1] + ITEM_S)
    bench.engine.embeddings = Embeddings()  # another image has taken its place
    came_s = bench.timeline.now_s
    bench.add(2, (Span(101, 40), Span(7, 8)), 1, came_s, media=images(1, 40))
    bench.run()
    assert bench.first[2] - came_s == pytest.approx(step_time_s(PROFILE, 0, 0, 8, attention_pairs(8, 40)))


def test_what_is_read_meanwhile_costs_no_step_that_has_been() -> None:
    """Of a prompt that was kept, the answers have taken some 40 tokens when another worker reads it, for an instant."""

    def decoding(*, read: bool) -> Bench:
        bench = Bench(capacity=1000)
        bench.add(9, (Span(1, 600),), 1)
        bench.run()
        began_s = bench.timeline.now_s
        for name in range(4):
            bench.add(name, 50, 100, began_s)

        def peek() -> None:
            found = bench.engine.pin((Span(1, 600), Span(2, 1)))
            assert sum(held.tokens for held in found) + 4 * 50 + 4 * 55 <= 1000
            bench.engine.unpin(found)

        if read:
            bench.timeline.at(began_s + 0.6, peek)
        bench.run()
        return bench

    assert decoding(read=True).last == pytest.approx(decoding(read=False).last)
