"""What the model reads as a chain: what makes two prompts one, endpoint by endpoint."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.openai.request import Endpoint
from ppd.proxy.sessions.session import response_key
from ppd.proxy.sessions.text_kinds import kind_of
from tests.support.requests import (
    CHAT,
    COMPLETIONS,
    HASHER,
    MESSAGES,
    RESPONSES,
    USER,
    assistant,
    call,
    image,
    keys,
    parse,
    parse_bytes,
    text,
    user,
)

# -- what makes two prompts one


def developer(**members: Any) -> dict[str, Any]:
    return {"role": "developer", "content": "hi", **members}


SAME = {
    "a client's line of billing": (
        [{"role": "system", "content": "x-anthropic-billing-header: cch=1;\nYou cook."}],
        [{"role": "system", "content": [text("x-anthropic-billing-header: cch=2;\nYou cook.")]}],
    ),
    "a string and its one text part": ([user("hi")], [user([text("hi")])]),
    "a part that is a bare string": ([user("hi")], [user(["hi"])]),
    "content that is null, empty, absent": ([assistant(None)], [{"role": "assistant"}]),
    "empty text": ([assistant("")], [assistant([])]),
    "null members, as SDKs echo them": (
        [assistant("yo", refusal=None, annotations=[], audio=None, function_call=None, tool_calls=None)],
        [assistant("yo")],
    ),
    "no tool calls": ([assistant("yo", tool_calls=[])], [assistant("yo")]),
    "reasoning": ([assistant("yo", reasoning="hm", reasoning_content="hm")], [assistant("yo")]),
    "thinking blocks": ([assistant([{"type": "thinking", "thinking": "hm"}, text("yo")])], [assistant("yo")]),
    "cache marks": ([user([text("hi", cache_control={"type": "ephemeral"})])], [user("hi")]),
    "the kind of text part": ([user([{"type": "input_text", "text": "hi"}])], [user("hi")]),
    "a call's index and type": ([assistant(tool_calls=[call(index=0)])], [assistant(tool_calls=[call()])]),
    "whitespace in arguments": (
        [assistant(tool_calls=[call(arguments='{"a": 1, "b": "x y"}')])],
        [assistant(tool_calls=[call(arguments='{"a":1,"b":"x y"}')])],
    ),
    "a call's id": ([assistant(tool_calls=[call(id="c1")])], [assistant(tool_calls=[call(id="c2")])]),
    "escapes in arguments": (
        [assistant(tool_calls=[call(arguments='{"a":"\\u00e9\\/"}')])],
        [assistant(tool_calls=[call(arguments='{"a":"é/"}')])],
    ),
    "arguments as an object": (
        [assistant(tool_calls=[call(arguments={"a": 1})])],
        [assistant(tool_calls=[call(arguments='{"a":1}')])],
    ),
    "no arguments": (
        [assistant(tool_calls=[call(arguments="")])],
        [assistant(tool_calls=[call(arguments="{}")])],
    ),
    "the two ways to write an image": (
        [user([{"type": "image_url", "image_url": "http://x/y.png"}])],
        [user([image("http://x/y.png", detail="auto")])],
    ),
    "tools of a message that no template reads": ([user("hi", tools=[{"name": "f"}])], [user("hi")]),
    "no tools of a developer's message": ([developer(tools=[], task=None)], [developer(tools=None)]),
    "a client's names of media": ([user([{**image("u"), "uuid": "1"}])], [user([{**image("u"), "uuid": "2"}])]),
}

DIFFERENT = {
    "what follows a client's line of billing": (
        [{"role": "system", "content": "x-anthropic-billing-header: cch=1;\nYou cook."}],
        [{"role": "system", "content": "x-anthropic-billing-header: cch=1;\nYou sew."}],
    ),
    "text": ([user("hi")], [user("ho")]),
    "role": ([user("hi")], [{"role": "system", "content": "hi"}]),
    "two parts and their join": ([user([text("a"), text("b")])], [user("ab")]),
    "the order of parts": ([user([text("a"), image("u")])], [user([image("u"), text("a")])]),
    "a message split in two": ([user([text("a"), text("b")])], [user("a"), user("b")]),
    "name": ([user("hi", name="ann")], [user("hi", name="bob")]),
    "images": ([user([image("data:,A")])], [user([image("data:,B")])]),
    "detail": ([user([image("u", detail="low")])], [user([image("u", detail="high")])]),
    "call name": ([assistant(tool_calls=[call(name="f")])], [assistant(tool_calls=[call(name="g")])]),
    "arguments": (
        [assistant(tool_calls=[call(arguments='{"a":1}')])],
        [assistant(tool_calls=[call(arguments='{"a":2}')])],
    ),
    "space inside an argument": (
        [assistant(tool_calls=[call(arguments='{"a":"x y"}')])],
        [assistant(tool_calls=[call(arguments='{"a":"xy"}')])],
    ),
    "the number of calls": (
        [assistant(tool_calls=[call()])],
        [assistant(tool_calls=[call(), call()])],
    ),
    "the call that a result answers": (
        [{"role": "tool", "content": "4", "tool_call_id": "c1"}],
        [{"role": "tool", "content": "4", "tool_call_id": "c2"}],
    ),
    "tools of a developer's message": ([developer(tools=[{"name": "f"}])], [developer(tools=[{"name": "g"}])]),
    "its tools and none": ([developer(tools=[{"name": "f"}])], [developer()]),
    "the task of a message": ([user("hi", task="title")], [user("hi", task="query")]),
    "its task and none": ([user("hi", task="title")], [user("hi")]),
    "a call and its text": ([assistant(tool_calls=[call()])], [assistant("f{}")]),
}


@pytest.mark.parametrize("case", SAME)
def test_what_does_not_count(case: str) -> None:
    one, other = SAME[case]
    assert keys(*one) == keys(*other)


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_counts(case: str) -> None:
    one, other = DIFFERENT[case]
    assert keys(*one)[-1] != keys(*other)[-1]


@pytest.mark.parametrize(
    "members",
    [
        {"tools": {"f": "not a list"}},
        {"functions": [{"name": "f"}]},
        {"cache_salt": "s"},
        {"chat_template": "x"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"text": "d"}]},
        {"reasoning_effort": "high"},
        {"model": "other"},
    ],
)
def test_what_is_rendered_first_is_in_every_key(members: dict[str, Any]) -> None:
    assert set(keys(USER)).isdisjoint(keys(USER, **members))


@pytest.mark.parametrize(
    "members",
    [
        {"temperature": 0.5},
        {"tool_choice": "none"},
        {"stream": True},
        {"user": "u"},
        {"tools": []},
        {"tools": None},
        {"cache_salt": None},
        {"chat_template_kwargs": {}},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        {"session_id": "s"},
        {"kv_transfer_params": {"x": 1}},
    ],
)
def test_what_is_not_rendered_is_in_no_key(members: dict[str, Any]) -> None:
    assert keys(USER, **members) == keys(USER)


def test_tenants_are_apart() -> None:
    body = json.dumps({"model": "m", "messages": [USER]}).encode()
    assert parse_bytes(body, tenant="a").prompt.chain.keys != parse_bytes(body, tenant="b").prompt.chain.keys


def test_endpoints_are_apart() -> None:
    assert parse(CHAT, [USER]).prompt.chain.keys != parse(MESSAGES, [USER]).prompt.chain.keys


def test_the_order_of_members_and_whitespace_do_not_matter() -> None:
    one = b'{"model":"m","tools":[{"name":"f","p":{"a":1,"b":null}}],"messages":[{"role":"user","content":"hi"}]}'
    other = (
        b'{ "messages" : [ { "content":"h\\u0069", "role":"user" } ],\n "tools":[{"p":{"a":1},"name":"f"}],"model":"m"}'
    )
    chains = [parse_bytes(body).prompt.chain for body in (one, other)]
    told = [(chain.keys, chain.ends, chain.marks, [*map(kind_of, chain.texts)]) for chain in chains]
    assert told[0] == told[1]


@pytest.mark.parametrize("endpoint", [CHAT, MESSAGES])
def test_a_conversation_begins_with_the_keys_of_its_earlier_turns(endpoint: Endpoint) -> None:
    history = [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    chains = [parse(endpoint, history[:length]).prompt.chain for length in (1, 3, 5)]
    for earlier, later in pairwise(chains):
        assert later.keys[: len(earlier.keys)] == earlier.keys
        assert later.ends[: len(earlier.ends)] == earlier.ends


# -- Anthropic's Messages


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("be brief", [text("be brief")], True),
        ("be brief", [text("be brief", cache_control={"type": "ephemeral"})], True),
        ("be brief", [text("x-anthropic-billing-header: cch=1;"), text("be brief")], True),
        ("be brief", "be long", False),
        ("be brief", None, False),
    ],
)
def test_a_system_prompt_is_in_every_key(one: Any, other: Any, same: bool) -> None:
    assert (keys(USER, endpoint=MESSAGES, system=one) == keys(USER, endpoint=MESSAGES, system=other)) is same


def tool_use(**changes: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}, **changes}


def tool_result(**changes: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": "4", **changes}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (tool_result(), tool_result(content=[text("4")]), True),
        (tool_result(), tool_result(is_error=False, cache_control={"type": "ephemeral"}), True),
        (tool_result(), tool_result(is_error=True), False),
        (tool_result(), tool_result(tool_use_id="t2"), False),
        (tool_result(), tool_result(content="5"), False),
        (tool_use(), tool_use(cache_control={"type": "ephemeral"}), True),
        (tool_use(), tool_use(input={"a": 2}), False),
        (tool_use(), tool_use(id="t2"), True),
        (
            {"type": "image", "source": {"type": "url", "url": "u"}},
            {"type": "image", "source": {"url": "u", "type": "url"}},
            True,
        ),
        (
            {"type": "image", "source": {"type": "url", "url": "u"}},
            {"type": "image", "source": {"type": "url", "url": "v"}},
            False,
        ),
    ],
)
def test_blocks_of_messages(one: dict[str, Any], other: dict[str, Any], same: bool) -> None:
    assert (keys(user([one]), endpoint=MESSAGES) == keys(user([other]), endpoint=MESSAGES)) is same


# -- Responses


OUTPUT = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "yo", "annotations": [], "logprobs": None}],
}
FUNCTION_CALL = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"}
FUNCTION_OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "4"}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("hi", [user("hi")], True),
        ("hi", [user([{"type": "input_text", "text": "hi"}])], True),
        ([USER, OUTPUT], [USER, assistant("yo")], True),
        ([USER, {"type": "reasoning", "id": "rs", "summary": []}, OUTPUT], [USER, OUTPUT], True),
        ([FUNCTION_CALL], [{**FUNCTION_CALL, "id": "fc_2", "status": "completed"}], True),
        ([FUNCTION_CALL], [{**FUNCTION_CALL, "call_id": "d"}], True),
        ([FUNCTION_OUTPUT], [{**FUNCTION_OUTPUT, "output": [{"type": "input_text", "text": "4"}]}], True),
        ([FUNCTION_OUTPUT], [{**FUNCTION_OUTPUT, "output": "5"}], False),
        ([{"type": "item_reference", "id": "a"}], [{"type": "item_reference", "id": "b"}], False),
        ([{"type": "web_search_call", "id": "a", "query": "q"}], [{"type": "web_search_call", "query": "q"}], True),
    ],
)
def test_items_of_responses(one: Any, other: Any, same: bool) -> None:
    assert (parse(RESPONSES, one).prompt.chain.keys == parse(RESPONSES, other).prompt.chain.keys) is same


def test_messages_that_a_client_sends_beside_its_items_are_before_them() -> None:
    one, other = (parse(RESPONSES, "hi", previous_input_messages=[user(said)]).prompt.chain.keys for said in "ab")
    assert set(one).isdisjoint(other)


def test_a_stored_response_stands_for_its_history() -> None:
    first = parse(RESPONSES, "hi")
    following = parse(RESPONSES, "more", previous_response_id="resp_1")
    assert following.prompt.chain.keys[0] == response_key(HASHER, first.prompt.response_scope or 0, "resp_1")
    assert following.prompt.chain.ends[0] == 0
    assert len(following.prompt.chain.keys) == 2
    assert (
        following.prompt.chain.keys[1] != parse(RESPONSES, "more", previous_response_id="resp_2").prompt.chain.keys[1]
    )


def test_only_reasoning_is_still_a_prompt_of_its_own() -> None:
    request = parse(RESPONSES, [{"type": "reasoning", "summary": []}])
    assert len(request.prompt.chain.keys) == 2, "the seed's, and its own"
    assert request.prompt.chain.keys != parse(RESPONSES, "hi").prompt.chain.keys


# -- completions


def test_text_and_token_ids_are_apart() -> None:
    assert parse(COMPLETIONS, "aaaa").prompt.chain.end() != parse(COMPLETIONS, [0x61616161]).prompt.chain.end()
    assert parse(COMPLETIONS, ["hi"]).prompt.chain == parse(COMPLETIONS, "hi").prompt.chain
    assert parse(COMPLETIONS, [[1, 2]]).prompt.chain == parse(COMPLETIONS, [1, 2]).prompt.chain


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1), st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_have_the_prefix_property(ids: list[int], more: list[int]) -> None:
    short, long = parse(COMPLETIONS, ids).prompt.chain, parse(COMPLETIONS, ids + more).prompt.chain
    mark = short.end()
    assert long.reach(long.keys.index(mark.key), mark.tail, mark.check) == 4 * len(ids)
