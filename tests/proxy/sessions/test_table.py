"""Which conversation a request continues, at which turn, and what is held of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ppd.proxy.beliefs.held import Residency
from ppd.proxy.config import SessionKey
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint, ReadingRules, Request, parse_request
from ppd.proxy.sessions.table import MatchKind, SessionMatch, SessionTable, TurnOutcome
from tests.support.attempts import D1, D2, P1
from tests.support.requests import HASHER

DATA = Path(__file__).parents[2] / "data" / "conversations"
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
        rules = ReadingRules(hasher=HASHER, tenant=tenant, session_key=members.pop("session_key", SessionKey.PREFIX))
        body = json.dumps({"model": "m", "messages": messages, **members}).encode()
        return parse_request(Endpoint.CHAT, body, self.headers, rules)

    def find(self, *messages: Message, **members: Any) -> SessionMatch:
        return self.table.find(self.request(*messages, **members).prompt, self.now_s)

    def turn(
        self, *messages: Message, reply: str = "yo", decode: Residency | None = D1, **members: Any
    ) -> SessionMatch:
        request = self.request(*messages, **members)
        place = self.table.find(request.prompt, self.now_s)
        self.finish(place, request, assistant(reply), tokens_of(*messages), decode)
        return place

    def finish(
        self, place: SessionMatch, request: Request, reply: Message, prompt: int, decode: Residency | None = D1
    ) -> None:
        key = ReplyKey(request)
        key.add_text(reply["content"] or "")
        for index, call in enumerate(reply.get("tool_calls") or ()):
            key.add_tool_call(index, call["id"], call["function"]["name"], call["function"]["arguments"])
        outcome = TurnOutcome(
            prompt_tokens=prompt,
            completion_tokens=tokens_of(reply),
            reply_key=key.key(),
            decode=decode,
            prefill=P1,
        )
        self.table.finish(place, request.prompt, outcome, self.now_s)


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
    assert [place.kind for place in (first, second, third)] == [MatchKind.FIRST, MatchKind.NEXT, MatchKind.NEXT]
    assert [place.turn for place in (first, second, third)] == [1, 2, 3]
    assert len({place.session_id for place in (first, second, third)}) == 1
    assert (first.held_tokens, first.decode) == (0, None)
    assert second.held_tokens == tokens_of(SYSTEM, HI, assistant("yo"))
    assert third.held_tokens == tokens_of(SYSTEM, HI, assistant("yo"), user("more"), assistant("sure"))
    assert (third.decode, third.source) == (D1, first.history)


def test_new_bytes_are_those_beyond_the_known_prefix(client: Client) -> None:
    first = client.turn(HI, reply="y" * 5000)
    following = client.find(HI, assistant("y" * 5000), user("z" * 100))
    assert first.new_bytes == client.request(HI).prompt_bytes
    assert 100 <= following.new_bytes < 150


def test_a_reply_that_comes_back_changed_leaves_the_prompt_known(client: Client) -> None:
    client.turn(HI, reply="  yo\n")
    place = client.find(HI, assistant("yo"), user("more"))
    assert (place.kind, place.turn, place.held_tokens) == (MatchKind.NEXT, 2, tokens_of(HI))


def test_a_reply_with_reasoning_counts_as_far_as_its_prompt(client: Client) -> None:
    request = client.request(HI)
    place = client.table.find(request.prompt, 0.0)
    key = ReplyKey(request)
    key.add_text("yo " * 300)
    outcome = TurnOutcome(prompt_tokens=12, completion_tokens=900, reply_key=key.key(), reasoned=True)
    client.table.finish(place, request.prompt, outcome, 0.0)
    following = client.find(HI, assistant("yo " * 300), user("more"))
    assert (following.turn, following.held_tokens) == (2, 12)
    assert following.new_bytes > 900  # the reply is in no count yet


def test_a_turn_that_did_not_complete_changes_nothing(client: Client) -> None:
    client.find(HI)
    assert len(client.table) == 0
    client.turn(HI)
    client.find(HI, assistant("yo"), user("more"))
    assert client.find(HI, assistant("yo"), user("more")).kind is MatchKind.NEXT


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
    assert (again.kind, again.turn, again.session_id) == (MatchKind.RETRY, 1, first.session_id)
    assert (again.held_tokens, again.new_bytes) == (tokens_of(HI), 0)
    second = client.turn(HI, assistant("yo"), user("more"))
    retried = client.find(HI, assistant("yo"), user("more"))
    assert (retried.kind, retried.turn, retried.session_id) == (MatchKind.RETRY, 2, second.session_id)
    assert (retried.held_tokens, retried.new_bytes) == (tokens_of(HI, assistant("yo"), user("more")), 0)
    assert len(client.table) == 1


def test_a_regenerated_reply_and_the_first_one_can_both_be_continued(client: Client) -> None:
    client.turn(HI)
    client.turn(HI, assistant("yo"), user("more"), reply="one", decode=D1)
    client.turn(HI, assistant("yo"), user("more"), reply="two", decode=D2)
    history = (HI, assistant("yo"), user("more"))
    for reply, held_by in (("one", D1), ("two", D2)):
        place = client.find(*history, assistant(reply), user("go on"))
        assert (place.kind, place.turn, place.decode) == (MatchKind.NEXT, 3, held_by)
        assert place.held_tokens == tokens_of(*history, assistant(reply))


def test_an_edit_of_the_last_message_branches_from_the_turn_before(client: Client) -> None:
    client.turn(HI)
    client.turn(HI, assistant("yo"), user("more"))
    edited = client.turn(HI, assistant("yo"), user("less"), decode=D2)
    assert (edited.kind, edited.turn, edited.decode) == (MatchKind.BRANCH, 2, D1)
    assert edited.held_tokens == tokens_of(HI, assistant("yo"))
    for text, held_by in (("more", D1), ("less", D2)):
        place = client.find(HI, assistant("yo"), user(text), assistant("yo"), user("go on"))
        assert (place.kind, place.turn, place.decode) == (MatchKind.NEXT, 3, held_by)


def test_an_edit_of_the_first_message_is_a_new_conversation(client: Client) -> None:
    first = client.turn(HI)
    edited = client.find(user("hello"))
    assert (edited.kind, edited.turn, edited.held_tokens, edited.decode) == (MatchKind.FIRST, 1, 0, None)
    assert edited.session_id != first.session_id


@pytest.mark.parametrize("edited", range(2, 10))
def test_an_edit_is_placed_at_its_turn(client: Client, edited: int) -> None:
    history = [HI]
    for number in range(2, 10):
        client.turn(*history)
        history += [assistant("yo"), user(f"question {number}")]
    client.turn(*history)
    place = client.find(*history[: 2 * edited - 2], user("something else"))
    assert (place.kind, place.turn, place.decode) == (MatchKind.BRANCH, edited, D1)
    assert place.held_tokens == tokens_of(*history[: 2 * edited - 2])


def test_of_two_turns_at_once_after_one_parent_the_second_becomes_a_session_of_its_own(client: Client) -> None:
    client.turn(HI)
    requests = [client.request(HI, assistant("yo"), user(text)) for text in ("a", "b")]
    places = [client.table.find(request.prompt, 0.0) for request in requests]
    assert [place.kind for place in places] == [MatchKind.NEXT, MatchKind.NEXT]
    for place, request, held_by in zip(places, requests, (D1, D2), strict=True):
        client.finish(place, request, assistant("ok"), 30, held_by)
    assert len(client.table) == 2
    for text, held_by in (("a", D1), ("b", D2)):
        following = client.find(HI, assistant("yo"), user(text), assistant("ok"), user("c"))
        assert (following.kind, following.turn, following.decode) == (MatchKind.NEXT, 3, held_by)


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
    assert client.find(HI, assistant("yo"), user("more"), **members).kind is MatchKind.FIRST


# -- explicit ids


def test_an_id_tells_two_users_with_one_opener_and_one_reply_apart(table: SessionTable) -> None:
    ann, bob = Client(table, x_session_id="ann"), Client(table, x_session_id="bob")
    first, second = ann.turn(HI, decode=D1), bob.turn(HI, decode=D2)
    assert (second.kind, second.turn) == (MatchKind.FIRST, 1)
    assert first.session_id != second.session_id
    for user_, place, held_by in ((ann, first, D1), (bob, second, D2)):
        following = user_.turn(HI, assistant("yo"), user("more"), decode=held_by)
        assert (following.kind, following.turn, following.decode) == (MatchKind.NEXT, 2, held_by)
        assert following.session_id == place.session_id
        retry = user_.find(HI, assistant("yo"), user("more"))
        assert (retry.kind, retry.session_id) == (MatchKind.RETRY, place.session_id)


def test_an_id_keeps_its_session_when_the_history_begins_otherwise(table: SessionTable) -> None:
    client = Client(table, x_session_id="1")
    first = client.turn(HI)
    lost = client.turn(user("a summary of all so far"), reply="ok", decode=D2)
    assert (lost.kind, lost.turn, lost.session_id) == (MatchKind.LOST, 2, first.session_id)
    assert (lost.held_tokens, lost.decode, lost.affinity) == (0, None, D1.worker)
    following = client.find(user("a summary of all so far"), assistant("ok"), user("go on"))
    assert (following.kind, following.turn, following.decode) == (MatchKind.NEXT, 3, D2)


def test_an_edit_under_an_id_is_a_branch_of_the_same_session(table: SessionTable) -> None:
    client = Client(table, x_session_id="1")
    first = client.turn(HI)
    client.turn(HI, assistant("yo"), user("more"))
    edited = client.find(HI, assistant("yo"), user("less"))
    assert (edited.kind, edited.turn, edited.session_id) == (MatchKind.BRANCH, 2, first.session_id)
    assert edited.held_tokens == tokens_of(HI, assistant("yo"))


def test_a_session_without_an_id_takes_the_first_one_it_is_given(table: SessionTable) -> None:
    nameless, named = Client(table), Client(table, x_session_id="1")
    nameless.turn(HI)
    second = named.turn(HI, assistant("yo"), user("more"))
    assert (second.kind, second.turn) == (MatchKind.NEXT, 2)
    assert len(table) == 1
    third = named.find(HI, assistant("yo"), user("more"), assistant("yo"), user("on"))
    assert (third.turn, third.session_id) == (3, second.session_id)


def test_another_id_on_a_known_history_is_a_branch_of_its_own(table: SessionTable) -> None:
    first = Client(table, x_session_id="1").turn(HI)
    other = Client(table, x_session_id="2").find(HI, assistant("yo"), user("more"))
    assert (other.kind, other.turn, other.decode) == (MatchKind.BRANCH, 2, D1)
    assert other.session_id != first.session_id


def test_a_request_that_forgets_its_id_still_continues(table: SessionTable) -> None:
    first = Client(table, x_session_id="1").turn(HI)
    place = Client(table).find(HI, assistant("yo"), user("more"))
    assert (place.kind, place.session_id) == (MatchKind.NEXT, first.session_id)


def test_users_who_share_one_key_keep_their_own_workers(client: Client) -> None:
    """An application may send one `prompt_cache_key` for all its users."""
    users = {f"user {number}": replace(D1, worker=WorkerId(f"d{number}:80")) for number in range(20)}
    for name, held_by in users.items():
        client.turn(user(name), decode=held_by, prompt_cache_key="app")
    for name, held_by in users.items():
        place = client.find(user(name), assistant("yo"), user("more"), prompt_cache_key="app")
        assert place.decode == held_by
        assert place.held_tokens == tokens_of(user(name), assistant("yo"))


# -- the paper's key


def test_the_papers_key_counts_the_requests_with_one_opener(table: SessionTable) -> None:
    client, key = Client(table, x_session_id="ignored"), SessionKey.FIRST_USER_MESSAGE
    first = client.turn(HI, session_key=key)
    second = client.turn(SYSTEM, HI, assistant("edited"), user("a"), session_key=key)
    retry = client.turn(SYSTEM, HI, assistant("edited"), user("a"), session_key=key)
    third = client.find(HI, user("b"), session_key=key)
    assert [place.turn for place in (first, second, retry, third)] == [1, 2, 2, 3]
    assert [place.kind for place in (first, second, retry, third)] == [
        MatchKind.FIRST,
        MatchKind.NEXT,
        MatchKind.RETRY,
        MatchKind.NEXT,
    ]
    assert len({place.session_id for place in (first, second, retry, third)}) == 1
    assert second.held_tokens == tokens_of(HI, assistant("yo"))
    assert retry.held_tokens == tokens_of(SYSTEM, HI, assistant("edited"), user("a"))
    assert third.held_tokens == tokens_of(SYSTEM, HI, assistant("edited"), user("a"), assistant("yo"))
    assert third.decode == D1
    assert client.find(HI, session_key=key, tenant="u").turn == 1


def test_the_papers_key_tells_new_bytes_by_the_prefix_or_the_last_message(client: Client) -> None:
    key = SessionKey.FIRST_USER_MESSAGE
    client.turn(HI, reply="y" * 500, session_key=key)
    grown = client.find(HI, assistant("y" * 500), user("z" * 50), session_key=key)
    assert (grown.kind, grown.turn, 50 <= grown.new_bytes < 100) == (MatchKind.NEXT, 2, True)
    assert 50 <= client.find(SYSTEM, HI, assistant("y" * 500), user("z" * 50), session_key=key).new_bytes < 100


# -- real conversations


def conversations(name: str) -> list[list[Message]]:
    return [json.loads(line)["messages"] for line in (DATA / name).read_text().splitlines()]


def prompts_of(messages: list[Message]) -> list[tuple[list[Message], Message]]:
    """Each request of a conversation, and the reply to it."""
    return [(messages[:at], message) for at, message in enumerate(messages) if message["role"] == "assistant"]


def play(client: Client, prompt: list[Message], reply: Message) -> SessionMatch:
    request = client.request(*prompt)
    place = client.table.find(request.prompt, client.now_s)
    client.finish(place, request, reply, tokens_of(*prompt))
    return place


def expected(prompt: list[Message], kind: MatchKind = MatchKind.NEXT) -> tuple[int, int]:
    """The turn, and the tokens of all up to the last reply; of all, if it was sent before."""
    replies = [at for at, message in enumerate(prompt) if message["role"] == "assistant"]
    held = prompt if kind is MatchKind.RETRY else prompt[: replies[-1] + 1] if replies else []
    return len(replies) + 1, tokens_of(*held)


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
        assert (place.turn, place.held_tokens) == expected(prompt, place.kind)
