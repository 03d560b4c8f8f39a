"""How deep a body is nested, said without decoding it: exact for JSON, whatever its strings hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ppd.proxy.errors import RequestError
from ppd.proxy.openai.units import check_depth, is_deeper
from tests.support.requests import CHAT, depth_of, parse_bytes


def is_refused(body: bytes, limit: int) -> bool:
    try:
        check_depth(body, limit)
    except RequestError:
        return True
    return False


@pytest.mark.parametrize(
    ("body", "depth"),
    [
        (b"5", 0),
        (b'"[[[["', 0),
        (b"[]", 1),
        (b'{"a":{"b":[]}}', 3),
        (b"[[],[],[[]]]", 3),
        (b'["\\"[[[[[",[[1]]]', 3),
        (b'["\\\\",[[1]]]', 3),
        (b'["\\\\\\"]]]]]",[[1]]]', 3),
        (b'["]]]]",[["]"]]]', 3),
        (b'["\\n",[["\\u005b\\t"]]]', 3),
        (b'{"]":{"}":{"[":null}}}', 3),
        (b"[" * 9 + b"]" * 9, 9),
        ('["\u00e9\u4e16\ud7ff", [1]]'.encode(), 2),
    ],
)
def test_the_depth_is_that_of_the_structure_and_not_of_the_text(body: bytes, depth: int) -> None:
    assert [limit for limit in range(12) if is_refused(body, limit)] == list(range(depth))
    assert [limit for limit in range(12) if is_deeper(body, limit)] == list(range(depth))


TEXT = st.text(st.sampled_from('[]{}"\\nu/\t\n tbfr\u00e9'), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(JSON, st.booleans(), st.sampled_from([None, 1]))
@example(["\\", ['"'], [["]"]]], False, None)
def test_it_agrees_with_a_decoder(value: Any, ascii_only: bool, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    depth = depth_of(value)
    assert not is_refused(body, depth)
    assert not is_deeper(body, depth)
    assert depth == 0 or (is_refused(body, depth - 1) and is_deeper(body, depth - 1))


@given(st.binary(max_size=60) | st.text(st.sampled_from('[]{}"\\n'), max_size=40).map(str.encode), st.integers(0, 8))
def test_bytes_that_are_no_json_pass_or_are_refused(body: bytes, limit: int) -> None:
    is_refused(body, limit)
    is_deeper(body, limit)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":' + b"[" * 64 + b"]" * 64 + b"}",
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"unread":' + b"[" * 64 + b"]" * 64 + b"}",
        b'{"model":"m","messages":[{"role":"user","unread":' + b'{"a":' * 62 + b"1" + b"}" * 62 + b"}]}",
        b"[" * 100_000,
    ],
)
def test_a_body_nested_too_deeply_is_refused_with_the_limit_wherever_the_nest_is(body: bytes) -> None:
    with pytest.raises(RequestError, match=r"64 levels \(json_depth_limit\)") as caught:
        parse_bytes(body, CHAT)
    assert caught.value.status == 400


def test_a_body_at_the_limit_is_taken() -> None:
    nest = b"[" * 63 + b"]" * 63
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":' + nest + b"}"
    assert parse_bytes(body, CHAT).model == "m"
