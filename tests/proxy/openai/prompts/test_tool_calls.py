"""Tool calls have one key, whoever wrote their arguments last and however they were cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ppd.proxy import plane
from ppd.proxy.openai.prompts.tool_calls import CallHash, CanonicalJson
from ppd.proxy.sessions.message_units import CallPlaces
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


@pytest.mark.skipif(not plane.IS_BUILT, reason="compiled code does it")
@given(st.text(alphabet='{}[]",:\\u0dD8eE c9/nrbft\t😀é') | st.text() | st.text(alphabet='"\\uabcdDC012389'))
@example('"\\ud83d\\ude00"')
@example('"\\ud83d\\u0041 and more"')
@example('"\\ud83d\\x0041 and more"')
@example('"\\udc00 alone, and so on"')
@example('"\\é\\\\\\"\\q"')
@example('"\\u00e9')
@example('"\\u00e')
@example('"\\')
@example('"\\ud83d\\ude0é and more"')
def test_compiled_code_finds_the_same_form(text: str) -> None:
    reader, found = CanonicalJson(), plane.canonical_json(text.encode("utf-8", "surrogatepass"))
    fed = reader.feed(text)
    if found is not None:
        assert (found.decode("utf-8", "surrogatepass"), reader.rest()) == (fed, "")
    else:
        assert "\\" in text, "and what follows an escape is not all of ASCII, or too short"
    whole, pieces = CallHash(HASHER, "f"), CallHash(HASHER, "f")
    whole.add_all(text)
    pieces.add(text)
    assert (whole.key(), whole.size) == (pieces.key(), pieces.size)


@given(st.text(alphabet='{}[]",:\\u0dD8eE c9/n😀') | st.text(), st.lists(st.integers(0, 60)))
def test_the_canonical_form_does_not_depend_on_cuts(text: str, at: list[int]) -> None:
    reader = CanonicalJson()
    streamed = "".join(reader.feed(piece) for piece in cut(text, at)) + reader.rest()
    assert streamed == canonical(text)


def test_calls_differ_by_id_name_and_arguments() -> None:
    def call(id: str, name: str, arguments: str) -> int:
        made = CallHash(HASHER, name)
        made.id = id
        made.add(arguments)
        return made.key()

    keys = [call("1", "f", "{}"), call("2", "f", "{}"), call("1", "g", "{}"), call("1", "f", '{"a":1}')]
    assert len(set(keys)) == 4
    assert call("1", "f", "") == keys[0]
    assert call("1", "f", '{"b": 1, "a": 2}') != call("1", "f", '{"a": 2, "b": 1}')


# Calls ("+", with an id) and results ("-"), "|" between messages; the places for which the results stand.
ROUNDS = {
    "in order": ("+a +b | -a -b", "#1 #2"),
    "out of order": ("+a +b | -b -a", "#2 #1"),
    "several rounds": ("+a | -a | +b +c | -c -b", "#1 #3 #2"),
    "an id again in the next round": ("+a | -a | +a | -a", "#1 #2"),
    "ids that begin anew": ("+0 +1 | -0 -1 | +0 +1 | -1 -0", "#1 #2 #4 #3"),
    "an id twice in one round": ("+a +a | -a -a", "#1 #2"),
    "an id again, the first without a result": ("+a | +a | -a", "#2"),
    "a result again": ("+a | -a | -a", "#1 #1"),
    "a result before its call": ("-a | +a", "=a"),
    "a result of no call": ("+a | -b", "=b"),
    "an id that looks like a place": ("+a | -#1 -=a", "=#1 ==a"),
    "calls without an id": ("+ +a | -a -", "#2 "),
}


@pytest.mark.parametrize("case", ROUNDS)
def test_results_stand_for_the_places_of_their_calls(case: str) -> None:
    told, expected = ROUNDS[case]
    places, as_they_are = CallPlaces(), CallPlaces(as_they_are=True)
    results = []
    for one in told.split(" "):
        sign, id = one[0], one[1:]
        if sign == "|":
            places.begin_round()
        elif sign == "+":
            assert (places.call(id), as_they_are.call(id)) == ("", id)
        else:
            results.append(places.result(id))
            assert as_they_are.result(id) == id
    assert " ".join(results) == expected


def test_no_id_is_an_empty_one() -> None:
    for places in (CallPlaces(), CallPlaces(as_they_are=True)):
        assert places.call(None) == places.result(None) == ""
