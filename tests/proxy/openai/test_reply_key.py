"""The reply's key as it streams is the key that the next request has where it echoes the reply."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint, ReadingRules, Request, parse_request
from ppd.proxy.sessions.hasher import Hasher
from ppd.proxy.sessions.prefix_chain import PrefixEnd
from ppd.proxy.sessions.text_cuts import cuts_of

HASHER = Hasher(b"a secret of the proxy")
USER = {"role": "user", "content": "hi"}
NEXT = {"role": "user", "content": "and then?"}
Call = tuple[str, str, str]  # id, name, arguments


def parse(endpoint: Endpoint, **members: Any) -> Request:
    body = json.dumps({"model": "m", **members}).encode()
    return parse_request(endpoint, body, {}, ReadingRules(hasher=HASHER, tenant="t"))


def chat(*messages: dict[str, Any], **members: Any) -> Request:
    return parse(Endpoint.CHAT, messages=messages, **members)


def reply(request: Request, *pieces: str | Call) -> PrefixEnd | None:
    """The key after a reply in which each text or call came whole."""
    key = ReplyKey(request)
    for index, piece in enumerate(pieces):
        if isinstance(piece, str):
            key.add_text(piece)
        else:
            key.add_tool_call(index, *piece)
    return key.key()


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function_call", "id": "fc_9", "call_id": id, "name": name, "arguments": arguments}


def tool_use(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": json.loads(arguments)}


def output_text(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_9", "status": "completed", "role": "assistant", "content": [part]}


def knows(request: Request, end: PrefixEnd | None) -> bool:
    """Whether the request begins with the prefix at `end`."""
    assert end is not None
    places = [place for place, key in enumerate(request.prompt.chain.keys) if key == end.key]
    return any(request.prompt.chain.reach(place, end.tail, end.check) is not None for place in places)


PATCH = ("c1", "apply_patch", '*** Begin Patch\n+say("a \\u00e9")\n')
A, B = ("c1", "f", '{"x": 1}'), ("c2", "g", '{"y": [2, "z z"]}')


@pytest.mark.parametrize(
    ("pieces", "echo"),
    [
        (["yo"], {"content": "yo"}),
        (["yo"], {"content": [{"type": "text", "text": "yo"}], "refusal": None, "tool_calls": []}),
        (["y", "o"], {"content": "yo"}),
        ([], {"content": ""}),
        ([A], {"content": None, "tool_calls": [tool_call(*A)]}),
        ([A], {"tool_calls": [tool_call("c1", "f", '{"x":1}')]}),
        (["let me see", A, B], {"content": "let me see", "tool_calls": [tool_call(*A), tool_call(*B)]}),
        ([A, "after", B], {"content": "after", "tool_calls": [tool_call(*A), tool_call(*B)]}),
    ],
)
def test_chat_echoes_a_reply_as_one_message(pieces: list[str | Call], echo: dict[str, Any]) -> None:
    following = chat(USER, {"role": "assistant", **echo}, NEXT)
    assert following.prompt.chain.keys[2:3] == (reply(chat(USER), *pieces).key,)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("pieces", "blocks"),
    [
        (["yo"], "yo"),
        (["y", "o"], [{"type": "text", "text": "yo", "citations": None}]),
        (["yo", A], [{"type": "text", "text": "yo"}, tool_use(*A)]),
        ([A, "so", B], [tool_use(*A), {"type": "text", "text": "so"}, tool_use(*B)]),
        ([A, B], [{"type": "thinking", "thinking": "hm", "signature": "s"}, tool_use(*A), tool_use(*B)]),
    ],
)
def test_messages_echo_a_reply_as_blocks_in_their_order(pieces: list[str | Call], blocks: Any) -> None:
    following = parse(Endpoint.MESSAGES, messages=[USER, {"role": "assistant", "content": blocks}, NEXT])
    assert knows(following, reply(parse(Endpoint.MESSAGES, messages=[USER]), *pieces))


@pytest.mark.parametrize(
    ("pieces", "items"),
    [
        (["yo"], [output_text("yo")]),
        (["yo"], [{"role": "assistant", "content": "yo"}]),
        (["yo"], [{"type": "reasoning", "id": "rs", "summary": []}, output_text("yo")]),
        ([A, B], [function_call(*A), function_call(*B)]),
        (["yo", A], [output_text("yo"), function_call(*A)]),
        ([A, "so", B], [function_call(*A), output_text("so"), function_call(*B)]),
        ([PATCH], [{"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": PATCH[2]}]),
    ],
)
def test_responses_echo_a_reply_as_items(pieces: list[str | Call], items: list[dict[str, Any]]) -> None:
    following = parse(Endpoint.RESPONSES, input=[USER, *items, NEXT])
    assert knows(following, reply(parse(Endpoint.RESPONSES, input="hi"), *pieces))


@pytest.mark.parametrize("prompt", ["hi ", "é" * 500, ["hi "]])
def test_completions_go_on_with_the_text(prompt: Any) -> None:
    end = reply(parse(Endpoint.COMPLETIONS, prompt=prompt), "thère", " was")
    whole = prompt if isinstance(prompt, str) else prompt[0]
    assert knows(parse(Endpoint.COMPLETIONS, prompt=whole + "thère was"), end)
    assert knows(parse(Endpoint.COMPLETIONS, prompt=whole + "thère was a time"), end)
    assert not knows(parse(Endpoint.COMPLETIONS, prompt=whole + "thère is a time"), end)


def test_a_reply_that_the_client_began_is_echoed_as_one_message() -> None:
    begun = {"role": "assistant", "content": "Once upon"}
    whole = {"role": "assistant", "content": "Once upon a time"}
    following = chat(USER, whole, NEXT)
    assert knows(following, reply(chat(USER, begun, continue_final_message=True), " a time"))
    assert not knows(following, reply(chat(USER, begun), " a time"))
    anthropic = parse(Endpoint.MESSAGES, messages=[USER, whole, NEXT])
    assert knows(anthropic, reply(parse(Endpoint.MESSAGES, messages=[USER, begun]), " a time"))


@pytest.mark.parametrize(
    ("endpoint", "members"),
    [
        (Endpoint.CHAT, {"messages": [USER], "n": 2}),
        (Endpoint.COMPLETIONS, {"prompt": "hi", "echo": True}),
        (Endpoint.COMPLETIONS, {"prompt": ["a", "b"]}),
        (Endpoint.COMPLETIONS, {"prompt": [1, 2, 3]}),
        (Endpoint.COMPLETIONS, {"prompt_embeds": "AAAA"}),
    ],
)
def test_where_no_next_request_could_show_the_reply_there_is_no_key(
    endpoint: Endpoint, members: dict[str, Any]
) -> None:
    key = ReplyKey(parse(endpoint, **members))
    key.add_text("yo")
    key.add_tool_call(0, "c", "f", "{}")
    assert key.key() is None


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.RESPONSES])
def test_an_empty_reply_adds_nothing_to_find(endpoint: Endpoint) -> None:
    assert ReplyKey(parse(endpoint, prompt="hi", input="hi")).key() is None


def test_reasoning_is_noted_and_changes_no_key() -> None:
    key = ReplyKey(chat(USER))
    key.add_reasoning()
    key.add_text("yo")
    assert key.reasoned
    assert key.key() == reply(chat(USER), "yo")


def test_a_request_can_be_answered_twice() -> None:
    request = chat(USER, {"role": "assistant", "content": "a"}, continue_final_message=True)
    assert reply(request, "b") == reply(request, "b") != reply(request, "c")


TEXT = st.text(max_size=60)
CALLS = st.lists(st.tuples(st.text(min_size=1, max_size=5), st.text(min_size=1, max_size=5), TEXT), max_size=3)
CUTS = st.lists(st.integers(0, 60), max_size=6)


def pieces(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({min(one, len(text)) for one in cuts} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]


@given(text=TEXT, calls=CALLS, cuts=CUTS, asked=st.booleans())
@pytest.mark.parametrize("endpoint", Endpoint)
def test_however_a_reply_was_cut_its_key_is_that_of_its_echo(
    endpoint: Endpoint, text: str, calls: list[Call], cuts: list[int], asked: bool
) -> None:
    calls = [(id, name, json.dumps({"a": text, "b": [1, None]})) for id, name, text in calls]
    if endpoint is Endpoint.COMPLETIONS:
        text, calls = text + ".", []
    elif endpoint is Endpoint.RESPONSES:
        text = text + "."
    key = ReplyKey(_prompt(endpoint, "", []))
    for piece in pieces(text, cuts):
        key.add_text(piece)
        if asked:
            key.key()
    for index, (id, name, arguments) in enumerate(calls):
        key.add_tool_call(index, id, name, "")
        for piece in pieces(arguments, cuts):
            key.add_tool_call(index, None, None, piece)
    assert knows(_prompt(endpoint, text, calls, echoed=True), key.key())


def _prompt(endpoint: Endpoint, text: str, calls: list[Call], *, echoed: bool = False) -> Request:
    """The first prompt or, `echoed`, the one that sends the reply back."""
    if endpoint is Endpoint.COMPLETIONS:
        return parse(endpoint, prompt="Tell me. " + (text + " And?" if echoed else ""))
    if endpoint is Endpoint.RESPONSES:
        items = [output_text(text), *(function_call(*call) for call in calls), NEXT]
        return parse(endpoint, input=[USER, *items] if echoed else [USER])
    if endpoint is Endpoint.MESSAGES:
        content: Any = [{"type": "text", "text": text}, *(tool_use(*call) for call in calls)]
        message = {"role": "assistant", "content": content}
    else:
        message = {"role": "assistant", "content": text, "tool_calls": [tool_call(*call) for call in calls]}
    return parse(endpoint, messages=[USER, message, NEXT] if echoed else [USER])


LONG = "a reply that no other session has, as it is longer than a line. " * 20
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("first", "pieces", "is_known"),
    [
        ([SYSTEM, USER], [LONG], True),
        ([SYSTEM, USER], [LONG[:100], LONG[100:1500]], True),
        ([SYSTEM, USER], list(LONG), True),
        ([SYSTEM, USER], [LONG[:63]], False),
        ([SYSTEM, USER], [LONG, A], False),
        ([USER], [LONG], False),  # without a head nothing is in common
        ([SYSTEM, USER, {"role": "assistant", "content": "yo"}, USER], [LONG], False),
    ],
)
@pytest.mark.parametrize("as_list", [False, True])
def test_a_first_reply_is_known_whatever_it_replies_to(
    first: list[Any], pieces: list[str | Call], is_known: bool, as_list: bool
) -> None:
    key = ReplyKey(chat(*first))
    for index, piece in enumerate(pieces):
        if isinstance(piece, str):
            key.add_text(piece)
        else:
            key.add_tool_call(index, *piece)
    said = "".join(piece for piece in pieces if isinstance(piece, str))
    echo: Any = [{"type": "text", "text": said}] if as_list else said
    following = chat(SYSTEM, {"role": "user", "content": "other"}, {"role": "assistant", "content": echo}, NEXT)
    assert (key.alone() in dict(cuts_of(following.prompt.chain))) is is_known
    assert bool(key.alone()) is is_known
