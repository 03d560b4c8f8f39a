from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.connectors.leg import PRIVATE
from ppd.proxy.connectors.prefill import RULES, Version, engine_version, prefill_fields
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.openai.request import Endpoint, Fields

P = Worker(role=Role.PREFILL, address="p:1")
FieldsOf = Callable[[dict[str, Any]], Fields]

MESSAGES = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Grüße, 世界"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
NAMED = {"type": "function", "function": {"name": "look_up"}}
CHAT = {"model": "m", "messages": MESSAGES}
TEXT = {"model": "m", "prompt": "Once upon"}
INPUT = {"model": "m", "input": "Once upon"}
TURN = {"model": "m", "messages": MESSAGES, "max_tokens": 900}

# What every leg of the endpoint ends with.
ENDED = {"max_tokens": 1, "ignore_eos": True}
RESPONSES_ENDED = {"max_output_tokens": 1, "ignore_eos": True, "store": False}


def prefill(endpoint: Endpoint, fields: Fields, engine: Version | None = (0, 33)) -> dict[str, Any]:
    worker = replace(P, engine_version="" if engine is None else f"{engine[0]}.{engine[1]}")
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(prefill_fields(endpoint, fields, worker)))
    return decoded


@pytest.mark.parametrize(
    ("endpoint", "body", "expected"),
    [
        (Endpoint.CHAT, CHAT, {**CHAT, **ENDED}),
        (Endpoint.CHAT, {**CHAT, "max_tokens": 500}, {**CHAT, **ENDED}),
        (Endpoint.CHAT, {**CHAT, "max_completion_tokens": 500}, {**CHAT, **ENDED, "max_completion_tokens": 1}),
        (Endpoint.CHAT, {**CHAT, "max_tokens": None}, {**CHAT, **ENDED}),
        (
            Endpoint.CHAT,
            {**CHAT, "stream": True, "stream_options": {"include_usage": True}},
            {**CHAT, **ENDED, "stream": False},
        ),
        (Endpoint.CHAT, {**CHAT, "min_tokens": 20, "min_completion_tokens": 20}, {**CHAT, **ENDED}),
        (
            Endpoint.CHAT,
            {**CHAT, "n": 4, "best_of": 4, "use_beam_search": True, "length_penalty": 0.9},
            {**CHAT, **ENDED, "n": 1, "length_penalty": 0.9},
        ),
        (
            Endpoint.CHAT,
            {**CHAT, "logprobs": True, "top_logprobs": 5, "prompt_logprobs": 1, "logprob_token_ids": [1]},
            {**CHAT, **ENDED},
        ),
        (
            Endpoint.CHAT,
            {**CHAT, "stop": ["\n"], "stop_token_ids": [2], "ignore_eos": False, "echo": True},
            {**CHAT, **ENDED},
        ),
        (Endpoint.CHAT, {**CHAT, "return_token_ids": True, "return_prompt_text": True}, {**CHAT, **ENDED}),
        (
            Endpoint.CHAT,
            {**CHAT, "structured_outputs": {"regex": "a+"}, "guided_json": {}, "guided_choice": ["a"]},
            {**CHAT, **ENDED},
        ),
        (Endpoint.COMPLETIONS, {**TEXT, "logprobs": 3, "echo": True, "best_of": 2}, {**TEXT, **ENDED}),
        (Endpoint.COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 0}, {"prompt": [1, 2, 3], **ENDED}),
        (Endpoint.RESPONSES, INPUT, {**INPUT, **RESPONSES_ENDED}),
        (
            Endpoint.RESPONSES,
            {**INPUT, "max_output_tokens": 800, "store": True, "background": True, "stream": True, "top_logprobs": 2},
            {**INPUT, **RESPONSES_ENDED, "stream": False},
        ),
        (Endpoint.MESSAGES, TURN, {**TURN, "max_tokens": 1}),
        (
            Endpoint.MESSAGES,
            {**TURN, "stream": True, "stop_sequences": ["END"]},
            {**TURN, "max_tokens": 1, "stream": False},
        ),
    ],
)
def test_the_prefill_leg_asks_for_one_token_and_no_more(
    endpoint: Endpoint, body: dict[str, Any], expected: dict[str, Any], fields_of: FieldsOf
) -> None:
    assert prefill(endpoint, fields_of(body)) == expected


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        (Endpoint.CHAT, {"tools": TOOLS, "tool_choice": "auto"}),
        (Endpoint.CHAT, {"tools": TOOLS, "tool_choice": "none"}),
        (Endpoint.CHAT, {"response_format": {"type": "json_object"}}),
        (Endpoint.CHAT, {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}),
        (Endpoint.CHAT, {"add_generation_prompt": False, "continue_final_message": True, "documents": [{"text": "d"}]}),
        (Endpoint.CHAT, {"cache_salt": "s", "mm_processor_kwargs": {"crops": 4}, "truncate_prompt_tokens": 100}),
        (Endpoint.COMPLETIONS, {"add_special_tokens": False, "cache_salt": "s", "suffix": None}),
        (Endpoint.RESPONSES, {"instructions": "Be brief.", "reasoning": {"effort": "low"}, "tools": TOOLS, "text": {}}),
        (Endpoint.MESSAGES, {"system": "Be brief.", "tools": [], "output_config": {"effort": "low"}}),
    ],
)
def test_what_a_template_can_see_stays(endpoint: Endpoint, shown: dict[str, Any], fields_of: FieldsOf) -> None:
    assert shown.items() <= prefill(endpoint, fields_of({**CHAT, **shown})).items()


