"""Ids of tool calls: numbered anew in each request they change no key, unless the model's template prints them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint, ReadingRules, Request, parse_request
from ppd.proxy.sessions.templates import Templates
from tests.support.requests import CHAT, HASHER, MESSAGES, RESPONSES, USER, assistant, call, text, user

Ids = Callable[[int], str]  # from the place of a call to its id
Round = tuple[str, int, list[int]]  # a text, how many calls follow it, and the order of their results

PLAIN, PRINTING = Templates(), Templates(("m*",))


def parse(endpoint: Endpoint, messages: list[Any], templates: Templates = PLAIN) -> Request:
    body = {"model": "m", "input" if endpoint is RESPONSES else "messages": messages}
    return parse_request(
        endpoint, json.dumps(body).encode(), {}, ReadingRules(hasher=HASHER, tenant="t", templates=templates)
    )


def arguments(place: int) -> str:
    return json.dumps({"n": place % 2})


def chat_round(said: str, places: list[int], order: list[int], ids: Ids) -> list[Any]:
    calls = [call(id=ids(at), arguments=arguments(at)) for at in places]
    results = [{"role": "tool", "tool_call_id": ids(places[at]), "content": f"r{at}"} for at in order]
    return [assistant(said or None, tool_calls=calls), *results]


def messages_round(said: str, places: list[int], order: list[int], ids: Ids) -> list[Any]:
    begin = [text(said)] if said else []
    calls = [{"type": "tool_use", "id": ids(at), "name": "f", "input": json.loads(arguments(at))} for at in places]
    results = [{"type": "tool_result", "tool_use_id": ids(places[at]), "content": f"r{at}"} for at in order]
    return [assistant([*begin, *calls]), user(results)]


def responses_round(said: str, places: list[int], order: list[int], ids: Ids) -> list[Any]:
    call = {"type": "function_call", "name": "f"}
    calls = [{**call, "call_id": ids(at), "id": f"fc_{ids(at)}", "arguments": arguments(at)} for at in places]
    results = [{"type": "function_call_output", "call_id": ids(places[at]), "output": f"r{at}"} for at in order]
    return [*([assistant(said)] if said else []), *calls, *results]


ROUND = {CHAT: chat_round, MESSAGES: messages_round, RESPONSES: responses_round}
ROUNDS: list[Round] = [("let me see", 2, [0, 1]), ("", 3, [2, 0, 1]), ("and", 1, [0])]
NUMBERED: dict[str, Ids] = {
    "one after the other": lambda at: f"call_{at}",
    "anew in each request": lambda at: f"toolu_{at:032x}",
    "from 0 in each round": lambda at: str((0, 1, 0, 1, 2, 0)[at]),
}


def conversation(endpoint: Endpoint, ids: Ids, rounds: list[Round] = ROUNDS) -> list[Any]:
    messages, place = list[Any]([USER]), 0
    for said, count, order in rounds:
        messages += ROUND[endpoint](said, list(range(place, place + count)), order, ids)
        place += count
    return messages


@pytest.mark.parametrize("endpoint", ROUND)
def test_another_numbering_is_the_same_prompt(endpoint: Endpoint) -> None:
    prompts = [conversation(endpoint, ids) for ids in NUMBERED.values()]
    assert len({parse(endpoint, prompt).prompt.chain.keys for prompt in prompts}) == 1
    assert len({parse(endpoint, prompt, PRINTING).prompt.chain.keys for prompt in prompts}) == len(NUMBERED)


@pytest.mark.parametrize("endpoint", ROUND)
def test_an_id_that_comes_again_is_the_newer_calls_alone(endpoint: Endpoint) -> None:
    """The older one has no result. What is new in the first reading is known in the second."""
    prompts = [conversation(endpoint, ids, [("a", 2, [1]), ("b", 1, [0])]) for ids in NUMBERED.values()]
    read = [parse(endpoint, prompt).prompt.chain.keys for prompt in (*prompts, *prompts)]
    assert len(set(read)) == 1


@pytest.mark.parametrize("endpoint", ROUND)
def test_the_result_of_another_call_is_another_prompt(endpoint: Endpoint) -> None:
    ids = NUMBERED["one after the other"]
    one = conversation(endpoint, ids, [("", 2, [0, 1])])
    swapped = json.loads(json.dumps(one).replace("r0", "r").replace("r1", "r0").replace('"r"', '"r1"'))
    other = parse(endpoint, swapped).prompt.chain
    assert parse(endpoint, one).prompt.chain.keys != other.keys


@pytest.mark.parametrize("templates", [PLAIN, PRINTING])
@pytest.mark.parametrize("endpoint", ROUND)
def test_a_reply_is_known_again_in_its_echo(endpoint: Endpoint, templates: Templates) -> None:
    """With the ids that the engine gave it and, where they are not printed, with any others."""
    before = [("first", 2, [1, 0])]
    first = parse(endpoint, conversation(endpoint, lambda at: f"a{at}", before), templates)
    reply = ReplyKey(first)
    reply.add_text("so")
    for index, place in enumerate((2, 3)):
        reply.add_tool_call(index, f"a{place}", "f", "")
        reply.add_tool_call(index, None, None, arguments(place))
    end = reply.key()
    assert end is not None
    for renumbered in (False, True):
        ids = NUMBERED["from 0 in each round"] if renumbered else lambda at: f"a{at}"
        echo = parse(endpoint, conversation(endpoint, ids, [*before, ("so", 2, [0, 1])]), templates)
        assert (end.key in echo.prompt.chain.keys) is (templates is PLAIN or not renumbered)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"type": "local_shell_call", "call_id": "a"}, {"type": "local_shell_call", "call_id": "b"}, True),
        ({"type": "local_shell_call", "call_id": "a"}, {"type": "local_shell_call", "call_id": "a", "x": 1}, False),
        ({"type": "local_shell_call", "call_id": "a"}, {"type": "local_shell_call", "call_id": "b", "x": 0}, False),
        ({"type": "local_shell_call", "call_id": "a"}, {"type": "local_shell_call", "call_id": "b", "x": None}, True),
        ({"type": "custom_tool_call", "call_id": "a"}, {"type": "custom_tool_call", "call_id": "b"}, True),
    ],
)
def test_other_calls_of_responses_are_known_by_their_places_too(one: Any, other: Any, same: bool) -> None:
    def keys(item: Any, templates: Templates = PLAIN) -> tuple[int, ...]:
        output = {"type": "shell_call_output", "call_id": item["call_id"], "output": "4"}
        return tuple(parse(RESPONSES, [USER, item, output], templates).prompt.chain.keys)

    assert (keys(one) == keys(other)) is same
    assert keys(one, PRINTING) != keys(other, PRINTING)
