"""What each worker is believed to hold of a prompt, by the turns that ended here and elsewhere."""

from __future__ import annotations

from dataclasses import replace as replace_worker
from typing import Any

import pytest
from msgspec.structs import replace

from ppd.proxy.beliefs import beliefs as room
from ppd.proxy.beliefs.beliefs import Beliefs, marks_of
from ppd.proxy.beliefs.held import BeliefEvidence, Found, Held, Mark, PromptEntry, Residency
from ppd.proxy.beliefs.turn_touches import TurnCaches, TurnTouches
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Load, WorkerId
from tests.support.decisions import D1, D2, P1, P2, view

HEAD, USER = Mark(100, 4000), Mark(101, 4500)
D3 = view("D", 3)
OWN, SHARED = BeliefEvidence.OWN_TURNS, BeliefEvidence.SHARED_PREFIX


class Known:
    """Workers, and what is believed of them; sessions are numbers."""

    def __init__(self, *views: WorkerView, capacity: int = 100_000) -> None:
        load = Load(kv_capacity_tokens=capacity)
        self.views = {view.id: replace(view, load=load) for view in views or (P1, D1, D2)}
        self.beliefs = Beliefs(self.views.get)

    def change(self, view: WorkerView, **changes: Any) -> None:
        self.views[view.id] = replace(self.views[view.id], **changes)

    def turn(self, session: int, tokens: int, *on: WorkerView, marks: tuple[Mark, ...] = ()) -> None:
        self.beliefs.ended(session, [Residency(view.id, "i", tokens) for view in on], marks)

    def held(self, entry: PromptEntry, most: int = 10**6, **observed: int) -> dict[str, Held]:
        told = {WorkerId(f"{name}:80"): tokens for name, tokens in observed.items()}
        found = self.beliefs.held(self.views, entry, most, told)
        return {self.views[worker].name: held for worker, held in found.items()}

    def touches(self, entry: PromptEntry, tokens: int, *, prefill: bool = False, most: int = 10**6) -> TurnTouches:
        caches = TurnCaches(D1.id, P1.id if prefill else None)
        made = TurnTouches(self.beliefs, entry, self.beliefs.held(self.views, entry, most), tokens, caches)
        made.sent()
        return made


def test_each_worker_that_a_turn_used_holds_it_and_at_most_what_the_prompt_has_in_common() -> None:
    known = Known()
    known.turn(7, 900, P1, D1)
    known.turn(7, 1200, D2)
    assert known.held(PromptEntry(7, 7), 1100) == {"P1": Held(900, OWN), "D1": Held(900, OWN), "D2": Held(1100, OWN)}
    assert known.held(PromptEntry(8, 7), 500) == {name: Held(500, SHARED) for name in ("P1", "D1", "D2")}, "a branch"
    assert known.held(PromptEntry(9)) == {}


def test_workers_that_restart_or_leave_hold_nothing_and_late_news_of_them_is_no_belief() -> None:
    known = Known()
    known.turn(7, 900, D1, D2)
    last = Residency(D1.id, "i", 900)
    known.change(D1, incarnation="j")
    assert known.beliefs.why_lost(last) == "decode_restarted"
    known.turn(8, 900, D1)  # of before the restart
    assert known.held(PromptEntry(7, 7)).keys() == {"D2"}
    assert known.held(PromptEntry(8, 8)) == {}
    known.beliefs.ended(9, [Residency(D1.id, "j", 50)], ())
    assert known.held(PromptEntry(9, 9)) == {"D1": Held(50, OWN)}
    assert known.held(PromptEntry(7, 7)).keys() == {"D2"}
    del known.views[D2.id]
    known.turn(7, 900, D2)
    assert (known.held(PromptEntry(7, 7)), known.beliefs.why_lost(Residency(D2.id, "i", 900))) == ({}, None)


@pytest.mark.parametrize(
    ("own", "other", "answers", "stands_in"),
    [(D1, D2, False, True), (D1, P1, False, False), (D1, P1, True, True), (P1, D1, False, True), (P1, P2, False, True)],
)
def test_whose_kv_stands_in_for_whose(own: WorkerView, other: WorkerView, answers: bool, stands_in: bool) -> None:
    known = Known(own, other)
    known.turn(7, 900, own, other)
    book = known.beliefs.book(own.id)
    assert book is not None
    assert known.beliefs.is_held_elsewhere(7, book, prefills_answer=answers) is stands_in


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("is_back", [False, True])
def test_what_an_engine_held_that_is_gone_stands_in_for_nothing(is_back: bool, is_known: bool) -> None:
    """is_known: its book is closed, as another one was opened."""
    known = Known(P1, D1, D2, D3)
    known.turn(7, 900, D1, D2)
    book = known.beliefs.book(D1.id)
    assert book is not None and known.beliefs.is_held_elsewhere(7, book, prefills_answer=False)
    if is_back:
        known.change(D2, incarnation="j")
    else:
        del known.views[D2.id]
    if is_known:
        known.turn(8, 50, D3)
        known.beliefs.ended(8, [Residency(D2.id, "j", 50)], ())
    assert not known.beliefs.is_held_elsewhere(7, book, prefills_answer=False)


