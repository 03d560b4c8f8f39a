from __future__ import annotations

from typing import Any

import pytest

from ppd.proxy.errors import ConfigError
from ppd.servers.sim.api.completions import ChatCompletions, Completions
from ppd.servers.sim.api.messages import Messages
from ppd.servers.sim.api.requests import JsonBody
from ppd.servers.sim.api.responses import Responses
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.core.errors import BadRequest, SimError, UnknownName
from ppd.servers.sim.core.sequence import Generation
from ppd.servers.sim.core.tokens import VOCABULARY_SIZE

CONFIG = SimConfig(model="m", loras=("tuned",), max_model_len=100)


def complete(**fields: Any) -> Generation:
    return Completions().read(JsonBody({"prompt": "hi", **fields}), CONFIG)


def chat(**fields: Any) -> Generation:
    return ChatCompletions().read(JsonBody({"messages": [{"role": "user", "content": "hi"}], **fields}), CONFIG)


HI = (104, 105)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", (HI,)),
        ([104, 105], (HI,)),
        (["hi", "hi"], (HI, HI)),
        ([[104, 105], [104]], (HI, (104,))),
    ],
)
def test_prompts_are_text_or_ids_one_or_many(prompt: Any, prompts: tuple[tuple[int, ...], ...]) -> None:
    assert complete(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [None, "", [], [[]], {"a": 1}, [VOCABULARY_SIZE], [-1], ["hi", 3], [True]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(BadRequest):
        complete(prompt=prompt)


@pytest.mark.parametrize(
    ("generation", "limit"),
    [
        (complete(), 16),
        (complete(max_tokens=30), 30),
        (complete(prompt="x" * 90), 10),
        (chat(), 100 - len(chat().prompts[0])),
        (chat(max_tokens=7), 7),
        (chat(max_tokens=7, max_completion_tokens=5), 5),
        (Responses().read(JsonBody({"input": "hi", "max_output_tokens": 9}), CONFIG), 9),
        (Messages().read(JsonBody({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}), CONFIG), 8),
    ],
)
def test_limits(generation: Generation, limit: int) -> None:
    assert generation.sampling.max_tokens == limit


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": 99}, "max_tokens"),
        ({"prompt": "x" * 100}, "input_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"model": 3}, "model"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        complete(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"a"', b"\xff"])
def test_a_body_is_a_json_object(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        JsonBody.decode(raw)


@pytest.mark.parametrize("read", [lambda: complete(model="x"), lambda: chat(model="x")])
def test_an_unknown_model_is_not_found(read: Any) -> None:
    with pytest.raises(UnknownName) as refused:
        read()
    assert refused.value.status == 404


def test_adapters_and_salts_are_namespaces_of_their_own() -> None:
    spaces = [complete().namespace, complete(model="tuned").namespace, complete(cache_salt="s").namespace]
    assert len(set(spaces)) == 3
    assert complete(model="m").namespace == spaces[0]


def test_p_may_pass_its_token_ids_on() -> None:
    assert chat(kv_transfer_params={"prompt_token_ids": [1, 2, 3]}).prompts == ((1, 2, 3),)
    with pytest.raises(BadRequest):
        chat(kv_transfer_params={"prompt_token_ids": [-1]})


@pytest.mark.parametrize(
    "read",
    [
        lambda: Responses().read(JsonBody({"input": "hi", "previous_response_id": "resp_1"}), CONFIG),
        lambda: Responses().read(JsonBody({"input": []}), CONFIG),
        lambda: Messages().read(JsonBody({"messages": [{"role": "user", "content": "hi"}]}), CONFIG),
        lambda: Messages().read(JsonBody({"messages": [], "max_tokens": 3}), CONFIG),
    ],
)
def test_the_other_apis_refuse_what_they_cannot_do(read: Any) -> None:
    with pytest.raises(SimError):
        read()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("lease_s", -1),
        ("time_scale", -0.5),
        ("max_model_len", 10**9),
        ("decode_radix_cache", True),
        ("takes_plain", True),
    ],
)
def test_an_impossible_engine_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        SimConfig(**{field: value})
