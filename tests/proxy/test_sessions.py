"""Which conversation a request continues, at which turn, and what is held of it."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ppd.proxy.chain import Hasher
from ppd.proxy.config import SessionKey
from ppd.proxy.errors import ConfigError
from ppd.proxy.replies import ReplyKey
from ppd.proxy.residency import Residency
from ppd.proxy.sessions import Kind, Outcome, Place, SessionTable
from ppd.proxy.turns import Endpoint, Request, parse_request
from ppd.proxy.workers import WorkerId

HASHER = Hasher(b"a secret of the proxy")
DATA = Path(__file__).parents[1] / "data" / "conversations"
D1 = Residency(WorkerId("d1:80"), "i", 100, 0)
D2 = Residency(WorkerId("d2:80"), "i", 100, 0)
P1 = Residency(WorkerId("p1:80"), "i", 90, 0)
Message = dict[str, Any]


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str | None, **members: Any) -> Message:
    return {"role": "assistant", "content": text, **members}


def tokens_of(*messages: Message) -> int:
    """What the fake engine counts: ten a message and one a character."""
    return sum(10 + len(str(message.get("content") or "")) for message in messages)


class Client:
    """Talks to a table as the proxy does; every turn ends with usage of `tokens_of`."""

    def __init__(self, table: SessionTable, **headers: str) -> None:
        self.table = table
        self.now_s = 0.0
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def request(self, *messages: Message, tenant: str = "t", **members: Any) -> Request:
        key = members.pop("session_key", SessionKey.PREFIX)
        body = json.dumps({"model": "m", "messages": messages, **members}).encode()
        return parse_request(Endpoint.CHAT, body, self.headers, tenant=tenant, hasher=HASHER, session_key=key)

    def find(self, *messages: Message, **members: Any) -> Place:
        return self.table.find(self.request(*messages, **members), self.now_s)

    def turn(self, *messages: Message, reply: str = "yo", decode: Residency | None = D1, **members: Any) -> Place:
        request = self.request(*messages, **members)
        place = self.table.find(request, self.now_s)
        self.finish(place, request, assistant(reply), tokens_of(*messages), decode)
        return place

    def finish(
        self, place: Place, request: Request, reply: Message, prompt: int, decode: Residency | None = D1
    ) -> None:
        key = ReplyKey(request)
        key.add_text(reply["content"] or "")
        for index, call in enumerate(reply.get("tool_calls") or ()):
            key.add_tool_call(index, call["id"], call["function"]["name"], call["function"]["arguments"])
        outcome = Outcome(
            prompt_tokens=prompt,
            completion_tokens=tokens_of(reply),
            reply_key=key.key(),
            decode=decode,
            prefill=P1,
        )
        self.table.finish(place, request, outcome, self.now_s)


@pytest.fixture
def table() -> SessionTable:
    return SessionTable(ttl_s=3600.0, capacity=1000)


@pytest.fixture
def client(table: SessionTable) -> Client:
    return Client(table)


HI = user("hi")
SYSTEM = {"role": "system", "content": "be brief"}


# -- turns


def test_a_conversation_is_one_session_and_counts_its_turns(client: Client) -> None:
    first = client.turn(SYSTEM, HI)
    second = client.turn(SYSTEM, HI, assistant("yo"), user("more"), reply="sure")
    third = client.find(SYSTEM, HI, assistant("yo"), user("more"), assistant("sure"), user("why"))
    assert [place.kind for place in (first, second, third)] == [Kind.FIRST, Kind.NEXT, Kind.NEXT]
    assert [place.turn for place in (first, second, third)] == [1, 2, 3]
    assert len({place.session_id for place in (first, second, third)}) == 1
    assert (first.held_tokens, first.decode) == (0, None)
    assert second.held_tokens == tokens_of(SYSTEM, HI, assistant("yo"))
    assert third.held_tokens == tokens_of(SYSTEM, HI, assistant("yo"), user("more"), assistant("sure"))
    assert (third.decode, third.prefill) == (D1, P1)


def test_new_bytes_are_those_beyond_the_known_prefix(client: Client) -> None:
    first = client.turn(HI, reply="y" * 5000)
    following = client.find(HI, assistant("y" * 5000), user("z" * 100))
    assert first.new_bytes == client.request(HI).prompt_bytes
    assert 100 <= following.new_bytes < 150


def test_a_reply_that_comes_back_changed_leaves_the_prompt_known(client: Client) -> None:
    client.turn(HI, reply="  yo\n")
    place = client.find(HI, assistant("yo"), user("more"))
    assert (place.kind, place.turn, place.held_tokens) == (Kind.NEXT, 2, tokens_of(HI))


def test_a_reply_with_reasoning_counts_as_far_as_its_prompt(client: Client) -> None:
    request = client.request(HI)
    place = client.table.find(request, 0.0)
    key = ReplyKey(request)
    key.add_text("yo")
    outcome = Outcome(prompt_tokens=12, completion_tokens=900, reply_key=key.key(), reasoned=True)
    client.table.finish(place, request, outcome, 0.0)
    following = client.find(HI, assistant("yo"), user("more"))
    assert (following.turn, following.held_tokens) == (2, 12)


def test_a_turn_that_did_not_complete_changes_nothing(client: Client) -> None:
    client.find(HI)
    assert len(client.table) == 0
    client.turn(HI)
    client.find(HI, assistant("yo"), user("more"))
    assert client.find(HI, assistant("yo"), user("more")).kind is Kind.NEXT


def test_the_mean_answer_length_follows_the_session(client: Client) -> None:
    assert client.turn(HI, reply="y" * 90).output_tokens is None
    assert client.turn(HI, assistant("y" * 90), user("a"), reply="z" * 190).output_tokens == 100
    following = client.find(HI, assistant("y" * 90), user("a"), assistant("z" * 190), user("b"))
    assert following.output_tokens == pytest.approx(130)


def test_an_outcome_without_residency_leaves_what_was_known(client: Client) -> None:
    client.turn(HI, decode=D2)
    client.turn(HI, assistant("yo"), user("a"), decode=None)
    assert client.find(HI, assistant("yo"), user("a"), assistant("yo"), user("b")).decode == D2


# -- retries, edits, branches


def test_a_retry_is_not_a_new_turn(client: Client) -> None:
    first = client.turn(HI)
    again = client.turn(HI)
    assert (again.kind, again.turn, again.session_id) == (Kind.RETRY, 1, first.session_id)
    assert again.held_tokens == 0
    second = client.turn(HI, assistant("yo"), user("more"))
    retried = client.find(HI, assistant("yo"), user("more"))
    assert (retried.kind, retried.turn, retried.session_id) == (Kind.RETRY, 2, second.session_id)
    assert (retried.held_tokens, retried.new_bytes) == (second.held_tokens, second.new_bytes)
    assert len(client.table) == 1


def test_a_regenerated_reply_and_the_first_one_can_both_be_continued(client: Client) -> None:
    client.turn(HI)
    client.turn(HI, assistant("yo"), user("more"), reply="one", decode=D1)
    client.turn(HI, assistant("yo"), user("more"), reply="two", decode=D2)
    history = (HI, assistant("yo"), user("more"))
    for reply, held_by in (("one", D1), ("two", D2)):
        place = client.find(*history, assistant(reply), user("go on"))
        assert (place.kind, place.turn, place.decode) == (Kind.NEXT, 3, held_by)
        assert place.held_tokens == tokens_of(*history, assistant(reply))


def test_an_edit_of_the_last_message_branches_from_the_turn_before(client: Client) -> None:
    client.turn(HI)
    client.turn(HI, assistant("yo"), user("more"))
    edited = client.turn(HI, assistant("yo"), user("less"), decode=D2)
    assert (edited.kind, edited.turn, edited.decode) == (Kind.BRANCH, 2, D1)
    assert edited.held_tokens == tokens_of(HI, assistant("yo"))
    for text, held_by in (("more", D1), ("less", D2)):
        place = client.find(HI, assistant("yo"), user(text), assistant("yo"), user("go on"))
        assert (place.kind, place.turn, place.decode) == (Kind.NEXT, 3, held_by)


def test_an_edit_of_the_first_message_is_a_new_conversation(client: Client) -> None:
    first = client.turn(HI)
    edited = client.find(user("hello"))
    assert (edited.kind, edited.turn, edited.held_tokens, edited.decode) == (Kind.FIRST, 1, 0, None)
    assert edited.session_id != first.session_id


def test_an_edit_further_back_than_is_remembered_is_a_new_conversation(client: Client) -> None:
    history = [HI]
    for number in range(4):
        client.turn(*history)
        history += [assistant("yo"), user(f"more {number}")]
    edited = client.find(HI, assistant("yo"), user("something else"))
    assert (edited.kind, edited.held_tokens) == (Kind.FIRST, 0)


def test_of_two_turns_at_once_after_one_parent_the_second_becomes_a_session_of_its_own(client: Client) -> None:
    client.turn(HI)
    requests = [client.request(HI, assistant("yo"), user(text)) for text in ("a", "b")]
    places = [client.table.find(request, 0.0) for request in requests]
    assert [place.kind for place in places] == [Kind.NEXT, Kind.NEXT]
    for place, request, held_by in zip(places, requests, (D1, D2), strict=True):
        client.finish(place, request, assistant("ok"), 30, held_by)
    assert len(client.table) == 2
    for text, held_by in (("a", D1), ("b", D2)):
        following = client.find(HI, assistant("yo"), user(text), assistant("ok"), user("c"))
        assert (following.kind, following.turn, following.decode) == (Kind.NEXT, 3, held_by)


def test_two_users_with_one_opener_are_apart_once_their_replies_differ(client: Client) -> None:
    client.turn(HI, reply="hello, Ann", decode=D1)
    second = client.turn(HI, reply="hello, Bob", decode=D2)
    assert second.turn == 1
    places = [client.find(HI, assistant(f"hello, {name}"), user("thanks")) for name in ("Ann", "Bob")]
    assert [place.turn for place in places] == [2, 2]
    assert [place.decode for place in places] == [D1, D2]
    assert places[0].session_id != places[1].session_id


def test_the_same_opener_after_the_first_user_went_on_is_a_session_of_its_own(client: Client) -> None:
    first = client.turn(HI)
    client.turn(HI, assistant("yo"), user("more"))
    second = client.find(HI)
    assert (second.turn, second.held_tokens) == (1, 0)
    assert second.session_id != first.session_id


@pytest.mark.parametrize("members", [{"tenant": "u"}, {"cache_salt": "s"}, {"tools": [{"name": "f"}]}, {"model": "n"}])
def test_conversations_do_not_meet_across(members: dict[str, Any], client: Client) -> None:
    client.turn(HI)
    assert client.find(HI, assistant("yo"), user("more"), **members).kind is Kind.FIRST


# -- explicit ids


def test_an_id_tells_two_users_with_one_opener_and_one_reply_apart(table: SessionTable) -> None:
    ann, bob = Client(table, x_session_id="ann"), Client(table, x_session_id="bob")
    first, second = ann.turn(HI, decode=D1), bob.turn(HI, decode=D2)
    assert (second.kind, second.turn) == (Kind.FIRST, 1)
    assert first.session_id != second.session_id
    for user_, place, held_by in ((ann, first, D1), (bob, second, D2)):
        following = user_.turn(HI, assistant("yo"), user("more"), decode=held_by)
        assert (following.kind, following.turn, following.decode) == (Kind.NEXT, 2, held_by)
        assert following.session_id == place.session_id
        retry = user_.find(HI, assistant("yo"), user("more"))
        assert (retry.kind, retry.session_id) == (Kind.RETRY, place.session_id)


def test_an_id_keeps_its_session_when_the_history_begins_otherwise(table: SessionTable) -> None:
    client = Client(table, x_session_id="1")
    first = client.turn(HI)
    lost = client.turn(user("a summary of all so far"), reply="ok", decode=D2)
    assert (lost.kind, lost.turn, lost.session_id) == (Kind.LOST, 2, first.session_id)
    assert (lost.held_tokens, lost.decode) == (0, None)
    following = client.find(user("a summary of all so far"), assistant("ok"), user("go on"))
    assert (following.kind, following.turn, following.decode) == (Kind.NEXT, 3, D2)


def test_an_edit_under_an_id_is_a_branch_of_the_same_session(table: SessionTable) -> None:
    client = Client(table, x_session_id="1")
    first = client.turn(HI)
    client.turn(HI, assistant("yo"), user("more"))
    edited = client.find(HI, assistant("yo"), user("less"))
    assert (edited.kind, edited.turn, edited.session_id) == (Kind.BRANCH, 2, first.session_id)
    assert edited.held_tokens == tokens_of(HI, assistant("yo"))


def test_a_session_without_an_id_takes_the_first_one_it_is_given(table: SessionTable) -> None:
    nameless, named = Client(table), Client(table, x_session_id="1")
    nameless.turn(HI)
    second = named.turn(HI, assistant("yo"), user("more"))
    assert (second.kind, second.turn) == (Kind.NEXT, 2)
    assert len(table) == 1
    third = named.find(HI, assistant("yo"), user("more"), assistant("yo"), user("on"))
    assert (third.turn, third.session_id) == (3, second.session_id)


def test_another_id_on_a_known_history_is_a_branch_of_its_own(table: SessionTable) -> None:
    first = Client(table, x_session_id="1").turn(HI)
    other = Client(table, x_session_id="2").find(HI, assistant("yo"), user("more"))
    assert (other.kind, other.turn, other.decode) == (Kind.BRANCH, 2, D1)
    assert other.session_id != first.session_id


def test_a_request_that_forgets_its_id_still_continues(table: SessionTable) -> None:
    first = Client(table, x_session_id="1").turn(HI)
    place = Client(table).find(HI, assistant("yo"), user("more"))
    assert (place.kind, place.session_id) == (Kind.NEXT, first.session_id)


def test_users_who_share_one_key_keep_their_own_workers(client: Client) -> None:
    """An application may send one `prompt_cache_key` for all its users."""
    users = {f"user {number}": replace(D1, worker=WorkerId(f"d{number}:80")) for number in range(20)}
    for name, held_by in users.items():
        client.turn(user(name), decode=held_by, prompt_cache_key="app")
    for name, held_by in users.items():
        place = client.find(user(name), assistant("yo"), user("more"), prompt_cache_key="app")
        assert place.decode == held_by
        assert place.held_tokens == tokens_of(user(name), assistant("yo"))


def test_a_named_session_that_another_name_claimed_meanwhile_is_left_alone(table: SessionTable) -> None:
    nameless, ann, bob = Client(table), Client(table, x_session_id="ann"), Client(table, x_session_id="bob")
    nameless.turn(HI)
    request = ann.request(HI, assistant("yo"), user("more"))
    place = table.find(request, 0.0)
    bob.turn(HI)  # a retry that completes first and gives the session its name
    ann.finish(place, request, assistant("ok"), 30)
    check(table)
    assert ann.find(HI, assistant("yo"), user("more"), assistant("ok"), user("on")).turn == 3


# -- Responses and completions


def respond(table: SessionTable, prompt: Any, response_id: str | None, text: str = "yo", **members: Any) -> Place:
    body = json.dumps({"model": "m", "input": prompt, **members}).encode()
    request = parse_request(Endpoint.RESPONSES, body, {}, tenant="t", hasher=HASHER, session_key=SessionKey.PREFIX)
    place = table.find(request, 0.0)
    key = ReplyKey(request)
    key.add_text(text)
    prompt_tokens = place.held_tokens + 10
    outcome = Outcome(
        prompt_tokens=prompt_tokens, completion_tokens=5, reply_key=key.key(), response_id=response_id, decode=D1
    )
    table.finish(place, request, outcome, 0.0)
    return place


def test_a_stored_response_finds_its_session(table: SessionTable) -> None:
    first = respond(table, "hi", "resp_1")
    second = respond(table, "more", "resp_2", previous_response_id="resp_1")
    third = respond(table, "on", "resp_3", previous_response_id="resp_2")
    assert [(place.kind, place.turn, place.held_tokens) for place in (second, third)] == [
        (Kind.NEXT, 2, 15),
        (Kind.NEXT, 3, 30),
    ]
    assert first.session_id == second.session_id == third.session_id
    assert third.decode == D1
    retry = respond(table, "on", "resp_4", previous_response_id="resp_2")
    assert (retry.kind, retry.turn) == (Kind.RETRY, 3)
    branch = respond(table, "other", "resp_5", previous_response_id="resp_2")
    assert (branch.kind, branch.turn, branch.held_tokens) == (Kind.BRANCH, 3, 30)


def test_a_response_that_nobody_knows_is_lost(table: SessionTable) -> None:
    place = respond(table, "more", "resp_2", previous_response_id="resp_0")
    assert (place.kind, place.turn, place.held_tokens) == (Kind.LOST, 1, 0)


def test_a_responses_client_may_send_the_history_instead(table: SessionTable) -> None:
    respond(table, "hi", "resp_1")
    place = respond(table, [user("hi"), assistant("yo"), user("more")], "resp_2")
    assert (place.kind, place.turn, place.held_tokens) == (Kind.NEXT, 2, 15)


def complete(table: SessionTable, prompt: Any, text: str, decode: Residency = D1) -> Place:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    request = parse_request(Endpoint.COMPLETIONS, body, {}, tenant="t", hasher=HASHER, session_key=SessionKey.PREFIX)
    place = table.find(request, 0.0)
    key = ReplyKey(request)
    key.add_text(text)
    outcome = Outcome(prompt_tokens=len(prompt), completion_tokens=len(text), reply_key=key.key(), decode=decode)
    table.finish(place, request, outcome, 0.0)
    return place


def test_a_raw_prompt_continues_what_it_begins_with(table: SessionTable) -> None:
    history, places = "User: hi\nAssistant:", []
    for _ in range(4):
        places.append(complete(table, history, " yo, and so on"))
        history += " yo, and so on\nUser: more\nAssistant:"
    assert [place.turn for place in places] == [1, 2, 3, 4]
    assert [place.kind for place in places[1:]] == [Kind.NEXT] * 3
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
    assert complete(table, "Once upon a time there was", " a king").kind is Kind.RETRY
    on = complete(table, "Once upon a time there was a king", " who")
    assert (on.kind, on.turn, on.new_bytes) == (Kind.NEXT, 2, 0)


def test_token_ids_continue_from_the_prompt(table: SessionTable) -> None:
    complete(table, list(range(100)), "text says nothing of ids")
    place = complete(table, list(range(150)), "")
    assert (place.turn, place.held_tokens, place.new_bytes) == (2, 100, 200)


# -- the paper's key


def test_the_papers_key_counts_the_requests_with_one_opener(table: SessionTable) -> None:
    client, key = Client(table, x_session_id="ignored"), SessionKey.FIRST_USER_MESSAGE
    first = client.turn(HI, session_key=key)
    second = client.turn(SYSTEM, HI, assistant("edited"), user("a"), session_key=key)
    retry = client.turn(SYSTEM, HI, assistant("edited"), user("a"), session_key=key)
    third = client.find(HI, user("b"), session_key=key)
    assert [place.turn for place in (first, second, retry, third)] == [1, 2, 2, 3]
    assert [place.kind for place in (first, second, retry, third)] == [Kind.FIRST, Kind.NEXT, Kind.RETRY, Kind.NEXT]
    assert len({place.session_id for place in (first, second, retry, third)}) == 1
    assert second.held_tokens == retry.held_tokens == tokens_of(HI, assistant("yo"))
    assert third.held_tokens == tokens_of(SYSTEM, HI, assistant("edited"), user("a"), assistant("yo"))
    assert third.decode == D1
    assert client.find(HI, session_key=key, tenant="u").turn == 1


def test_the_papers_key_tells_new_bytes_by_the_prefix_or_the_last_message(client: Client) -> None:
    key = SessionKey.FIRST_USER_MESSAGE
    client.turn(HI, reply="y" * 500, session_key=key)
    assert 50 <= client.find(HI, assistant("y" * 500), user("z" * 50), session_key=key).new_bytes < 100
    assert 50 <= client.find(SYSTEM, HI, assistant("y" * 500), user("z" * 50), session_key=key).new_bytes < 100


# -- keeping


def check(table: SessionTable) -> None:
    """Every key leads to a session that is there and remembers it."""
    live = set(map(id, table._sessions.values()))
    for key, session in table._index.items():
        assert id(session) in live
        assert key in {anchor.key for anchor in session.anchors()}
    for label, session in table._named.items():
        assert id(session) in live
        assert session.label == label
    for strand, session in table._sessions.items():
        assert session.strand == strand
    seen = [session.seen_s for session in table._sessions.values()]
    assert all(earlier <= later for earlier, later in pairwise(seen))


def test_a_session_is_forgotten_after_its_time_without_use(client: Client) -> None:
    client.turn(HI)
    client.now_s = 3600.0
    assert client.find(HI, assistant("yo"), user("more")).turn == 2  # a use, though it may fail
    client.now_s = 7200.0
    assert client.find(HI, assistant("yo"), user("more")).turn == 2
    client.now_s = 10_801.0
    assert client.find(HI, assistant("yo"), user("more")).turn == 1
    assert len(client.table) == 0
    check(client.table)


def test_the_session_unused_for_longest_makes_room() -> None:
    client = Client(SessionTable(ttl_s=10.0, capacity=2))
    for text in ("a", "b"):
        client.turn(user(text))
    client.find(user("a"), assistant("yo"), user("more"))
    client.turn(user("c"))
    kinds = {text: client.find(user(text), assistant("yo"), user("more")).kind for text in "abc"}
    assert kinds == {"a": Kind.NEXT, "b": Kind.FIRST, "c": Kind.NEXT}
    check(client.table)


def test_a_session_forgotten_during_its_turn_is_learnt_anew() -> None:
    client = Client(SessionTable(ttl_s=10.0, capacity=5))
    client.turn(HI)
    request = client.request(HI, assistant("yo"), user("more"))
    place = client.table.find(request, 5.0)
    client.now_s = 100.0
    client.finish(place, request, assistant("ok"), 40, D2)
    following = client.find(HI, assistant("yo"), user("more"), assistant("ok"), user("on"))
    assert (following.turn, following.decode, following.session_id) == (3, D2, place.session_id)


def test_a_dropped_session_is_gone_with_all_its_strands(table: SessionTable) -> None:
    client = Client(table, x_session_id="1")
    first = client.turn(HI)
    client.turn(user("another beginning"))
    assert len(table) == 2
    assert table.drop(first.session_id)
    assert not table.drop(first.session_id)
    assert (len(table), table.summary(first.session_id)) == (0, None)
    check(table)


def test_an_operator_sees_the_newest_sessions_first(client: Client) -> None:
    first, second = client.turn(user("a")), client.turn(user("b"), decode=D2)
    client.now_s = 7.0
    client.turn(user("a"), assistant("yo"), user("more"))
    assert [one.session_id for one in client.table.recent(5)] == [first.session_id, second.session_id]
    assert len(client.table.recent(1)) == 1
    summary = client.table.summary(first.session_id)
    assert summary is not None
    assert (summary.turn, summary.decode, summary.prefill, summary.seen_s) == (2, D1.worker, P1.worker, 7.0)
    assert summary.held_tokens == tokens_of(user("a"), assistant("yo"), user("more"), assistant("yo"))


@pytest.mark.parametrize(("ttl_s", "capacity"), [(0.0, 1), (1.0, 0)])
def test_a_table_must_be_able_to_hold_something(ttl_s: float, capacity: int) -> None:
    with pytest.raises(ConfigError):
        SessionTable(ttl_s=ttl_s, capacity=capacity)


class Talk(RuleBasedStateMachine):
    """Any order of finds, finishes and passing time, with few texts and names so that all of them collide."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SessionTable(ttl_s=50.0, capacity=4)
        self.now_s = 0.0
        self.running: list[tuple[Place, Request]] = []

    @rule(
        texts=st.lists(st.sampled_from("ab"), min_size=1, max_size=5),
        id=st.sampled_from(["", "", "1", "2"]),
        key=st.sampled_from(SessionKey),
    )
    def find(self, texts: list[str], id: str, key: SessionKey) -> None:
        client = Client(self.table, x_session_id=id)
        messages = [user(text) if at % 2 == 0 else assistant(text) for at, text in enumerate(texts)]
        request = client.request(*messages, session_key=key)
        place = self.table.find(request, self.now_s)
        assert place.turn >= 1
        assert 0 <= place.new_bytes <= request.prompt_bytes
        assert (place.held_tokens == 0) or place.parent is not None
        self.running.append((place, request))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reply=st.sampled_from(["", "a", "b"]))
    def finish(self, data: st.DataObject, reply: str) -> None:
        place, request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        client = Client(self.table)
        client.now_s = self.now_s
        client.finish(place, request, assistant(reply), 20)
        summary = self.table.summary(place.session_id)
        assert summary is None or summary.turn >= 1

    @precondition(lambda self: len(self.table) > 0)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        sessions = self.table.recent(10)
        assert self.table.drop(data.draw(st.sampled_from(sessions)).session_id)

    @rule(seconds=st.sampled_from([1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def holds_together(self) -> None:
        assert len(self.table) <= 4
        check(self.table)


TestTalk = Talk.TestCase


# -- real conversations


def conversations(name: str) -> list[list[Message]]:
    return [json.loads(line)["messages"] for line in (DATA / name).read_text().splitlines()]


def prompts_of(messages: list[Message]) -> list[tuple[list[Message], Message]]:
    """Each request of a conversation, and the reply to it."""
    return [(messages[:at], message) for at, message in enumerate(messages) if message["role"] == "assistant"]


def play(client: Client, prompt: list[Message], reply: Message) -> Place:
    request = client.request(*prompt)
    place = client.table.find(request, client.now_s)
    client.finish(place, request, reply, tokens_of(*prompt))
    return place


def expected(prompt: list[Message]) -> tuple[int, int]:
    """The turn, and the tokens of all up to the last reply."""
    replies = [at for at, message in enumerate(prompt) if message["role"] == "assistant"]
    return len(replies) + 1, tokens_of(*prompt[: replies[-1] + 1]) if replies else 0


@pytest.mark.parametrize("name", ["mt-bench-101.jsonl", "swe-agent.jsonl"])
def test_real_dialogues_keep_one_session_each(client: Client, name: str) -> None:
    rounds = [prompts_of(messages) for messages in conversations(name)]
    for number in range(max(map(len, rounds))):
        for turns in rounds:
            if number < len(turns):
                place = play(client, *turns[number])
                assert (place.turn, place.held_tokens) == expected(turns[number][0])
    assert len(client.table) == len(rounds)


@pytest.mark.parametrize("interleaved", [False, True])
def test_every_path_of_real_message_trees_is_placed_by_its_own_history(client: Client, interleaved: bool) -> None:
    """The paths of a tree share prefixes: regenerated replies and edited questions, one after another or at once."""
    turns = [turn for messages in conversations("oasst1.jsonl") for turn in prompts_of(messages)]
    if interleaved:
        turns.sort(key=lambda turn: len(turn[0]))
    assert len(turns) > 30
    for prompt, reply in turns:
        place = play(client, prompt, reply)
        assert (place.turn, place.held_tokens) == expected(prompt)
        check(client.table)


# -- memory


def test_an_idle_session_takes_at_most_one_kibibyte() -> None:
    """Ten turns, a name, and two workers that hold its prefix; the same is measured by benchmarks/session_memory.py."""
    count, turns = 5000, 10
    workers = [(WorkerId(f"10.0.0.{number}:8000"), f"incarnation {number}") for number in range(8)]
    table = SessionTable(ttl_s=60.0, capacity=count)
    base = Client(table, x_session_id="x").request(HI)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(count):
            _ten_turns(table, base, number, turns, workers)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == count
    assert {summary.turn for summary in table.recent(1000)} == {turns}
    assert (after - before) / count <= 1024


def _ten_turns(
    table: SessionTable, base: Request, number: int, turns: int, workers: list[tuple[WorkerId, str]]
) -> None:
    """Turns whose keys are made directly: parsing 50,000 bodies is another test's business."""
    keys: tuple[int, ...] = ()
    label = HASHER.key(b"I", str(number))
    for turn in range(turns):
        keys += (HASHER.key(b"T", f"{number} {turn} prompt"),)
        chain = replace(base.chain, keys=keys, ends=tuple(range(20, 20 * len(keys) + 20, 20)))
        request = replace(base, chain=chain, label=label)
        place = table.find(request, 0.0)
        assert place.turn == turn + 1
        reply = HASHER.key(b"T", f"{number} {turn} reply")
        keys += (reply,)
        held = Residency(*workers[number % 8], 1000 * (turn + 1) + number, 10**9 + number)
        outcome = Outcome(
            prompt_tokens=1000 * (turn + 1),
            completion_tokens=300 + number,
            reply_key=replace(chain.end(), key=reply),
            decode=held,
            prefill=replace(held, worker=workers[(number + 1) % 8][0]),
        )
        table.finish(place, request, outcome, 0.0)
