"""JSON's nesting and elements in one pass: what decoding and counting says."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.plane import bones

TEXTS = st.text(max_size=20) | st.sampled_from(['"', "\\", '\\"', "[[[", "{,", ",,,", "x" * 7, "y" * 8, "\\" * 9, "é]"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
)


def depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(depth, inside), default=0)


def elements(value: Any) -> int:
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    own = max(1, len(inside)) if isinstance(value, list) else 0
    return own + sum(map(elements, inside))


def values(value: Any) -> int:
    """With those inside of it; an empty list or object counts as two."""
    if not isinstance(value, dict | list):
        return 1
    return 1 + max(1, sum(map(values, value.values() if isinstance(value, dict) else value)))


def escapes(text: bytes) -> int:
    return len(re.findall(rb"\\.", text, re.DOTALL))


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_of_any_value(value: Any, is_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode()
    found = bones(text)
    assert found == (depth(value), elements(value), values(value) + escapes(text) // 16)
    assert bones(memoryview(b"  " + text)[2:]) == found


@given(st.binary(max_size=200) | st.text(alphabet='[]{}",:\\a', max_size=200).map(str.encode))
def test_of_anything_else_it_only_ends(data: bytes) -> None:
    found = bones(data)
    assert 0 <= found[0] <= len(data) and 0 <= found[1] <= len(data)


@pytest.mark.parametrize("levels", [1, 64, 1023, 1024, 1025, 100_000])
def test_of_deep_nesting(levels: int) -> None:
    assert bones(b"[" * levels + b"]" * levels)[:2] == (levels, min(levels, 1024))
    assert bones(b'{"a":' * levels + b"1" + b"}" * levels)[:2] == (levels, 0)
    assert bones(b"[" * levels)[0] == levels
