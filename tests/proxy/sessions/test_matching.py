"""What a request shares with a session, where it is not simply the next turn of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint, ReadingRules, parse_request
from ppd.proxy.sessions.kept_units import KEPT
from ppd.proxy.sessions.prefix_chain import Chain, PrefixEnd
from ppd.proxy.sessions.session import Prompt
from ppd.proxy.sessions.table import MatchKind, SessionMatch, SessionTable, TurnOutcome
from tests.support.attempts import D1, D2, bytes_of, find, request, turn
from tests.support.requests import HASHER, assistant, parse, parse_bytes, user

BRANCH, FIRST, LOST, NEXT, RETRY = MatchKind.BRANCH, MatchKind.FIRST, MatchKind.LOST, MatchKind.NEXT, MatchKind.RETRY
SYSTEM = {"role": "system", "content": "s" * 2000}
TASK = user("t" * 2000)
REMINDER = "\nRemember the rules. " * 20
DOCUMENT = "".join(f"line {number:5} of a document\n" for number in range(2000))  # 54,000 bytes

Message = dict[str, Any]


@pytest.fixture
def table() -> SessionTable:
    return SessionTable(ttl_s=3600.0, capacity=1000)


def alternating(turns: int) -> list[Message]:
    """The history after so many turns, as all replies are the same."""
    return [SYSTEM, TASK] + [one for n in range(turns) for one in (assistant("r" * 200), user(f"question {n}"))]


# -- the newest message is replaced


@pytest.mark.parametrize("extra", [REMINDER, DOCUMENT])
def test_what_only_the_newest_message_holds_costs_no_more_than_itself(table: SessionTable, extra: str) -> None:
    """A reminder at its end (aider), or retrieved text (Open WebUI)."""
    matches, history = [], [SYSTEM, TASK, assistant("ok")]
    for number in range(6):
        sent = [*history, user(f"question {number}. {extra}")]
        matches.append(turn(table, *sent))
        claimed, common = matches[-1].held_tokens, bytes_of(*history[:-2]) // 2
        if number:
            assert common <= claimed <= bytes_of(*sent) // 2
            assert matches[-1].new_bytes == bytes_of(*sent) - bytes_of(*history[:-2])
        history += [user(f"question {number}. "), assistant("r" * 200)]
    assert [match.kind for match in matches] == [FIRST] + [NEXT] * 5
    assert [match.turn for match in matches] == [1, 2, 3, 4, 5, 6]
    assert len({match.session_id for match in matches}) == len(table) == 1
    assert matches[-1].decode == D1


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("question. " + REMINDER, "question. "),
        ("q" * 3000 + REMINDER, "q" * 3000),
        ("<context>a page</context> question", "question"),
    ],
)
@pytest.mark.parametrize("members", [{}, {"tools": [{"name": "f"}]}])
def test_the_first_message_is_replaced_by_a_shorter_one(
    table: SessionTable, first: str, then: str, members: dict[str, Any]
) -> None:
    one = turn(table, SYSTEM, user(first), **members)
    history = [SYSTEM, user(then), assistant("r" * 200)]
    match = turn(table, *history, user("and" + REMINDER), **members)
    assert (match.kind, match.turn, match.session_id, match.decode) == (NEXT, 2, one.session_id, D1)
    start = len(SYSTEM["content"]) + len(members) * 20
    shared = start + (len(then) if first.startswith(then) else 0)
    assert shared - 512 <= match.held_tokens * 2 <= shared + 3 * 16
    history += [user("and"), assistant("r" * 200), user("more" + REMINDER)]
    assert find(table, *history, **members).session_id == one.session_id
    assert len(table) == 1


@pytest.mark.parametrize(
    ("reply", "history", "members"),
    [
        ("r" * 63, [SYSTEM, user("b"), assistant("r" * 63)], {}),  # many sessions have so short a reply
        ("r" * 99, [user("b"), assistant("r" * 99)], {}),  # nothing is in common
        ("r" * 99, [SYSTEM, user("b"), assistant("r" * 98 + "x")], {}),
        ("r" * 99, [{"role": "system", "content": "s" * 1999}, user("b"), assistant("r" * 99)], {}),
        ("r" * 99, [SYSTEM, user("b"), assistant("r" * 99)], {"cache_salt": "other"}),
        ("r" * 99, [SYSTEM, user("b"), assistant("r" * 99)], {"model": "other"}),
    ],
)
def test_a_first_reply_tells_nothing_where_it_is_short_or_the_head_is_another(
    table: SessionTable, reply: str, history: list[Message], members: dict[str, Any]
) -> None:
    turn(table, SYSTEM, user("a"), reply=reply)
    match = find(table, *history, user("on"), **members)
    assert (match.kind, match.held_tokens) == (FIRST, 0)


def test_a_first_reply_is_of_its_tenant(table: SessionTable) -> None:
    asked = [SYSTEM, user("b"), assistant("r" * 200), user("on")]
    turn(table, SYSTEM, user("a"))
    body = json.dumps({"model": "m", "messages": asked}).encode()
    for tenant, kind in (("t", NEXT), ("other", FIRST)):
        known = parse_bytes(body, tenant=tenant)
        assert table.find(known.prompt, 0.0).kind is kind


def test_two_sessions_with_one_reply_claim_no_more_than_their_head(table: SessionTable) -> None:
    for name in ("a", "b"):
        turn(table, SYSTEM, user(name * 3000))
    match = find(table, SYSTEM, user("c"), assistant("r" * 200), user("on"))
    assert match.held_tokens * 2 <= len(SYSTEM["content"]) + 2 * 16
    own = find(table, SYSTEM, user("a" * 3000), assistant("r" * 200), user("on"))
    assert own.held_tokens * 2 == bytes_of(SYSTEM, user("a" * 3000), assistant("r" * 200))


def test_a_reminder_in_a_message_of_its_own(table: SessionTable) -> None:
    history, matches = [SYSTEM, TASK], []
    for number in range(4):
        matches.append(turn(table, *history, user(REMINDER)))
        history += [assistant(f"call {number}"), user("result " * 300)]
    assert [(match.kind, match.turn) for match in matches] == [(FIRST, 1), (NEXT, 2), (NEXT, 3), (NEXT, 4)]
    assert matches[-1].held_tokens == bytes_of(*history[:-4]) // 2


def test_a_long_message_with_another_end_is_held_up_to_its_last_cut(table: SessionTable) -> None:
    turn(table, *alternating(1), user(DOCUMENT + "What is this?"))
    history = [*alternating(1), user(DOCUMENT + "Why?"), assistant("r" * 200), user("and")]
    match = find(table, *history)
    whole = bytes_of(*alternating(1), user(DOCUMENT))
    assert (match.kind, match.turn) == (NEXT, 2)
    assert whole * 0.89 <= match.held_tokens * 2 <= whole


@pytest.mark.parametrize(
    ("then", "kind", "turn_", "is_same"),
    [
        (["something else"], BRANCH, 3, False),  # an edit of the newest message, or another user
        (["question 1"], RETRY, 3, True),
        (["something else", "a", "on"], NEXT, 4, True),
        (["question 1", "a", "on"], NEXT, 4, True),  # with another reply
        (["question 1", "r" * 200, "on"], NEXT, 4, True),
    ],
)
def test_what_follows_the_common_part_says_which_turn_it_is(
    table: SessionTable, then: list[str], kind: MatchKind, turn_: int, is_same: bool
) -> None:
    for number in range(3):
        first = turn(table, *alternating(number))
    added = [user(text) if number % 2 == 0 else assistant(text) for number, text in enumerate(then)]
    match = find(table, *alternating(1), assistant("r" * 200), *added)
    assert (match.kind, match.turn, match.session_id == first.session_id) == (kind, turn_, is_same)
    assert match.source == first.history
    assert match.decode == D1


def test_an_older_turn_that_was_edited_is_left_however_far_the_conversation_has_gone_on(table: SessionTable) -> None:
    for number in range(3):
        first = turn(table, *alternating(number))
    since = (user("other"), assistant("a"), user("b"), assistant("c"), user("d"))
    match = find(table, *alternating(0), assistant("r" * 200), *since)
    assert (match.kind, match.turn, match.source) == (BRANCH, 2, first.history)


def test_of_two_users_who_differ_from_their_second_turn_on_each_keeps_a_session(table: SessionTable) -> None:
    histories = {name: [SYSTEM, TASK] for name in ("ann", "bob")}
    sessions = dict[str, str]()
    for number in range(4):
        for (name, history), held_by in zip(histories.items(), (D1, D2), strict=True):
            match = turn(table, *history, decode=held_by)
            if number > 1:
                assert (match.kind, match.turn, match.decode) == (NEXT, number + 1, held_by)
                assert match.session_id == sessions[name]
            sessions[name] = match.session_id
            history += [assistant("r" * 200), user(f"{name} asks {number}")]
    assert len(table) == 2


# -- a history is cut, compacted, or begins like another's


@pytest.mark.parametrize("kept", range(2, 12))
def test_a_history_that_was_compacted_keeps_what_is_common(table: SessionTable, kept: int) -> None:
    for number in range(6):
        first = turn(table, *alternating(number))
    whole = [*alternating(5), assistant("r" * 200)]
    match = find(table, *whole[:kept], user("a summary of the rest"), assistant("good"))
    assert match.kind is BRANCH
    assert match.held_tokens == bytes_of(*whole[:kept]) // 2
    assert (match.source, match.session_id != first.session_id) == (first.history, True)
    assert match.turn == (kept + 2) // 2


def test_a_document_in_first_messages_is_shared_as_far_as_its_last_cut(table: SessionTable) -> None:
    first = turn(table, SYSTEM, user(DOCUMENT + "What is this?"))
    second = turn(table, SYSTEM, user(DOCUMENT + "Who wrote it?"), decode=D2)
    common = bytes_of(SYSTEM, user(DOCUMENT)) // 2
    assert (first.kind, second.kind, second.turn, second.source) == (FIRST, BRANCH, 1, first.history)
    assert common * 0.88 <= second.held_tokens <= common
    assert second.session_id != first.session_id
    assert second.decode is None  # the policy weighs all workers that hold it
    third = find(table, SYSTEM, user(DOCUMENT + "Who wrote it?"), assistant("r" * 200), user("and when?"))
    assert (third.kind, third.turn, third.decode) == (NEXT, 2, D2)


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": [SYSTEM, user("u" * 2000)]},  # only the head is common
        {"prompt": [user(REMINDER), TASK]},
        {"prompt": [SYSTEM, TASK], "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"prompt": [SYSTEM, TASK], "cache_salt": "other"},
        {"prompt": [SYSTEM, TASK], "model": "n"},
    ],
)
def test_what_shares_no_more_than_the_head_is_first(table: SessionTable, other: dict[str, Any]) -> None:
    turn(table, SYSTEM, TASK)
    match = table.find(parse(**other).prompt, 0.0)
    assert (match.kind, match.turn, match.held_tokens, match.source) == (FIRST, 1, 0, None)


def test_a_short_opener_is_no_reason_for_a_worker(table: SessionTable) -> None:
    turn(table, user("hi"))
    turn(table, user("hi"), assistant("r" * 200), user("go on"))
    assert find(table, user("hi")).kind is FIRST
    turn(table, TASK)
    turn(table, TASK, assistant("r" * 200), user("go on"))
    again = find(table, TASK)
    assert (again.kind, again.turn, again.held_tokens) == (BRANCH, 1, bytes_of(TASK) // 2)


def test_another_tenant_finds_nothing(table: SessionTable) -> None:
    turn(table, SYSTEM, user(DOCUMENT))
    body = json.dumps({"model": "m", "messages": [SYSTEM, user(DOCUMENT + "!")]}).encode()
    asked = parse_request(Endpoint.CHAT, body, {}, ReadingRules(hasher=HASHER, tenant="u"))
    assert table.find(asked.prompt, 0.0).kind is FIRST


# -- counts


def test_tokens_between_two_counts_go_by_bytes(table: SessionTable) -> None:
    turn(table, SYSTEM, TASK, assistant("a" * 500), user("b" * 1500))
    edited = find(table, SYSTEM, TASK, assistant("a" * 500), user("another"))
    assert (edited.kind, edited.held_tokens) == (BRANCH, bytes_of(SYSTEM, TASK, assistant("a" * 500)) // 2)


def test_a_history_that_is_rendered_shorter_than_before_is_counted_anew(table: SessionTable) -> None:
    """A template left out of it what earlier prompts held."""
    turn(table, *alternating(0))
    asked = request(*alternating(1))
    match = table.find(asked.prompt, 0.0)
    shorter = match.held_tokens - 100
    table.finish(match, asked.prompt, TurnOutcome(prompt_tokens=shorter, completion_tokens=10), 0.0)
    for kept in (2, 3):
        edited = find(table, *alternating(1)[:kept], user("another"))
        assert edited.held_tokens < shorter
    again = find(table, *alternating(1))
    assert (again.kind, again.held_tokens) == (RETRY, shorter)


@pytest.mark.parametrize("counted", [0, 1, 7])
def test_a_worker_that_counts_hardly_any_tokens_changes_no_turn(table: SessionTable, counted: int) -> None:
    for number in range(3):
        asked = request(*alternating(number))
        match = table.find(asked.prompt, 0.0)
        assert (match.turn, match.kind) == (number + 1, NEXT if number else FIRST)
        key = ReplyKey(asked)
        key.add_text("r" * 200)
        outcome = TurnOutcome(prompt_tokens=counted, completion_tokens=0, reply_key=key.key())
        table.finish(match, asked.prompt, outcome, 0.0)
        assert find(table, *alternating(number)).kind is RETRY


# -- long histories


def numbered(units: int, kept: int | None = None) -> Prompt:
    """A prompt of so many units; all that come after the first `kept` are others."""
    keys = [(number + 1) * 0x9E3779B97F4A7C15 % (1 << 60) for number in range(units)]
    keys = [key if kept is None or number < kept else key ^ 1 for number, key in enumerate(keys)]
    return Prompt(chain=Chain(tuple(keys), tuple(range(20, 20 * units + 20, 20)), HASHER))


def ended(table: SessionTable, asked: Prompt, next_unit: int) -> SessionMatch:
    match = table.find(asked, 0.0)
    units = len(asked.chain.keys)
    reply = PrefixEnd(numbered(next_unit).chain.keys[-1])
    table.finish(
        match, asked, TurnOutcome(prompt_tokens=10 * units, completion_tokens=10, reply_key=reply, decode=D1), 0.0
    )
    return match


@pytest.mark.parametrize("grows", [False, True])
def test_of_a_long_history_as_much_is_known_as_an_eighth_allows(table: SessionTable, grows: bool) -> None:
    units = 1999 if grows else 20_000
    for number, size in enumerate(range(9, units + 1, 10) if grows else [units], start=1):
        match = ended(table, numbered(size), size + 1)
        assert match.turn == number
    (session,) = table.all()
    assert session.units.count <= KEPT + 1
    assert len(session.packed) < 4096
    for kept in (30, 101, 501, 901, 1500, units - 200, units - 100, units - 1):
        match = table.find(numbered(kept + 1, kept), 0.0)
        assert match.kind is BRANCH
        assert kept * 0.87 <= match.held_tokens / 10 <= kept
        assert match.source == session.history
