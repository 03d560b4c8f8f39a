"""A bound on the messages, parts, items, tool calls and tools of a request, counted over its bytes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.errors import RequestError
from ppd.proxy.openai.request import Endpoint, ReadingRules, parse_request
from ppd.proxy.openai.units import MEMBERS_LIMIT, check_members, check_units, structure
from tests.support.requests import CHAT, COMPLETIONS, HASHER, MESSAGES, RESPONSES, USER

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":[1,2,3]}'}}
TEXT = {"type": "text", "text": "one, two [three], {four}"}


def refusal(endpoint: Endpoint, body: dict[str, Any], limit: int) -> RequestError | None:
    try:
        parse_request(
            endpoint,
            json.dumps({"model": "m", **body}).encode(),
            {},
            ReadingRules(hasher=HASHER, tenant="t", units_limit=limit),
        )
    except RequestError as exc:
        return exc
    return None


@pytest.mark.parametrize(
    ("endpoint", "body", "units"),
    [
        (CHAT, {"messages": [USER] * 9}, 9),
        (CHAT, {"messages": [{"role": "user", "content": [TEXT] * 9}]}, 10),
        (CHAT, {"messages": [{"role": "user", "content": ["a,b", "[c", ""] * 3}]}, 10),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL] * 9}]}, 10),
        (CHAT, {"messages": [USER], "tools": [TOOL] * 9}, 10),
        (CHAT, {"messages": [{"role": "user", "content": 'quoted "a, b", [c] \\ "' * 50}]}, 1),
        (RESPONSES, {"input": [{"type": "function_call", "name": "f"}] * 9}, 9),
        (RESPONSES, {"input": "a, b, c [" * 50}, 0),
        (MESSAGES, {"system": [TEXT] * 4, "messages": [USER] * 5}, 9),
        (COMPLETIONS, {"prompt": list(range(100))}, 0),  # token ids are one prompt
        (CHAT, {"messages": [USER], "allowed_token_ids": list(range(100))}, 1),  # left to the worker, unread
    ],
)
def test_units_are_the_elements_of_lists_that_are_read(endpoint: Endpoint, body: dict[str, Any], units: int) -> None:
    assert refusal(endpoint, body, max(1, units)) is None
    if units > 1:
        error = refusal(endpoint, body, units - 1)
        assert error is not None
        assert error.status == 400
        assert f"has {units} units" in error.message
        assert "request_units_limit" in error.message


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(['"', "\\", "[,{", "]:}"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=25,
)


def elements(value: Any) -> int:
    """Of all lists; an empty one counts as one."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(elements, inner)) + (max(1, len(value)) if isinstance(value, list) else 0)


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_units_are_counted_as_a_decoder_would(value: Any, indent: int | None, ascii_only: bool) -> None:
    raw = msgspec.Raw(json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode())
    units = elements(value)
    check_units([raw], max(1, units))
    if units > 1:
        with pytest.raises(RequestError):
            check_units([raw], units - 1)


def names(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(names, inner)) + (len(value) if isinstance(value, dict) else 0)


@given(VALUES)
def test_the_structure_has_a_colon_for_each_name(value: Any) -> None:
    assert structure(json.dumps(value).encode()).count(b":") == names(value)


@pytest.mark.parametrize("one", [b"[],", b'"":0,', b'{"":[]},'])
def test_more_members_than_any_honest_body_has_are_refused(one: bytes) -> None:
    check_members(one * (MEMBERS_LIMIT // 3))
    with pytest.raises(RequestError, match="more than 1000000"):
        check_members(one * (MEMBERS_LIMIT + 1))


@pytest.mark.parametrize("name", ["model", "cache_salt", "max_tokens", "conversation_id", "prompt_cache_key"])
def test_a_member_that_names_something_is_short(name: str) -> None:
    error = refusal(CHAT, {"messages": [USER], name: "x" * 70_000}, 100)
    assert error is not None
    assert (error.status, error.param) == (400, name)
    assert "xxx" not in error.message


@pytest.mark.parametrize("prompt", [["a"] * 1025, [[1]] * 1025, [[]] * 1025])
def test_too_many_prompts_are_refused_before_they_are_hashed(prompt: list[Any]) -> None:
    error = refusal(COMPLETIONS, {"prompt": prompt}, 100)
    assert error is not None
    assert error.message == "prompt: must be a list of at most 1024 prompts"
