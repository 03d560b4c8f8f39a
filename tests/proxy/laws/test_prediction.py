"""What a turn will take on a worker, and what it takes from those that decode there."""

from __future__ import annotations

from dataclasses import replace as replace_costs
from functools import partial

import pytest
from msgspec.structs import replace

from ppd.offline.simulation.timeline import Timeline
from ppd.offline.simulation.workers.engine import Engine, SimulatedSequence
from ppd.offline.simulation.workers.kv_cache import KvCache, Span
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.ledger import LegEstimates
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.laws.prediction import EngineLaws, Outlook, Prediction, TurnSize, on_one, on_two, work_on
from ppd.proxy.laws.step_time import EngineProfile, step_time_s
from ppd.proxy.policy import Decision, Route
from tests.support.decisions import D1, FIRST, P1

COSTS = EngineProfile(attention_pair_s=0.0)
SHORT = TurnSize(150, 50, 125)
NOW_S = 100.0


def outlook(
    view: WorkerView = D1, size: TurnSize = SHORT, now_s: float = NOW_S, costs: EngineProfile = COSTS
) -> Outlook:
    return Outlook.of(view, EngineLaws(costs=costs), size, now_s)


@pytest.mark.parametrize(("new_tokens", "steps"), [(1, 1), (25, 1), (8192, 1), (8193, 2), (20_000, 3)])
def test_the_steps_of_a_prompt_belong_to_those_that_decode_too(new_tokens: int, steps: int) -> None:
    size = TurnSize(new_tokens + 100, 50, 100)
    predicted = on_one(outlook(size=size), work_on(outlook(size=size), size, 100))
    assert predicted.prefill_s == pytest.approx(steps * COSTS.step_s + new_tokens * COSTS.prefill_token_s)
    assert predicted.beside_s == pytest.approx(new_tokens * COSTS.prefill_token_s)


def test_many_short_prompts_hardly_slow_those_that_decode() -> None:
    """90 turns a second that add 25 tokens each take 3 % of the time, though each is computed in a step of 8 ms."""
    registry = Registry()
    registry.add_static(D1.worker, 0.0)
    now_s = 0.0
    idle_s = outlook(registry.views()[0], now_s=now_s).tpot_s
    for number in range(9000):
        now_s = number / 90
        work = on_one(outlook(registry.views()[0], now_s=now_s), work_on(outlook(now_s=now_s), SHORT, 125))
        estimates = LegEstimates(
            prompt_tokens=150, new_tokens=25, output_tokens=50, prefill_s=work.prefill_s, beside_s=work.beside_s
        )
        booking = LegBooking(registry, D1.id, None, estimates)
        booking.reserve(now_s)
        booking.release(now_s)
    assert outlook(registry.views()[0], now_s=now_s).tpot_s == pytest.approx(1.033 * idle_s, rel=0.01)


@pytest.mark.parametrize(
    ("prompts", "new_tokens", "steps"), [(1, 20, 1), (5, 20, 1), (2, 8192, 2), (3, 3000, 2), (2, 9000, 3)]
)
def test_prompts_that_queue_share_the_steps_that_they_fit_in(prompts: int, new_tokens: int, steps: int) -> None:
    registry, size = Registry(), TurnSize(new_tokens, 50)
    registry.add_static(D1.worker, 0.0)
    work = work_on(outlook(size=size), size, 0)
    for _ in range(prompts):
        estimates = LegEstimates(prompt_tokens=new_tokens, new_tokens=new_tokens, prefill_s=work.prefill_s)
        LegBooking(registry, D1.id, None, estimates).reserve(NOW_S)
    waited_s = outlook(registry.views()[0], size).wait_s
    sequences_s = step_time_s(COSTS, prompts, prompts * new_tokens, 0, 0) - COSTS.step_s  # which decode meanwhile
    computed_s = steps * COSTS.step_s + prompts * new_tokens * COSTS.prefill_token_s
    assert waited_s == pytest.approx(computed_s + steps * sequences_s)


def engine_s(costs: EngineProfile, others: list[int], new_tokens: int) -> float:
    """From coming to an engine that has begun with the other prompts until the first token: the mean of ten moments."""
    moments = [0.05 + moment * 0.0123 for moment in range(10)]
    return sum(first_token_s(costs, others, new_tokens, at_s) - at_s for at_s in moments) / len(moments)


def first_token_s(costs: EngineProfile, others: list[int], new_tokens: int, at_s: float) -> float:
    timeline, times = Timeline(), dict[int, float]()
    engine = Engine(timeline, costs, KvCache(1_000_000, 16), max_num_seqs=16)
    for number, tokens in enumerate([new_tokens, *others]):
        note = partial(lambda number: times.update({number: timeline.now_s}), number)
        job = SimulatedSequence((Span(number, tokens),), (Span(100 + number, 1),), 1, note, lambda: None)
        timeline.at(0.0 if number else at_s, engine.add, job)
    timeline.run(until=lambda: False)
    return times[0]