def test_a_history_that_is_forgotten_is_held_nowhere_where_nothing_else_would_end_it() -> None:
    """As where no engine says its capacity, so that nothing is ever believed to be evicted."""
    known = Known(capacity=0)
    known.turn(7, 900, D1, P1)
    known.turn(8, 900, D1)
    known.beliefs.forget(7, (D1.id, None, P1.id, WorkerId("gone:1")))
    assert (known.held(PromptEntry(7, 7)), known.held(PromptEntry(8, 8))) == ({}, {"D1": Held(900, OWN)})


def test_a_worker_that_keeps_no_prefixes_holds_nothing_whatever_ran_there() -> None:
    known = Known()
    known.change(D1, worker=replace_worker(D1.worker, connector="sglang", coordinates={"prefix_cache": "false"}))
    known.change(D2, worker=replace_worker(D2.worker, connector="sglang", coordinates={"prefix_cache": "true"}))
    for session in (7, 8):  # alike at their beginning
        known.turn(session, 5000, P1, D1, D2, marks=(HEAD, USER))
    assert known.held(PromptEntry(7, 7)).keys() == {"P1", "D2"}
    assert known.held(PromptEntry(9, marks=(HEAD, USER))).keys() == {"P1", "D2"}
    assert known.held(PromptEntry(7, 7), d1=900).keys() == {"P1", "D2"}, "not by an old engine's events either"
    assert known.beliefs.why_lost(Residency(D1.id, "i", 900)) is None, "nothing is lost"


def test_books_of_workers_that_are_gone_do_not_pile_up() -> None:
    known = Known()
    for number in range(5):
        one = view("D", 10 + number)
        known.views[one.id] = one
        known.turn(7, 10, one)
        del known.views[one.id]
    known.turn(7, 10, D2)
    assert len(known.beliefs.capacities()) <= 2


def test_what_engines_say_counts_alone() -> None:
    known = Known()
    known.turn(7, 900, D1, D2)
    told = known.held(PromptEntry(7, 7), d1=0, p1=640, d9=500)
    assert told == {"D2": Held(900, OWN), "P1": Held(640, BeliefEvidence.KV_EVENTS)}


EVENTS = BeliefEvidence.KV_EVENTS


@pytest.mark.parametrize(
    ("found", "held"),
    [
        ({}, {"D1": Held(900, OWN), "P1": Held(640, EVENTS)}),
        ({D1.id: Found(0, is_exact=True)}, {"P1": Held(640, EVENTS)}),
        ({D1.id: Found(0, is_exact=False)}, {"D1": Held(900, OWN), "P1": Held(640, EVENTS)}),
        ({D1.id: Found(800, is_exact=True)}, {"D1": Held(800, EVENTS), "P1": Held(640, EVENTS)}),
        ({D1.id: Found(800, is_exact=False)}, {"D1": Held(900, OWN), "P1": Held(640, EVENTS)}),
        ({P1.id: Found(960, is_exact=False)}, {"D1": Held(900, OWN), "P1": Held(960, EVENTS)}),
        (
            {D2.id: Found(320, is_exact=True)},
            {"D1": Held(900, OWN), "P1": Held(640, EVENTS), "D2": Held(320, EVENTS, is_shared=True)},
        ),
    ],
)
def test_what_engines_say_of_the_prompt_itself_counts_above_all(
    found: dict[WorkerId, Found], held: dict[str, Held]
) -> None:
    known = Known()
    known.turn(7, 900, D1)
    told = known.beliefs.held(known.views, PromptEntry(7, 7), 10**6, {P1.id: 640}, found)
    assert {known.views[worker].name: one for worker, one in told.items()} == held


# -- prefixes across sessions