@pytest.mark.parametrize("choice", ["required", NAMED, {"type": "any"}, {"type": "tool", "name": "look_up"}])
@pytest.mark.parametrize(("engine", "is_kept"), [((0, 18), False), ((0, 19), True), ((1, 0), True), (None, True)])
def test_a_forced_tool_call_is_kept_from_old_engines_only(
    choice: object, engine: Version | None, is_kept: bool, fields_of: FieldsOf
) -> None:
    body = prefill(Endpoint.CHAT, fields_of({**CHAT, "tools": TOOLS, "tool_choice": choice}), engine)
    assert body["tools"] == TOOLS
    assert ("tool_choice" in body) is is_kept


@pytest.mark.parametrize("choice", ["auto", "none", None, {"type": "auto"}, {"type": "none"}])
def test_a_free_tool_choice_stays_on_any_engine(choice: object, fields_of: FieldsOf) -> None:
    assert prefill(Endpoint.CHAT, fields_of({**CHAT, "tool_choice": choice}), (0, 11))["tool_choice"] == choice


def test_inner_bytes_are_those_of_the_client() -> None:
    body = b'{"messages": [ {"role":"user",  "content":"\\u00fc \\/ 1.0e0"} ], "temperature":1.50,"max_tokens":7}'
    leg = msgspec.json.encode(prefill_fields(Endpoint.CHAT, msgspec.json.decode(body, type=Fields), P))
    assert b'[ {"role":"user",  "content":"\\u00fc \\/ 1.0e0"} ]' in leg
    assert b'"temperature":1.50' in leg


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.33.0", (0, 33)),
        ("v0.19.1rc1", (0, 19)),
        ("0.18.0+cpu", (0, 18)),
        ("1.2", (1, 2)),
        ("", None),
        ("dev", None),
        ("9" * 5000 + ".1", None),
    ],
)
def test_engine_versions(text: str, version: Version | None) -> None:
    assert engine_version(text) == version


def test_every_rule_says_why() -> None:
    assert all(rule.why for rule in RULES)
    assert len({rule.member for rule in RULES}) == len(RULES)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from([rule.member for rule in RULES] + ["messages", "tools", "kv_transfer_params"]) | st.text()


@given(
    endpoint=st.sampled_from(Endpoint),
    body=st.dictionaries(NAMES, JSON, max_size=8),
    engine=st.sampled_from([None, (0, 11), (0, 33)]),
)
def test_no_value_of_any_member_breaks_the_rules(
    endpoint: Endpoint, body: dict[str, Any], engine: Version | None
) -> None:
    fields = msgspec.json.decode(msgspec.json.encode(body), type=Fields)
    leg = prefill(endpoint, fields, engine)
    assert leg.get("stream", False) is False
    assert {leg.get(cap, 1) for cap in ("max_completion_tokens", "n")} == {1}
    assert leg["max_output_tokens" if endpoint is Endpoint.RESPONSES else "max_tokens"] == 1
    assert not {"min_tokens", "stream_options", "best_of", "kv_transfer_params"} & leg.keys()
    rules = {rule.member for rule in RULES}
    assert {name: value for name, value in leg.items() if name not in rules} == {
        name: value for name, value in body.items() if name not in {*rules, "kv_transfer_params", *PRIVATE}
    }