@pytest.mark.parametrize("cap", [0, 1024, 2048, 8192])
@pytest.mark.parametrize("others", [[40_000], [30_000, 30_000], [4000, 8000, 12_000, 16_000, 20_000]])
@pytest.mark.parametrize("new_tokens", [20, 3000, 30_000])
def test_prompts_beside_others_take_what_an_engine_takes(cap: int, others: list[int], new_tokens: int) -> None:
    """One that caps what a prompt may have of a step computes several side by side."""
    costs = replace_costs(COSTS, request_s=0.0, request_token_s=0.0, long_prefill_tokens=cap)
    registry, size, began_s = Registry(), TurnSize(new_tokens, 50), NOW_S - 0.1
    registry.add_static(D1.worker, 0.0)
    for tokens in others:
        alone = work_on(outlook(size=TurnSize(tokens, 50), costs=costs), TurnSize(tokens, 50), 0)
        estimates = LegEstimates(prompt_tokens=tokens, new_tokens=tokens, prefill_s=alone.prefill_s)
        LegBooking(registry, D1.id, None, estimates).reserve(began_s)
    (view,) = registry.views()
    at = outlook(replace(view, decoding=0, context_tokens=0), size, costs=costs)
    assert work_on(at, size, 0).done_s == pytest.approx(engine_s(costs, others, new_tokens), rel=0.25, abs=0.03)


def test_a_handoff_keeps_links_from_others_while_its_kv_moves_and_not_while_it_is_set_up() -> None:
    """So of many short prompts none waits for the transfers of the others."""
    registry, size, laws = Registry(), TurnSize(100, 50), EngineLaws(costs=COSTS)
    for view in (P1, D1):
        registry.add_static(view.worker, 0.0)

    def split() -> Prediction:
        prefill, decode = (Outlook.of(view, laws, size, NOW_S) for view in registry.views())
        return on_two(prefill, work_on(prefill, size, 0), decode, 100)

    alone = split()
    moved_s = 100 * COSTS.kv_bytes_per_token / COSTS.transfer_bytes_per_s
    assert (alone.transfer_s, alone.link_s) == pytest.approx((COSTS.transfer_s + moved_s, moved_s))
    for _ in range(50):
        made = Decision(route=Route.SPLIT, reason="", decode=D1, prefill=P1, wanted=Route.SPLIT, prediction=alone)
        turn = replace(FIRST, prompt_tokens=100)
        booking = LegBooking(registry, D1.id, P1.id, made.estimates(turn))
        booking.reserve(NOW_S)
        booking.free_prefill(NOW_S)
    assert split().ttft_s == pytest.approx(alone.ttft_s, abs=0.06), "50 transfers of 30 ms are set up at once"


@pytest.mark.parametrize(("sends_s", "receives_s"), [(0.0, 0.0), (5.0, 9.0), (9.0, 5.0), (-7.0, -8.0)])
def test_a_handoff_waits_until_both_links_are_free(sends_s: float, receives_s: float) -> None:
    prefill = outlook(replace(P1, sends_free_s=NOW_S + sends_s))
    decode = outlook(replace(D1, receives_free_s=NOW_S + receives_s))
    waits_s = on_two(prefill, work_on(prefill, SHORT, 0), decode, 150).ttft_s
    at_once_s = on_two(outlook(P1), work_on(outlook(P1), SHORT, 0), outlook(D1), 150).ttft_s
    free_s = max(sends_s, receives_s)
    assert free_s <= 0.0 or free_s < waits_s < free_s + at_once_s
    assert free_s > 0.0 or waits_s == at_once_s


@pytest.mark.parametrize(
    "queue",
    [
        {
            "unseen_prefill_until_s": NOW_S + 0.5
        },  # answers that come as a whole: when their prompts are computed is not seen
        {"prefills": 11, "queued_prefill_s": 0.02, "prefills_since_s": NOW_S},  # of ten nothing was predicted
    ],
)
def test_prompts_whose_times_are_not_known_leave_a_wait_that_can_be(queue: dict[str, float]) -> None:
    size = TurnSize(2200, 50)
    waits = [outlook(replace(D1, queued_prefill_tokens=tokens, **queue), size).wait_s for tokens in (0, 220, 20_000)]
    assert min(waits) >= 0.0
    if "prefills" not in queue:
        assert waits == pytest.approx([0.5] * 3)


def test_what_is_fetched_keeps_links_from_others_while_it_moves_and_apart_from_the_handoff() -> None:
    """By the costs of the engine that sends it."""
    slow = EngineLaws(costs=replace_costs(COSTS, transfer_bytes_per_s=COSTS.transfer_bytes_per_s / 10))
    size, source = TurnSize(1000, 50), Outlook.of(D1, slow, TurnSize(1000, 50), NOW_S)
    at, decode = outlook(P1, size), outlook(size=size)
    fetching, moved_s = work_on(at, size, 100, source, 400), COSTS.kv_bytes_per_token / COSTS.transfer_bytes_per_s
    alone, split = on_one(at, fetching), on_two(at, fetching, decode, 700)
    assert (alone.link_s, alone.fetch_link_s) == pytest.approx((0.0, 4000 * moved_s))
    assert (split.link_s, split.fetch_link_s) == pytest.approx((700 * moved_s, 4000 * moved_s))
    made = Decision(route=Route.SPLIT, reason="", decode=D1, prefill=P1, wanted=Route.SPLIT, prediction=split)
    estimates = made.estimates(FIRST)
    assert (estimates.link_s, estimates.fetch_link_s) == (split.link_s, split.fetch_link_s)
