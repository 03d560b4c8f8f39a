"""Tools and the system's text as units of the chain, in either order, and where the parts of a prompt end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppd.proxy.openai.request import Endpoint, ReadingRules, parse_request
from ppd.proxy.sessions.hasher import KEPT_UNITS, Hasher
from ppd.proxy.sessions.prefix_chain import Chain, Marks
from ppd.proxy.sessions.templates import Templates
from tests.support.requests import CHAT, HASHER, MESSAGES, RESPONSES, USER, assistant, call, text, user

F, G, H = ({"type": "function", "function": {"name": name, "parameters": {"a": [1, None]}}} for name in "fgh")
SYSTEM = {"role": "system", "content": "be brief"}
OTHER = {"role": "system", "content": "be kind"}
BILLING = text("x-anthropic-billing-header: cch=1;")


def chain(
    *messages: Any, tools: Any = None, tools_first: bool = False, endpoint: Endpoint = CHAT, **members: Any
) -> Chain:
    prompt = "input" if endpoint is RESPONSES else "messages"
    body = {"model": "m", prompt: list(messages) or [USER], **members} | ({} if tools is None else {"tools": tools})
    known = Templates(tools_first=frozenset({"m"} if tools_first else ()))
    return parse_request(
        endpoint, json.dumps(body).encode(), {}, ReadingRules(hasher=HASHER, tenant="t", templates=known)
    ).prompt.chain


def common(one: Chain, other: Chain) -> int:
    """How many keys they have in common from the first on."""
    same = [a == b for a, b in zip(one.keys, other.keys, strict=False)]
    return same.index(False) if False in same else len(same)


# What two prompts share, in keys after the seed: where the system's text is first, and where the tools are.
SHARED: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "another system": ({"tools": [F, G]}, {"tools": [F, G], "system": OTHER}, 0, 2),
    "another last tool": ({"tools": [F, G]}, {"tools": [F, H]}, 2, 1),
    "another first tool": ({"tools": [G, F]}, {"tools": [H, F]}, 1, 0),
    "a tool more": ({"tools": [F]}, {"tools": [F, G]}, 2, 1),
    "no tools at all": ({"tools": [F]}, {}, 1, 0),
    "no system": ({"tools": [F]}, {"tools": [F], "system": None}, 0, 1),
    "other messages": ({"tools": [F, G]}, {"tools": [F, G], "said": "ho"}, 3, 3),
    "cache marks": ({"tools": [F, {**G, "cache_control": {"type": "ephemeral"}}]}, {"tools": [F, G]}, 4, 4),
    "tools written in another way": (
        {"tools": [F, {"b": 1, "a": None}]},
        {"tools": [{**F, "x": None}, {"b": 1}]},
        4,
        4,
    ),
    "what is not an object": ({"tools": ["f", 1, None]}, {"tools": ["f", 1, [2]]}, 3, 2),
    "another seed": ({"tools": [F]}, {"tools": [F], "chat_template": "x"}, -1, -1),
}


@pytest.mark.parametrize("endpoint", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("case", SHARED)
def test_what_two_heads_share(case: str, endpoint: Endpoint) -> None:
    one, other, system_first, tools_first = SHARED[case]

    def made(said: str = "hi", system: Any = SYSTEM, *, first: bool, **members: Any) -> Chain:
        if endpoint is MESSAGES and system:
            return chain(user(said), system=system["content"], tools_first=first, endpoint=endpoint, **members)
        if endpoint is RESPONSES and system:
            return chain(user(said), instructions=system["content"], tools_first=first, endpoint=endpoint, **members)
        return chain(*([system] if system else []), user(said), tools_first=first, endpoint=endpoint, **members)

    assert common(made(**one, first=False), made(**other, first=False)) == 1 + system_first
    assert common(made(**one, first=True), made(**other, first=True)) == 1 + tools_first


@pytest.mark.parametrize("tools", [None, [], [F], [F, G, H]])
@pytest.mark.parametrize("messages", [(USER,), (SYSTEM, USER), (SYSTEM,), (SYSTEM, USER, assistant("yo"), SYSTEM)])
def test_the_order_changes_only_keys_inside_the_head(tools: Any, messages: tuple[Any, ...]) -> None:
    one, other = chain(*messages, tools=tools), chain(*messages, tools=tools, tools_first=True)
    head = one.marks.head
    assert head == other.marks.head == len(tools or ()) + (messages[0] is SYSTEM)
    assert (one.keys[head:], one.ends[head:]) == (other.keys[head:], other.ends[head:])
    inside = range(1, head)
    assert all(one.keys[at] != other.keys[at] for at in inside) or len(tools or ()) == head
    for made in (one, other):
        assert made.head(tools_first=False) == (one.keys[: head + 1], one.ends[: head + 1])
        assert made.head(tools_first=True) == (other.keys[: head + 1], other.ends[: head + 1])
        assert list(made.ends) == sorted(set(made.ends)), "each unit has a size"
        assert made.ends[0] == 0


TOOL_USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "4"}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "4"}
TOOL_ROUND = (assistant(tool_calls=[call()]), {"role": "tool", "content": "4", "tool_call_id": "c1"})


@pytest.mark.parametrize(
    ("endpoint", "messages", "members", "marks"),
    [
        (CHAT, [USER], {}, Marks(first_user=1, last_user=1)),
        (CHAT, [SYSTEM, USER], {}, Marks(system=1, first_user=2, last_user=2)),
        (CHAT, [{**SYSTEM, "role": "developer"}, USER], {}, Marks(system=1, first_user=2, last_user=2)),
        (CHAT, [USER, SYSTEM], {}, Marks(first_user=1, last_user=1)),
        (CHAT, [SYSTEM, OTHER, USER], {}, Marks(system=1, first_user=3, last_user=3)),
        (CHAT, [SYSTEM, USER], {"tools": [F, G]}, Marks(3, 1, 4, 4)),
        (CHAT, [SYSTEM, USER], {"tools": [F, G], "tools_first": True}, Marks(2, 3, 4, 4, tools_first=True)),
        (CHAT, [USER, *TOOL_ROUND], {"tools": [F]}, Marks(1, 0, 2, 2, 3)),
        (CHAT, [USER, assistant("yo"), USER, assistant("so")], {}, Marks(0, 0, 1, 3, 4)),
        (MESSAGES, [USER], {"system": "be brief"}, Marks(0, 1, 2, 2)),
        (MESSAGES, [USER], {"system": []}, Marks(0, 0, 1, 1)),
        (MESSAGES, [USER, assistant([TOOL_USE]), user([RESULT])], {}, Marks(0, 0, 1, 1, 2)),
        (MESSAGES, [USER, assistant([TOOL_USE]), user([RESULT, text("and?")])], {}, Marks(0, 0, 1, 3, 2)),
        (RESPONSES, [USER], {"instructions": "be brief", "tools": [F]}, Marks(2, 1, 3, 3)),
        (RESPONSES, [SYSTEM, USER, CALLED, CALLED, OUTPUT], {}, Marks(0, 1, 2, 2, 4)),
        (RESPONSES, [SYSTEM, USER], {"instructions": "be kind"}, Marks(0, 1, 3, 3)),
        (RESPONSES, [OUTPUT], {"instructions": "be kind", "tools": [F], "previous_response_id": "r"}, Marks()),
    ],
)
def test_where_the_parts_of_a_prompt_end(endpoint: Endpoint, messages: Any, members: Any, marks: Marks) -> None:
    assert chain(*messages, endpoint=endpoint, **members).marks == marks


def test_what_changes_in_a_system_without_being_rendered_changes_no_key() -> None:
    marked = text("be brief", cache_control={"type": "ephemeral", "ttl": "1h"})
    systems: list[Any] = ["be brief", [text("be brief")], [marked], [BILLING, marked], [marked, BILLING]]
    assert len({chain(system=one, endpoint=MESSAGES).keys for one in systems}) == 1
    assert len({chain({"role": "system", "content": one}, USER).keys for one in systems}) == 1


def test_a_system_message_is_one_unit_wherever_it_is_given() -> None:
    given = chain(USER, instructions="be brief", tools=[F], endpoint=RESPONSES)
    assert given.keys == chain(SYSTEM, USER, tools=[F], endpoint=RESPONSES).keys
    beside = chain(USER, system="be brief", tools=[F], endpoint=MESSAGES)
    assert beside.keys == chain(SYSTEM, USER, tools=[F], endpoint=MESSAGES).keys


def test_what_is_in_the_seed_counts_to_the_first_unit() -> None:
    plain, more = chain(SYSTEM, USER, tools=[F]), chain(SYSTEM, USER, tools=[F], documents=[{"text": "d"}])
    assert more.ends[0] == plain.ends[0] == 0
    assert len({theirs - ours for theirs, ours in zip(more.ends[1:], plain.ends[1:], strict=True)}) == 1
    assert more.size > plain.size
    assert chain(USER, documents=[{"text": "d"}]).ends == (0, chain(USER).size + more.size - plain.size)


def test_equal_tools_are_formed_once_and_what_is_kept_of_them_is_bounded() -> None:
    hasher, formed = Hasher(b"a secret of the proxy"), list[bytes]()

    def form(raw: bytes) -> list[bytes]:
        formed.append(raw)
        return [raw] * 30_000

    for raw in (b"a", b"b", b"a", b"c", b"b"):
        assert len(hasher.units(raw, form).keys) == 30_000
    assert formed == [b"a", b"b", b"c"] and KEPT_UNITS == 100_000
    hasher.units(b"d", form)
    hasher.units(b"a", form)
    assert formed == [b"a", b"b", b"c", b"d", b"a"], "all are forgotten when they are too many"
