"""Simulated workers that are lost: what fails, what is computed elsewhere, and what is left when they are back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.offline.simulation.workers.fleet import FinishedPrefill
from ppd.offline.simulation.workers.kv_cache import Span
from ppd.proxy.laws.profile_file import Transfers
from ppd.proxy.laws.step_time import EngineProfile
from tests.support.simulation.fleet import HELD, HISTORY, LATER, Lab, after_first_turn

SLOW = EngineProfile(transfer_bytes_per_s=1e8, transfer_s=0.0, prefill_token_s=1e-3)  # 1.3 ms for a token's KV


def lose(lab: Lab, name: str) -> None:
    lab.fleet.lose(lab.workers[name])


def restart(lab: Lab, name: str) -> None:
    lab.fleet.restart(lab.workers[name])


@pytest.mark.parametrize("after_s", [0.01, 0.5, 3.0])  # its request is parsed, its prompt computed, its answer decoded
def test_all_that_a_lost_worker_does_fails_at_once(after_s: float) -> None:
    lab = Lab()
    for number in (1, 2):
        lab.ask("D1", Span(number, 1000), output=Span(10 + number, 900))
    lab.run_for(after_s)
    lose(lab, "D1")
    lose(lab, "D1")  # again changes nothing
    assert lab.failed == [after_s] * 2
    lab.run_for(60.0)
    assert (lab.ended, len(lab.failed)) == (0, 2)


def test_who_asks_a_lost_worker_is_refused_at_once_and_one_that_is_back_is_empty() -> None:
    lab = after_first_turn("D1")
    lose(lab, "D1")
    asked_s = lab.timeline.now_s
    lab.ask("D1", *LATER)
    lab.run_for(1.0)
    assert lab.failed == [asked_s]
    restart(lab, "D1")
    job = lab.ask("D1", *LATER)
    lab.run()
    assert (job.cached_tokens, lab.workers["D1"].incarnation) == (0, 1)
    restart(lab, "D1")  # it is there
    assert (lab.holds("D1"), lab.workers["D1"].incarnation) == (1296, 1)


@pytest.mark.parametrize("transfers", Transfers)
@pytest.mark.parametrize("after_s", [0.0, 0.7])  # before D has asked for the KV, and while it is moved
def test_what_a_lost_p_had_handed_over_is_computed_on_d(transfers: Transfers, after_s: float) -> None:
    lab = Lab(costs=SLOW, transfers=transfers)
    leg, d1 = lab.leg((HISTORY,), ""), lab.workers["D1"]

    def handed_over(handoff: FinishedPrefill) -> None:
        lab.fleet.decode(d1, leg, handoff)
        lab.timeline.after(after_s, lose, lab, "P1")

    lab.fleet.prefill(lab.workers["P1"], leg, d1, handed_over)
    lab.run()
    assert lab.ended == 1
    assert leg.work.computed_tokens == 2000
    assert lab.failed == []
    assert lab.in_use == 0


def test_kv_that_was_pushed_before_is_there_when_p_is_lost() -> None:
    lab = Lab(transfers=Transfers.WHOLE)
    leg, d1 = lab.leg((HISTORY,), ""), lab.workers["D1"]

    def decode(handoff: FinishedPrefill) -> None:
        lab.fleet.decode(d1, leg, handoff)

    def handed_over(handoff: FinishedPrefill) -> None:
        lab.timeline.after(5.0, lose, lab, "P1")
        lab.timeline.after(6.0, decode, handoff)

    lab.fleet.prefill(lab.workers["P1"], leg, d1, handed_over)
    lab.run()
    assert leg.work.computed_tokens == 1001


@pytest.mark.parametrize("back", [False, True])
def test_what_was_to_be_fetched_from_a_lost_worker_is_computed(back: bool) -> None:
    lab = after_first_turn("D1", costs=SLOW)
    under_way = lab.ask("D2", *LATER, source="D1")
    lab.run_for(0.5)
    lost_s = lab.timeline.now_s
    lose(lab, "D1")
    if back:
        restart(lab, "D1")
    late = lab.ask("R1", *LATER, source="D1")
    assert lab.run() < 2.0, "nobody waits for what will not come"
    for job in (under_way, late):
        assert (job.work.fetched_tokens, job.work.computed_tokens) == (0, 1300)
    assert min(lab.first_s[1:]) > lost_s
    assert lab.in_use == 0


def test_a_worker_that_is_lost_while_it_fetches_unpins_at_the_end_of_the_transfer() -> None:
    lab = after_first_turn("D1", costs=SLOW)
    lab.ask("D2", *LATER, source="D1")
    lab.run_for(0.5)
    assert lab.in_use > HELD
    lose(lab, "D2")
    restart(lab, "D2")
    lab.run_for(5.0)
    assert len(lab.failed) == 1
    assert lab.in_use == 0
    assert lab.holds("D2") == 0


def test_a_p_that_is_lost_while_it_computes_fails_the_turn() -> None:
    lab = Lab()
    lab.split("P1", "D1", HISTORY)
    lab.run_for(0.3)
    lose(lab, "P1")
    assert lab.failed == [lab.timeline.now_s]
    lab.run_for(60.0)
    assert (lab.ended, lab.in_use) == (0, 0)


WORKERS = ("P1", "D1", "D2", "R1", "R2")
NAMES = st.sampled_from(WORKERS)
TURNS = st.lists(
    st.tuples(NAMES, NAMES, NAMES, st.integers(1, 4), st.integers(1, 5), st.floats(0.0, 2.0)), min_size=1, max_size=20
)
LOSSES = st.lists(st.tuples(NAMES, st.floats(0.0, 2.5), st.booleans()), min_size=1, max_size=4)


@given(TURNS, LOSSES, st.sampled_from([1500, 100_000]), st.sampled_from(list(Transfers)))
def test_each_turn_ends_or_fails_once_and_nothing_stays_in_use(
    turns: list[tuple[str, str, str, int, int, float]],
    losses: list[tuple[str, float, bool]],
    capacity: int,
    transfers: Transfers,
) -> None:
    lab = Lab(capacity=capacity, costs=SLOW, transfers=transfers)

    def send(prefill: str, decode: str, source: str, chat: int, length: int) -> None:
        prompt = tuple(Span(100 * chat + place, 200 + place) for place in range(length))
        if prefill != decode:
            lab.split(prefill, decode, *prompt, source=source)
        else:
            lab.ask(decode, *prompt, source=source, output=Span(100 * chat + length, 50))

    for prefill, decode, source, chat, length, at_s in turns:
        lab.timeline.at(at_s, send, prefill, decode, source, chat, length)
    for name, at_s, is_back in losses:
        lab.timeline.at(at_s, lose, lab, name)
        if is_back:
            lab.timeline.at(at_s + 0.1, restart, lab, name)
    lab.timeline.run(until=lambda: False)
    assert lab.ended + len(lab.failed) == len(turns)
    assert lab.in_use == 0
    assert all(not one.sending and not one.handoffs for one in lab.fleet.workers)
