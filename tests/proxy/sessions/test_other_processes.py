"""What a table takes over from those of other processes, and what it takes over no more than once."""

from __future__ import annotations

from itertools import count

import pytest
from msgspec.structs import replace

from ppd.proxy.beliefs.beliefs import Beliefs
from ppd.proxy.sessions.prefix_chain import Chain, Marks
from ppd.proxy.sessions.session import Prompt, marks_of_prompt
from ppd.proxy.sessions.table import MatchKind, SessionTable
from tests.proxy.sessions.test_table_limits import check, finish, key_of, prompt, turn
from tests.support.attempts import D1
from tests.support.decisions import view
from tests.support.requests import HASHER


def two(capacity: int = 10) -> tuple[SessionTable, SessionTable]:
    return (
        SessionTable(ttl_s=100.0, capacity=capacity),
        SessionTable(ttl_s=100.0, capacity=capacity, serials=count(1 << 40)),
    )


def adopt_all(table: SessionTable, other: SessionTable, *, newest: int = 0) -> None:
    """As from a snapshot, which may begin with the newest, and then has all."""
    every = other.all()
    for session in [*every[len(every) - newest :], *every]:
        table.adopt(replace(session), *other.lookup_keys(session))
    check(table)


@pytest.mark.parametrize("newest", [0, 1])
def test_a_name_leads_to_the_same_history_in_each_process(newest: int) -> None:
    """To the newest of those that have had it, which has another number."""
    table, other = two()
    turn(other, "a", name="n")
    turn(other, "b", 1.0, "n")
    turn(other, "bxc", 2.0, "n")
    adopt_all(table, other, newest=newest)
    assert table.find(prompt("d", "n"), 3.0).turn == other.find(prompt("d", "n"), 3.0).turn == 4


def test_a_name_leads_to_its_session_as_it_was_told_last() -> None:
    """Also where a turn that did not name it was the last."""
    table, other = two()
    turn(other, "a", name="n")
    turn(other, "b", 1.0, "n")
    adopt_all(table, other)
    turn(other, "bxc", 2.0)
    session = other.all()[-1]
    table.adopt(replace(session), None, ())
    check(table)
    assert table.find(prompt("d", "n"), 3.0).turn == 4


@pytest.mark.parametrize("theirs", ["", "m"])
def test_a_name_goes_with_its_session_which_has_another_one_or_none_elsewhere(theirs: str) -> None:
    """Both processes end the same turn, and only here it has that name."""
    table, other = two()
    turn(table, "a")
    adopt_all(other, table)
    ours, named = prompt("axb", "n"), prompt("axb", theirs)
    here, there = table.find(ours, 1.0), other.find(named, 1.0)
    finish(table, here, ours, "axb", "x", 2.0)
    finish(other, there, named, "axb", "y", 3.0)
    adopt_all(table, other)
    assert (table.find(prompt("d", "n"), 4.0).turn == 3) is (theirs == "")
    for session in table.all():
        table.drop(session.id)
    check(table)
    assert table.find(prompt("d", "n"), 4.0).kind is MatchKind.FIRST


@pytest.mark.parametrize("newest", [0, 1])
def test_what_several_sessions_begin_with_leads_to_the_same_one_in_each_process(newest: int) -> None:
    table, other = two()
    for number, reply in enumerate("xyz"):
        turn(other, "a", float(number), reply=reply)
    turn(other, "axb", 3.0)  # the first goes on, and the last is still the newest that begins so
    adopt_all(table, other, newest=newest)
    assert table.find(prompt("a"), 4.0).history == other.find(prompt("a"), 4.0).history


def test_no_more_sessions_are_kept_than_may_be_however_they_come() -> None:
    table, other = two(capacity=2)
    asked = {letter: prompt(letter) for letter in "abcd"}  # all are under way at once
    places = {letter: table.find(one, 0.0) for letter, one in asked.items()}
    for letter, one in asked.items():
        finish(table, places[letter], one, letter, "x", 0.0)
    assert len(table) == 2
    for letter in "ef":
        turn(other, letter)
        adopt_all(table, other)
    assert len(table) == 2


def test_of_a_session_that_is_forgotten_nothing_is_believed() -> None:
    one = replace(view("D", 1), incarnation=D1.incarnation)
    beliefs = Beliefs({D1.worker: one}.get)
    table = SessionTable(ttl_s=100.0, capacity=1, beliefs=beliefs)
    for letter in "ab":
        turn(table, letter)
        book = beliefs.book(D1.worker)
        assert book is not None and len(book) == 1


def test_a_name_that_a_session_has_is_no_other_ones() -> None:
    table, _ = two()
    turn(table, "a")
    turn(table, "b", name="n")
    place = table.find(prompt("axc", "n"), 0.0)
    assert (place.kind, place.turn) == (MatchKind.BRANCH, 2)


@pytest.mark.parametrize(
    ("marks", "places"),
    [
        (Marks(), [1, 2, 3]),  # the first from 1,024 bytes on
        (Marks(system=1), [1, 2, 3]),
        (Marks(tools=4, system=5), [4, 5, 6]),  # each tool is a unit, and few prompts part within them
        (Marks(tools=5, system=2), [2, 5, 6]),
        (Marks(tools=4), [4, 5, 6]),
        (Marks(tools=6, system=7), [6, 7]),
    ],
)
def test_where_other_sessions_may_part_from_a_prompt(marks: Marks, places: list[int]) -> None:
    ends = tuple(range(600, 600 * 9, 600))
    chain = Chain(tuple(key_of("abcdefgh"[: at + 1]) for at in range(8)), ends, HASHER, marks=marks)
    asked = Prompt(chain=chain)
    assert [chain.keys.index(mark.key) for mark in marks_of_prompt(asked, 1000)] == places
    assert [mark.tokens for mark in marks_of_prompt(asked, 4800)] == [ends[place] for place in places]
    assert marks_of_prompt(replace(asked, previous_response_id="r"), 1000) == []


def test_a_session_keeps_where_others_may_part_from_it() -> None:
    table, _ = two()
    keys = tuple(key_of("abc"[: at + 1]) for at in range(3))
    asked = Prompt(chain=Chain(keys, (600, 1200, 1800), HASHER))
    finish(table, table.find(asked, 0.0), asked, "abc", "x", 0.0)
    (session,) = table.all()
    assert [mark.key for mark in session.marks] == [*keys[1:]]
