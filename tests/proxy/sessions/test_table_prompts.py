"""Sessions whose prompts are not chat messages: stored responses, raw text, token ids."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import astuple

from ppd.proxy.beliefs.held import Residency
from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint, ReadingRules, parse_request
from ppd.proxy.sessions.session import RESPONSES_KEPT
from ppd.proxy.sessions.table import MatchKind, SessionMatch, SessionTable, TurnOutcome
from tests.support.attempts import D1, D2
from tests.support.requests import CHAT, COMPLETIONS, HASHER, RESPONSES, parse, user


@pytest.fixture
def table() -> SessionTable:
    return SessionTable(ttl_s=3600.0, capacity=1000)


def respond(
    table: SessionTable, prompt: Any, response_id: str | None, text: str = "yo", **members: Any
) -> SessionMatch:
    body = json.dumps({"model": "m", "input": prompt, **members}).encode()
    request = parse_request(Endpoint.RESPONSES, body, {}, ReadingRules(hasher=HASHER, tenant="t"))
    place = table.find(request.prompt, 0.0)
    key = ReplyKey(request)
    key.add_text(text)
    prompt_tokens = place.held_tokens + 10
    outcome = TurnOutcome(
        prompt_tokens=prompt_tokens, completion_tokens=5, reply_key=key.key(), response_id=response_id, decode=D1
    )
    table.finish(place, request.prompt, outcome, 0.0)
    return place


def test_a_stored_response_finds_its_session(table: SessionTable) -> None:
    first = respond(table, "hi", "resp_1")
    second = respond(table, "more", "resp_2", previous_response_id="resp_1")
    third = respond(table, "on", "resp_3", previous_response_id="resp_2")
    assert [(place.kind, place.turn, place.held_tokens) for place in (second, third)] == [
        (MatchKind.NEXT, 2, 15),
        (MatchKind.NEXT, 3, 30),
    ]
    assert first.session_id == second.session_id == third.session_id
    assert third.decode == D1
    retry = respond(table, "on", "resp_4", previous_response_id="resp_2")
    assert (retry.kind, retry.turn) == (MatchKind.RETRY, 3)
    branch = respond(table, "other", "resp_5", previous_response_id="resp_2")
    assert (branch.kind, branch.turn, branch.held_tokens) == (MatchKind.BRANCH, 3, 30)


TOOL = {"type": "function", "name": "look_up", "parameters": {}}


@pytest.mark.parametrize("later", [{}, {"instructions": "be brief", "tools": [TOOL]}, {"instructions": "be long"}])
@pytest.mark.parametrize("head", [{"instructions": "be brief"}, {"tools": [TOOL]}], ids=["instructions", "tools"])
def test_a_stored_response_finds_its_session_whatever_its_head_was(
    table: SessionTable, head: dict[str, Any], later: dict[str, Any]
) -> None:
    """It is in one engine only: anywhere else the request would get 404."""
    respond(table, "hi", "resp_1", **head)
    second = respond(table, "more", "resp_2", previous_response_id="resp_1", **later)
    retry = respond(table, "more", "resp_3", previous_response_id="resp_1", **later)
    edit = respond(table, "other", "resp_4", previous_response_id="resp_1", **later)
    third = respond(table, "on", "resp_5", previous_response_id="resp_3", **later)
    assert [(place.kind, place.turn, place.held_tokens, place.decode) for place in (second, retry, edit, third)] == [
        (MatchKind.NEXT, 2, 15, D1),
        (MatchKind.RETRY, 2, 25, D1),
        (MatchKind.BRANCH, 2, 15, D1),
        (MatchKind.NEXT, 3, 40, D1),
    ]


def test_a_conversation_may_go_on_from_any_of_its_newest_stored_responses(table: SessionTable) -> None:
    respond(table, "hi", "resp_1")
    for turn in range(2, RESPONSES_KEPT + 3):
        respond(table, "on", f"resp_{turn}", previous_response_id=f"resp_{turn - 1}")
    newest = RESPONSES_KEPT + 2
    forks = [respond(table, "no", None, previous_response_id=f"resp_{turn}") for turn in range(1, newest + 1)]
    lost, *branches, following = [(fork.kind, fork.turn, fork.held_tokens) for fork in forks]
    assert lost == (MatchKind.LOST, 1, 0)
    assert branches == [(MatchKind.BRANCH, turn + 1, 15 * turn) for turn in range(2, newest)]
    assert following == (MatchKind.NEXT, newest + 1, 15 * newest)


@pytest.mark.parametrize("named", [{}, {"previous_response_id": "resp_1"}], ids=["first turn", "later turn"])
def test_a_turn_that_was_asked_twice_may_go_on_from_either_response(table: SessionTable, named: dict[str, str]) -> None:
    respond(table, "hi", "resp_1")
    asked = [respond(table, "more", response_id, **named) for response_id in ("resp_2", "resp_3")]
    following = respond(table, "on", "resp_4", previous_response_id="resp_2")
    assert asked[1].kind is MatchKind.RETRY
    assert (following.kind, following.turn) == (MatchKind.NEXT, asked[1].turn + 1)


def test_a_fork_does_not_take_over_what_came_after_it(table: SessionTable) -> None:
    first = respond(table, "hi", "resp_1")
    for turn in (2, 3, 4):
        respond(table, "on", f"resp_{turn}", previous_response_id=f"resp_{turn - 1}")
    fork = respond(table, "no", "resp_5", previous_response_id="resp_2")
    following = respond(table, "on", "resp_6", previous_response_id="resp_4")
    assert fork.session_id != first.session_id == following.session_id
    assert (following.kind, following.turn) == (MatchKind.NEXT, 5)


def test_a_retry_of_a_turn_that_named_a_stored_response_is_found_in_a_session_with_a_longer_history(
    table: SessionTable,
) -> None:
    respond(table, "hi", "resp_1")
    history = (("user", "hi"), ("assistant", "yo"), ("user", "more"))
    respond(table, [{"role": role, "content": text} for role, text in history], "resp_2")
    third = respond(table, "on", "resp_3", previous_response_id="resp_2")
    retry = respond(table, "on", "resp_4", previous_response_id="resp_2")
    assert (third.turn, retry.turn, retry.kind) == (3, 3, MatchKind.RETRY)
    assert (third.held_tokens, retry.held_tokens) == (30, 40)


def test_a_response_that_nobody_knows_is_lost(table: SessionTable) -> None:
    place = respond(table, "more", "resp_2", previous_response_id="resp_0")
    assert (place.kind, place.turn, place.held_tokens) == (MatchKind.LOST, 1, 0)


def test_a_responses_client_may_send_the_history_instead(table: SessionTable) -> None:
    respond(table, "hi", "resp_1")
    history = (("user", "hi"), ("assistant", "yo"), ("user", "more"))
    place = respond(table, [{"role": role, "content": text} for role, text in history], "resp_2")
    assert (place.kind, place.turn, place.held_tokens) == (MatchKind.NEXT, 2, 15)


def complete(table: SessionTable, prompt: Any, text: str, decode: Residency = D1) -> SessionMatch:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    request = parse_request(Endpoint.COMPLETIONS, body, {}, ReadingRules(hasher=HASHER, tenant="t"))
    place = table.find(request.prompt, 0.0)
    key = ReplyKey(request)
    key.add_text(text)
    outcome = TurnOutcome(prompt_tokens=len(prompt), completion_tokens=len(text), reply_key=key.key(), decode=decode)
    table.finish(place, request.prompt, outcome, 0.0)
    return place


def test_a_raw_prompt_continues_what_it_begins_with(table: SessionTable) -> None:
    history, places = "User: hi\nAssistant:", []
    for _ in range(4):
        places.append(complete(table, history, " yo, and so on"))
        history += " yo, and so on\nUser: more\nAssistant:"
    assert [place.turn for place in places] == [1, 2, 3, 4]
    assert [place.kind for place in places[1:]] == [MatchKind.NEXT] * 3
    assert places[3].held_tokens == len(history) - 2 * len("\nUser: more\nAssistant:") - len(" yo, and so on")
    assert places[3].new_bytes == len("\nUser: more\nAssistant:")
    assert complete(table, "User: hi\nAssistant: no", "x").turn == 1


def test_prompts_that_share_only_a_header_are_apart(table: SessionTable) -> None:
    header = "Answer the question.\n" * 50
    first = complete(table, header + "What is a cat?", " an animal", D1)
    second = complete(table, header + "Where is Rome?", " in Italy", D2)
    assert second.turn == 1
    assert first.session_id != second.session_id
    for question, answer, held_by in (("What is a cat?", " an animal", D1), ("Where is Rome?", " in Italy", D2)):
        place = complete(table, f"{header}{question}{answer} And why?", "x")
        assert (place.turn, place.decode) == (2, held_by)


def test_a_raw_prompt_sent_again_is_a_retry_and_its_continuation_is_not(table: SessionTable) -> None:
    complete(table, "Once upon a time there was", " a king")
    assert complete(table, "Once upon a time there was", " a king").kind is MatchKind.RETRY
    on = complete(table, "Once upon a time there was a king", " who")
    assert (on.kind, on.turn, on.new_bytes) == (MatchKind.NEXT, 2, 0)


def test_token_ids_continue_from_the_prompt(table: SessionTable) -> None:
    complete(table, list(range(100)), "text says nothing of ids")
    place = complete(table, list(range(150)), "")
    assert (place.turn, place.held_tokens, place.new_bytes) == (2, 100, 200)


SYSTEM = {"role": "system", "content": "You answer briefly. " * 80}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "listen")]
SAID = [{"role": "user", "content": "word " * 1500}, {"role": "assistant", "content": "yo"}, user("more")]


@pytest.mark.parametrize("members", [{}, {"tools": TOOLS}], ids=["", "tools"])
@pytest.mark.parametrize(
    ("endpoint", "prompt"),
    [(CHAT, [user("hi")]), (CHAT, [SYSTEM, *SAID]), (COMPLETIONS, "word " * 3000), (RESPONSES, SAID)],
)
def test_a_prompt_of_which_only_keys_are_left_leaves_the_same_session(
    endpoint: Endpoint, prompt: Any, members: dict[str, Any]
) -> None:
    kept = []
    for is_whole in (True, False):
        table = SessionTable(ttl_s=3600.0, capacity=1000)
        for _ in range(2):  # once found by its keys, too
            request = parse(endpoint, prompt, **members)
            place = table.find(request.prompt, 0.0)
            ended = request if is_whole else request.without_prompt()
            outcome = TurnOutcome(prompt_tokens=4000, completion_tokens=5, reply_key=ReplyKey(ended).key(), decode=D1)
            table.finish(place, ended.prompt, outcome, 0.0)
        kept.append([astuple(session) for session in table.all()])
    assert kept[0] == kept[1]
