"""Tool calls have one key, whoever wrote their arguments last and however they were cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.sessions.tool_call_hash import CallHash, CanonicalJson
from tests.support.requests import HASHER


def cut(text: str, at: list[int]) -> list[str]:
    ends = sorted({min(one, len(text)) for one in at} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]


def canonical(text: str) -> str:
    reader = CanonicalJson()
    return reader.feed(text) + reader.rest()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{ "a" : [1, 2.50] }\n', '{"a":[1,2.50]}'),
        ('{"a": "x  y"}', '{"a":"x  y"}'),
        ('"\\u00e9\\/\\n"', '"é/\n"'),
        ('"\\ud83d\\ude00"', '"😀"'),
        ('"\\u0022\\u005c"', '"\\"\\\\"'),
        ('"\\\\u0041"', '"\\\\u0041"'),
        ('"\\"" x', '"\\""x'),
        ("not json, cut \\u12", "notjson,cut\\u12"),
        ('"\\u12', '"\\u12'),
    ],
)
def test_arguments_have_one_form_however_they_were_written(text: str, expected: str) -> None:
    assert canonical(text) == expected


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_serialisers_agree_on_the_canonical_form(value: object) -> None:
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert canonical(json.dumps(value)) == canonical(json.dumps(value, indent=2)) == canonical(compact)


@given(st.text(alphabet='{}[]",:\\u0dD8eE c9/n😀') | st.text(), st.lists(st.integers(0, 60)))
def test_the_canonical_form_does_not_depend_on_cuts(text: str, at: list[int]) -> None:
    reader = CanonicalJson()
    streamed = "".join(reader.feed(piece) for piece in cut(text, at)) + reader.rest()
    assert streamed == canonical(text)


def test_calls_differ_by_id_name_and_arguments() -> None:
    def call(id: str, name: str, arguments: str) -> int:
        made = CallHash(HASHER, id, name)
        made.add(arguments)
        return made.key()

    keys = [call("1", "f", "{}"), call("2", "f", "{}"), call("1", "g", "{}"), call("1", "f", '{"a":1}')]
    assert len(set(keys)) == 4
    assert call("1", "f", "") == keys[0]
    assert call("1", "f", '{"b": 1, "a": 2}') != call("1", "f", '{"a": 2, "b": 1}')
