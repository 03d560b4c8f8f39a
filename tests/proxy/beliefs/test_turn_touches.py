"""A turn whose first worker fetched KV from another one's cache: what the books of both say after it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from ppd.proxy.beliefs.beliefs import Beliefs
from ppd.proxy.beliefs.held import PromptEntry, Residency
from ppd.proxy.beliefs.turn_touches import NO_TOUCHES, TurnCaches, TurnTouches
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Load
from tests.support.decisions import D1, D2, P1

CAPACITY = 3000


class Known:
    """D2 holds session 7, and session 8, which is newer there."""

    def __init__(self) -> None:
        load = Load(kv_capacity_tokens=CAPACITY)
        self.views = {view.id: replace(view, load=load) for view in (P1, D1, D2)}
        self.beliefs = Beliefs(self.views.get)
        self.ended(7, 1000, D2)
        self.ended(8, 1000, D2)

    def ended(self, session: int, tokens: int, on: WorkerView) -> None:
        self.beliefs.ended(session, [Residency(on.id, "i", tokens)], ())

    def held(self, session: int) -> Mapping[str, int]:
        found = self.beliefs.held(self.views, PromptEntry(session, session), 1 << 20)
        return {self.views[worker].name: held.tokens for worker, held in found.items()}

    def fetching(self, decode: WorkerView, prefill: WorkerView | None = None) -> TurnTouches:
        entry = PromptEntry(7, 7)
        caches = TurnCaches(decode.id, None if prefill is None else prefill.id, D2.id, reach_tokens=1000)
        made = TurnTouches(self.beliefs, entry, self.beliefs.held(self.views, entry, 1000), 1100, caches)
        made.sent()
        return made

    def evict_on_d2(self) -> None:
        self.ended(9, 1500, D2)


def test_both_hold_it_and_what_was_read_is_the_newest_there() -> None:
    known = Known()
    touches = known.fetching(D1)
    touches.answering()
    touches.answered(992)
    touches.close()
    assert known.held(7) == {"D1": 1100, "D2": 1000}
    known.evict_on_d2()
    assert known.held(7) == {"D1": 1100, "D2": 1000}
    assert known.held(8) == {"D2": 500}


def test_what_was_not_there_to_be_read_is_not_believed_for_long() -> None:
    known = Known()
    for _ in range(2):
        touches = known.fetching(D1)
        touches.answering()
        touches.answered(0)
        touches.close()
    assert known.held(7) == {"D1": 1100}, "it is the source that holds less than it seemed to"
    assert set(known.beliefs.capacities().values()) == {CAPACITY}


def test_a_turn_that_failed_has_read_nothing() -> None:
    known = Known()
    known.fetching(D1).close()
    assert known.held(7) == {"D2": 1000}
    assert known.beliefs.legs() == []


@pytest.mark.parametrize("cached", [992, None, 0])
def test_p_reads_back_what_the_d_that_will_answer_holds(cached: int | None) -> None:
    known = Known()
    touches = known.fetching(D2, P1)
    touches.prefilled(cached)
    touches.answering()
    touches.answered(None)
    touches.close()
    assert known.held(7) == {"P1": 1100, "D2": 1100}
    assert known.beliefs.legs() == []


def test_a_worker_that_fetches_from_itself_or_from_one_that_holds_nothing_only_computes() -> None:
    known = Known()
    known.ended(7, 1000, D1)
    for decode in (D2, D1):
        touches = known.fetching(decode)
        touches.answering()
        touches.answered(992)
    assert known.held(7) == {"D1": 1100, "D2": 1100}
    assert known.beliefs.legs() == []


def test_what_an_answer_says_counts_although_it_is_told_long_after_its_beginning() -> None:
    known = Known()
    touches = known.fetching(D1)
    touches.answering()
    late = touches.settled()
    late.answered(992)
    late.close()
    assert known.held(7) == {"D1": 1100, "D2": 1000}


@pytest.mark.parametrize("cached", [992, 100, None])
def test_an_answer_that_begins_long_before_its_end_teaches_the_same(cached: int | None) -> None:
    learnt = []
    for is_late in (False, True):
        known, entry = Known(), PromptEntry(7, 7)
        held = known.beliefs.held(known.views, entry, 1000)
        touches = TurnTouches(known.beliefs, entry, held, 1100, TurnCaches(D2.id))
        touches.sent()
        touches.answering()
        end = touches.settled() if is_late else touches
        assert (end is touches) is not is_late
        end.answered(cached)
        end.close()
        learnt.append((known.held(7), known.held(8), known.beliefs.capacities()))
    assert learnt[0] == learnt[1]


@pytest.mark.parametrize("prefill", [None, P1], ids=["first turn", "handoff"])
def test_an_answer_that_can_say_nothing_of_caches_keeps_nothing_for_that(prefill: WorkerView | None) -> None:
    known = Known()
    caches = TurnCaches(D1.id, None if prefill is None else prefill.id)
    touches = TurnTouches(known.beliefs, PromptEntry(9, 9), {}, 100, caches)
    touches.sent()
    if prefill is not None:
        touches.prefilled(0)
    touches.answering()
    assert touches.settled() is NO_TOUCHES
    assert known.held(9)["D1"] == 100


@pytest.mark.parametrize("answers_first", [False, True])
def test_a_d_is_awaited_from_the_end_of_p_on_unless_it_answers_already(answers_first: bool) -> None:
    known = Known()
    touches = TurnTouches(known.beliefs, PromptEntry(9, 9), {}, 100, TurnCaches(D1.id, P1.id))
    touches.sent()
    if answers_first:
        touches.answering()
    assert [leg.worker for leg in known.beliefs.legs()] == [P1.id]
    touches.prefilled(0)
    assert [leg.worker for leg in known.beliefs.legs()] == [D1.id][answers_first:]
    touches.close()
    assert known.held(9) == {"P1": 100} | ({"D1": 100} if answers_first else {})
    assert known.beliefs.legs() == []


def test_a_branch_reads_what_the_history_that_it_leaves_has_there() -> None:
    known, entry = Known(), PromptEntry(10, 7, shared=1000)
    held = known.beliefs.held(known.views, entry, 1000)
    touches = TurnTouches(known.beliefs, entry, held, 1100, TurnCaches(D1.id, None, D2.id, reach_tokens=1000))
    touches.sent()
    touches.answering()
    touches.answered(992)
    touches.close()
    known.evict_on_d2()
    assert (known.held(7), known.held(8), known.held(10)) == ({"D2": 1000}, {"D2": 500}, {"D1": 1100})