def test_a_new_session_knows_who_holds_its_beginning() -> None:
    known = Known()
    known.turn(7, 9000, P1, D1, marks=(HEAD, USER))
    assert known.held(PromptEntry(8, marks=(HEAD,))) == {name: Held(4000, SHARED) for name in ("P1", "D1")}
    assert known.held(PromptEntry(8, marks=(HEAD, USER)))["D1"] == Held(4500, SHARED), "the longest of them"
    known.turn(8, 9000, D2, marks=(HEAD,))
    assert known.held(PromptEntry(9, marks=(HEAD,))).keys() >= {"D2"}
    assert known.held(PromptEntry(9, marks=(Mark(999, 4000),))) == {}


def test_heads_that_part_inside_are_held_up_to_there_and_counted_once() -> None:
    known, points = Known(), [Mark(90, 2000), Mark(91, 3000)]
    for session, head in ((7, 100), (8, 200), (9, 300)):
        entry = PromptEntry(session, None, (Mark(head, 4000),), points=[*points, Mark(head + 1, 3500)])
        held = known.held(entry)
        assert held == ({} if session == 7 else {"D1": Held(3000, SHARED)})
        touches = known.touches(entry, 5000)
        touches.answering()
        known.turn(session, 5000, D1, marks=tuple(known.beliefs.lasting([*entry.marks], entry.points, where())))
    book = known.beliefs._books[D1.id]
    assert book.held(91) == 3000
    assert book.tokens == 5000 + 3000 + 2 * (5000 - 3000), "the first did not know that others would share it"


def where() -> Residency:
    return Residency(D1.id, "i", 5000)


def test_sessions_that_share_a_head_take_its_room_once() -> None:
    known = Known(capacity=20_000)
    for session in range(10):
        known.turn(session, 5000, D1, marks=(HEAD,))
    whole = [session for session in range(10) if known.held(PromptEntry(session, session))["D1"].tokens == 5000]
    assert len(whole) >= 9, "10 times 5,000 tokens would be 50,000; without the head they are 14,000"
    for session in range(20, 24):
        known.turn(session, 4000, D1)
    assert known.held(PromptEntry(99, marks=(HEAD,)))["D1"] == Held(4000, SHARED), "used by the newest of them"


def test_a_session_falls_back_to_the_head_that_others_keep_there() -> None:
    known = Known(capacity=10_000)
    known.turn(1, 6000, D1, marks=(HEAD,))
    known.turn(2, 9000, D1, marks=(HEAD,))
    assert known.held(PromptEntry(1, 1, (HEAD,)), 6000)["D1"] == Held(4000, SHARED)


def test_marks_are_bounded_and_the_least_recently_used_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MARKS_KEPT", 16)
    known = Known()
    for number in range(17):
        known.turn(number, 9000, D1, marks=(HEAD, Mark(1000 + number, 500)))
    assert len(known.beliefs._marks) <= 16
    assert known.held(PromptEntry(99, marks=(HEAD,)))
    assert not known.held(PromptEntry(99, marks=(Mark(1000, 500),)))


def test_few_sessions_keep_few_marks() -> None:
    beliefs = Beliefs(lambda _: None, sessions=3)
    for history in range(100):
        beliefs.passed(history, [Mark(history, 500)])
    assert len(beliefs._marks) <= 4 * 3
    assert 99 in beliefs._marks


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((0, 500, 1023), []),
        ((0, 1024, 1100, 5000, 9000), [(1, 102), (2, 110), (3, 500)]),
        ((2000, 10_000), [(0, 200), (1, 1000)]),
    ],
)
def test_the_first_points_with_enough_before_them_are_marks(
    ends: tuple[int, ...], expected: list[tuple[int, int]]
) -> None:
    marks = marks_of(range(len(ends)), ends, 10_000, 1000)
    assert [(mark.key, mark.tokens) for mark in marks] == expected


# -- a turn, step by step


def test_a_split_touches_p_when_it_has_computed_and_d_when_it_answers() -> None:
    known, entry = Known(), PromptEntry(7, 7)
    touches = known.touches(entry, 900, prefill=True)
    assert known.held(entry) == {}
    touches.prefilled(0)
    assert known.held(entry) == {"P1": Held(900, OWN)}
    touches.answering()
    assert known.held(entry) == {"P1": Held(900, OWN), "D1": Held(900, OWN)}
    touches.close()
    assert known.held(entry).keys() == {"P1", "D1"}


def test_a_turn_that_ends_before_its_worker_has_begun_leaves_what_was_there() -> None:
    known, entry = Known(capacity=2000), PromptEntry(7, 7)
    known.turn(7, 800, D1)
    known.turn(8, 800, D1)
    touches = known.touches(entry, 1000)
    for _ in range(2):
        touches.close()
    assert known.held(entry)["D1"] == Held(800, OWN)
    known.turn(9, 400, D1)
    assert known.held(PromptEntry(8, 8))["D1"] == Held(800, OWN), "the room of the turn is free again"


