"""Answers in a form: always of the form, and always a function of the tokens held."""

from __future__ import annotations

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.servers.sim.core.answer_text import AnswerChain
from ppd.servers.sim.core.structured_text import AnswerForm, Guide, Tool
from ppd.servers.sim.core.tokens import TURN_END, Tokenizer, decode, encode
from tests.support.stepped_engine import Engine, alone

PLACE = {"type": "object", "properties": {"city": {"type": "string"}, "near": {"$ref": "#/$defs/place"}}}
SCHEMAS: dict[str, Any] = {
    "string": {"type": "string"},
    "a short string": {"type": "string", "maxLength": 2},
    "a long string": {"type": "string", "minLength": 40},
    "a date": {"type": "string", "format": "date"},
    "integer": {"type": "integer"},
    "between": {"type": "integer", "minimum": 3, "exclusiveMaximum": 5},
    "below zero": {"type": "integer", "exclusiveMaximum": 0},
    "fourths": {"type": "integer", "minimum": 5, "maximum": 17, "multipleOf": 4},
    "number": {"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.75},
    "halves": {"type": "number", "minimum": 1, "multipleOf": 0.5},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "enum": {"enum": ["kelvin", 'ké"l<|im_end|>', 3, None]},
    "const": {"const": {"a": [1]}},
    "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "two types": {"type": ["string", "null"]},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
    "any object": {"type": "object"},
    "numbers by name": {"type": "object", "additionalProperties": {"type": "integer"}},
    "no property": {"type": "object", "properties": {}, "additionalProperties": False},
    "nested": {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": {"enum": [1, 2]}}, "required": ["b"]}, "c": {}},
        "required": ["a"],
    },
    "a member that is only required": {"type": "object", "properties": {"a": {}}, "required": ["b"]},
    "recursive": {"$ref": "#/$defs/place", "$defs": {"place": PLACE | {"required": ["city"]}}},
    "inherited": {"allOf": [{"$ref": "#/$defs/i"}], "$defs": {"i": {"type": "integer"}}},
}
PIECES = Tokenizer.PIECES
WEATHER = Tool("weather", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
CLOCK = Tool("clock", {"type": "object", "properties": {}})


def written(form: AnswerForm, prompt: str = "hi", most: int = 2000) -> str | None:
    """None if it is not over after `most` tokens; `...` stands for free text."""
    chain, guide, tokens = AnswerChain(b"weights", encode(prompt)), form.guide(), list[int]()
    for _ in range(most):
        token = guide.next_token(chain)
        if token in (None, TURN_END):
            return decode(tokens) + ("..." if token is None else "")
        chain.append(token)
        tokens.append(token)
    return None


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_json_is_of_its_schema_whatever_is_held(schema: dict[str, Any]) -> None:
    for prompt in map(str, range(20)):
        text = written(AnswerForm(schema=schema), prompt)
        assert text is not None
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_json_in_pieces_is_what_a_prompt_with_it_holds(schema: dict[str, Any]) -> None:
    for prompt in map(str, range(8)):
        guide, chain = AnswerForm(schema=schema).guide(PIECES), AnswerChain(b"weights", encode(prompt), PIECES)
        tokens: list[int] = []
        while (token := guide.next_token(chain)) != TURN_END:
            assert token is not None and len(tokens) < 2000
            chain.append(token)
            tokens.append(token)
        text = decode(tokens)
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
        assert PIECES.tokens(text) == tokens or "<|im_end|>" in text


def test_another_history_has_another_value() -> None:
    texts = [written(AnswerForm(schema=SCHEMAS["nested"]), prompt) for prompt in ("one", "one", "two")]
    assert texts[0] == texts[1] != texts[2]


def test_every_tool_and_text_come_up() -> None:
    begun = {(written(AnswerForm(tools=(WEATHER, CLOCK)), str(number)) or "")[:30] for number in range(40)}
    assert {text.split('"')[3] if "name" in text else text for text in begun} == {"weather", "clock", "..."}


def test_a_forced_call_is_never_text() -> None:
    texts = [written(AnswerForm(tools=(CLOCK,), must_call=True), str(number)) for number in range(10)]
    assert set(texts) == {'\n<tool_call>\n{"name":"clock","arguments":{}}\n</tool_call>'}


KEYS = (
    "type enum const properties required additionalProperties items prefixItems anyOf oneOf allOf $ref minimum "
    "maximum exclusiveMinimum multipleOf minLength maxLength minItems maxItems format uniqueItems a".split()
)
LEAVES = st.sampled_from(
    [
        None,
        True,
        -1,
        3,
        1e308,
        -1e308,
        1e-320,
        2**70,
        10**400,
        0.5,
        "#",
        "#/a",
        "string",
        "integer",
        "number",
        "object",
        "array",
    ]
)
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
)


@given(ANYTHING.filter(lambda schema: schema is not None))
def test_any_schema_at_all_gives_json_or_goes_on(schema: Any) -> None:
    text = written(AnswerForm(schema=schema), most=300)
    assert text is None or json.loads(text) is not ...


@pytest.mark.parametrize("kind", ["integer", "number", "string", "array"])
@pytest.mark.parametrize("bound", [10**400, -(10**400), 1e299, 1e-320])
def test_no_bound_is_too_far(kind: str, bound: float) -> None:
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "minItems")
    for name in names:
        written(AnswerForm(schema={"type": kind, name: bound}), most=20)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
        {"allOf": [{"$ref": "#"}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1, "maxItems": 1},
    ],
    ids=["itself", "branch", "part", "member", "item"],
)
def test_a_schema_without_end_is_cut_off(schema: Any) -> None:
    text = written(AnswerForm(schema=schema))
    assert text is not None
    json.loads(text)


def test_a_preempted_form_goes_on_where_it_was() -> None:
    form = AnswerForm(schema=SCHEMAS["a long string"])
    settings = {"max_tokens": 60, "form": form}
    engine = Engine(blocks=16)
    for number in range(3):
        engine.add(f"s{number}", f"{number}" * 4, **settings)
    engine.run()
    assert engine.counters.preemptions > 0
    assert engine.texts == {f"s{number}": alone(f"{number}" * 4, **settings) for number in range(3)}
    assert all(len(json.loads(text)) >= 40 for text in engine.texts.values())


def test_free_text_is_that_of_a_request_without_a_form() -> None:
    prompt = next(text for text in map(str, range(20)) if written(AnswerForm(tools=(CLOCK,)), text) == "...")
    chain = AnswerChain(b"weights", encode(prompt))
    guide: Guide = AnswerForm(tools=(CLOCK,)).guide()
    assert [guide.next_token(chain) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_rankings_fall_from_the_sampled_token_on(count: int) -> None:
    chain = AnswerChain(b"weights", encode("hi"))
    ranking = chain.rank(ord("b"), count)
    odds = [odd for _, odd in ranking]
    assert ranking[0][0] == ord("b")
    assert len({token for token, _ in ranking}) == len(ranking) == max(1, count)
    assert odds == sorted(odds, reverse=True)
    assert odds[0] < 0
    assert ranking != AnswerChain(b"weights", encode("ho")).rank(ord("b"), count)
