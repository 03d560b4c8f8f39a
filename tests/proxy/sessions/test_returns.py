"""When a session's next turn is one that was waited for."""

from __future__ import annotations

import pytest

from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.sessions.session import Session
from ppd.proxy.sessions.table import SessionMatch, SessionTable, TurnOutcome
from tests.support.attempts import request

OPENING = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "yo"}
NEXT = (OPENING, REPLY, {"role": "user", "content": "more"})


def table_after(at_s: float, *, calls_tool: bool = False) -> SessionTable:
    """A table with one turn, whose answer ended then."""
    table, asked = SessionTable(ttl_s=3600.0, capacity=10), request(OPENING)
    match, key = table.find(asked.prompt, 1.0), ReplyKey(asked)
    key.add_text("yo")
    outcome = TurnOutcome(prompt_tokens=9, completion_tokens=2, reply_key=key.key(), calls_tool=calls_tool)
    table.finish(match, asked.prompt, outcome, at_s)
    return table


def find(table: SessionTable, *messages: dict[str, str], at_s: float = 50.0) -> SessionMatch:
    return table.find(request(*messages).prompt, at_s)


@pytest.mark.parametrize("calls_tool", [False, True])
def test_the_next_turn_knows_when_the_last_answer_ended_and_how(calls_tool: bool) -> None:
    match = find(table_after(20.0, calls_tool=calls_tool), *NEXT)
    assert (match.turn, match.ended_s, match.calls_tool) == (2, 20.0, calls_tool)


def test_a_session_returns_once_however_often_its_turn_is_tried() -> None:
    table = table_after(20.0)
    assert [find(table, *NEXT, at_s=at_s).ended_s for at_s in (50.0, 51.0)] == [20.0, None]


@pytest.mark.parametrize("messages", [(OPENING,), ({"role": "user", "content": "new"},)])
def test_the_same_turn_again_and_another_conversation_are_no_return(messages: tuple[dict[str, str], ...]) -> None:
    table = table_after(20.0)
    assert find(table, *messages).ended_s is None
    assert find(table, *NEXT).ended_s is not None


def test_flags_leave_what_else_a_session_has_learnt() -> None:
    session = Session(1, None)
    session.learn(7.5, None, None, calls_tool=True)
    session.learn(8.5, None, None)
    assert (session.output_tokens, session.came_back(), session.came_back()) == (8.5, True, None)
    assert (session.output_tokens, session.prefixes()) == (8.5, [])