def test_a_turn_that_is_sent_again_takes_nothing_of_its_session_away() -> None:
    known, entry = Known(), PromptEntry(7, 7)
    known.turn(7, 900, D1)
    known.touches(entry, 600).answering()
    assert known.held(entry)["D1"] == Held(900, OWN)


@pytest.mark.parametrize(("cached", "capacity"), [(900, 2000), (880, 2000), (0, 1000), (None, 2000)])
@pytest.mark.parametrize("prefill", [False, True])
def test_answers_correct_the_capacity_that_is_believed(prefill: bool, cached: int | None, capacity: int) -> None:
    known, entry, where = Known(capacity=2000), PromptEntry(7, 7), P1 if prefill else D1
    known.turn(7, 900, where)
    known.turn(8, 1000, where)
    touches = known.touches(entry, 950, prefill=prefill)
    if prefill:
        touches.prefilled(cached)
    touches.answering()
    touches.answered(0 if prefill else cached)  # after a handoff D's own count tells of what it has pulled
    assert known.beliefs.capacities()[where.id] == capacity


def test_a_beginning_of_other_sessions_that_is_gone_says_nothing_of_the_capacity() -> None:
    known = Known(capacity=10_000)
    known.turn(7, 9000, D1, marks=(HEAD,))
    touches = known.touches(PromptEntry(8, None, (HEAD,)), 9000)
    touches.answering()
    touches.answered(0)
    assert known.beliefs.capacities()[D1.id] == 10_000


BRANCH = PromptEntry(8, 7, shared=500)


def test_what_a_branch_begins_with_counts_once() -> None:
    """Else the book takes others for evicted that the engine still holds."""
    known = Known(capacity=1000)
    known.turn(9, 250, D1)
    known.turn(7, 600, D1)
    touches = known.touches(BRANCH, 620)  # 120 tokens are new
    assert known.held(PromptEntry(9, 9)) == {"D1": Held(250, OWN)}
    touches.answering()
    touches.close()
    known.turn(8, 640, D1)
    held = [known.held(PromptEntry(session, session)) for session in (9, 7, 8)]
    assert held == [{"D1": Held(tokens, OWN)} for tokens in (250, 600, 640)]
    known.turn(10, 300, D1)  # evicts what was used longest ago: of session 9, and then what 7 alone had
    held = [known.held(PromptEntry(session, session)) for session in (9, 7, 8, 10)]
    assert held == [{}, {"D1": Held(560, OWN)}, {"D1": Held(640, OWN)}, {"D1": Held(300, OWN)}]


def test_a_branch_that_came_to_nothing_leaves_the_tokens_where_they_were() -> None:
    known = Known(capacity=1000)
    known.turn(7, 600, D1)
    known.touches(BRANCH, 620).close()
    known.turn(9, 500, D1)
    assert known.held(PromptEntry(7, 7)) == {"D1": Held(500, OWN)}
    assert known.held(PromptEntry(8, 8)) == {}


def test_branches_that_came_to_nothing_do_not_add_the_head_that_sessions_share() -> None:
    known = Known(capacity=50_000)
    for session in (9, 7):
        known.turn(session, 6000, D1, marks=(HEAD,))
    book = known.beliefs.book(D1.id)
    assert book is not None
    before, first = book.tokens, known.touches(PromptEntry(8, 7, shared=5000), 6200)
    assert book.tokens - before == 6200 - 1000, "what it has in common with 7 beyond the head"
    for touches in (first, known.touches(PromptEntry(8, 7, shared=5000), 6200)):
        touches.close()
    assert book.tokens == before
    assert not known.beliefs._passed


def test_what_a_branch_took_is_not_given_to_another_engine() -> None:
    known = Known(capacity=50_000)
    known.turn(7, 6000, D1)
    touches = known.touches(PromptEntry(8, 7, shared=5000), 6200)
    known.change(D1, incarnation="j")
    for session in (9, 7):
        known.beliefs.ended(session, [Residency(D1.id, "j", 6000)], (HEAD,))
    book = known.beliefs.book(D1.id)
    assert book is not None
    before = book.tokens
    touches.close()
    assert book.tokens == before - 6200, "what the branch was to take"


def test_a_branch_of_what_is_not_there_takes_nothing() -> None:
    known = Known(capacity=1000)
    known.turn(9, 400, D1)
    known.touches(BRANCH, 620).close()
    assert known.held(PromptEntry(9, 9)) == {"D1": Held(380, OWN)}
