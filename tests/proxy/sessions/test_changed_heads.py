"""A conversation whose tools or system's text change from request to request."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.proxy.sessions.table import MatchKind, SessionTable
from ppd.proxy.sessions.templates import Templates
from tests.support.attempts import D1, D2, bytes_of, find, request, turn
from tests.support.requests import assistant, user

BRANCH, FIRST, NEXT = MatchKind.BRANCH, MatchKind.FIRST, MatchKind.NEXT
SYSTEM = {"role": "system", "content": "s" * 2000}
TASK = user("t" * 2000)
Message = dict[str, Any]


@pytest.fixture
def table() -> SessionTable:
    return SessionTable(ttl_s=3600.0, capacity=1000)


def clock(minute: int, text: str = "s" * 8000) -> Message:
    return {"role": "system", "content": f"{text}\nIt is 12:{minute:02} now."}


def tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"tool_{number}", "description": "d" * 400}}


def test_a_conversation_goes_on_under_a_head_that_has_changed(table: SessionTable) -> None:
    history, matches = [TASK], []
    for number in range(5):
        matches.append(turn(table, clock(number), *history))
        history += [assistant("r" * 200), user(f"question {number}")]
    assert [(match.kind, match.turn) for match in matches] == [(FIRST, 1)] + [(NEXT, turn_) for turn_ in range(2, 6)]
    assert len({match.session_id for match in matches}) == len(table) == 1
    assert all(8000 - 128 <= match.held_tokens * 2 <= 8000 + 16 + 10 for match in matches[1:])
    same = find(table, clock(4), *history)
    whole = bytes_of(clock(4), *history[:-1])
    assert same.held_tokens == whole // 2, "the worker's own counts, once the clock stands"


def test_an_edit_under_another_head_is_placed_at_its_turn(table: SessionTable) -> None:
    history = [TASK]
    for number in range(4):
        turn(table, clock(number), *history, prompt_cache_key="a name")
        history += [assistant("r" * 200), user(f"question {number}")]
    match = find(table, clock(9), *history[:2], user("something else"), prompt_cache_key="a name")
    assert (match.kind, match.turn) == (BRANCH, 2)
    assert match.held_tokens * 2 <= 8000 + 16 + 10


TOOLS = [tool(number) for number in range(6)]
CHANGED = {  # and how many of the first tools are the same
    "added": ([*TOOLS, tool(6)], 6),
    "removed": (TOOLS[:3] + TOOLS[4:], 3),
    "replaced": ([*TOOLS[:5], tool(9)], 5),
    "other first": ([tool(9), *TOOLS[1:]], 0),
    "none left": (None, 0),
}
ORDERS = {
    "not known": Templates(),
    "tools first": Templates(tools_first=frozenset({"m"})),
    "system first": Templates(system_first=frozenset({"m"})),
}


@pytest.mark.parametrize("members", [{}, {"prompt_cache_key": "a name"}])
@pytest.mark.parametrize("now", ORDERS)
@pytest.mark.parametrize("begun", ORDERS)
@pytest.mark.parametrize("change", CHANGED)
def test_tools_may_change(table: SessionTable, change: str, begun: str, now: str, members: dict[str, Any]) -> None:
    """Also of a session that began before the order of its model's template was known, or was another one."""
    first = turn(table, SYSTEM, TASK, tools=TOOLS, templates=ORDERS[begun], **members)
    changed, same = CHANGED[change]
    history = [SYSTEM, TASK, assistant("r" * 200), user("on")]
    match = find(table, *history, templates=ORDERS[now], **members, **({"tools": changed} if changed else {}))
    sizes = request(SYSTEM, TASK, tools=TOOLS).prompt.chain.ends
    of_tools, with_text = sizes[1 + same] - sizes[1], sizes[1 + same]
    held = {"not known": of_tools, "tools first": of_tools, "system first": with_text}[now] // 2
    if held == 0 and now == "tools first" and not members:  # else it might hold the system's text
        assert match.kind is FIRST
        return
    assert (match.kind, match.turn, match.session_id) == (NEXT, 2, first.session_id)
    assert match.held_tokens == pytest.approx(held, abs=1)


@pytest.mark.parametrize("now", ORDERS)
@pytest.mark.parametrize("begun", ORDERS)
def test_the_systems_text_may_change_beside_tools(table: SessionTable, begun: str, now: str) -> None:
    turn(table, clock(1), TASK, tools=TOOLS, templates=ORDERS[begun])
    history = [TASK, assistant("r" * 200), user("on")]
    match = find(table, clock(2), *history, tools=TOOLS, templates=ORDERS[now])
    sizes = request(clock(1), TASK, tools=TOOLS).prompt.chain.ends
    tools = sizes[7] - sizes[1] if now == "tools first" else 0
    assert match.kind is NEXT
    assert 8000 - 128 <= match.held_tokens * 2 - tools <= 8000 + 16 + 10


@pytest.mark.parametrize("system", ["x" + "s" * 8000, "s" * 500 + "x" + "s" * 7500, "other", ""])
def test_a_conversation_whose_head_has_nothing_in_common_begins_anew(table: SessionTable, system: str) -> None:
    turn(table, clock(0), TASK)
    match = find(table, {"role": "system", "content": system}, TASK, assistant("r" * 200), user("on"))
    assert (match.kind, match.held_tokens) == (FIRST, 0)
    assert find(table, clock(0), TASK, assistant("r" * 200), user("on")).kind is NEXT


def test_a_name_keeps_a_conversation_whose_head_has_nothing_in_common(table: SessionTable) -> None:
    first = turn(table, clock(0), TASK, prompt_cache_key="a name")
    history = [{"role": "system", "content": "other"}, TASK, assistant("r" * 200), user("on")]
    match = find(table, *history, prompt_cache_key="a name")
    assert (match.kind, match.turn, match.session_id, match.held_tokens) == (NEXT, 2, first.session_id, 0)
    assert match.decode == D1


def test_of_two_heads_with_one_conversation_each_keeps_its_session(table: SessionTable) -> None:
    heads, sessions = [clock(0, "a" * 4000), clock(0, "a" * 3000 + "b" * 1000)], []
    for head, worker in zip(heads, (D1, D2), strict=True):
        sessions.append(turn(table, head, TASK, decode=worker).session_id)
    for head, session, worker in zip(heads, sessions, (D1, D2), strict=True):
        match = turn(table, head, TASK, assistant("r" * 200), user("on"), decode=worker)
        assert (match.kind, match.session_id, match.decode) == (NEXT, session, worker)
        assert match.held_tokens == bytes_of(head, TASK, assistant("r" * 200)) // 2
