from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ppd.proxy.connectors.leg import Handoff, Pair, client_wants_usage, plain_leg
from ppd.proxy.openai.body_members import Edited
from ppd.proxy.openai.edits import Redaction
from ppd.proxy.openai.request import Endpoint, Fields

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}


def fields_of(body: dict[str, Any]) -> Fields:
    return msgspec.json.decode(msgspec.json.encode(body), type=Fields)


@pytest.mark.parametrize(
    ("endpoint", "body", "expected"),
    [
        (Endpoint.CHAT, CHAT, CHAT),
        (Endpoint.CHAT, {**CHAT, "kv_transfer_params": {"do_remote_prefill": True}}, CHAT),
        (Endpoint.CHAT, {**CHAT, "ec_transfer_params": "x", "request_id": "r", "conversation_id": "c"}, CHAT),
        (Endpoint.CHAT, {**CHAT, "session_id": "s"}, {**CHAT, "session_id": "s"}),
        (
            Endpoint.CHAT,
            {**CHAT, "vllm_xargs": {"kv_transfer_params": "x", "ec_transfer_params": "y", "mine": 1}},
            {**CHAT, "vllm_xargs": {"mine": 1}},
        ),
        (Endpoint.CHAT, {**CHAT, "vllm_xargs": [1]}, {**CHAT, "vllm_xargs": [1]}),
        (Endpoint.CHAT, STREAM, {**STREAM, "stream_options": {"include_usage": True}}),
        (
            Endpoint.CHAT,
            {**STREAM, "stream_options": {"include_usage": False, "continuous_usage_stats": True, "x": 1}},
            {**STREAM, "stream_options": {"x": 1, "include_usage": True}},
        ),
        (
            Endpoint.CHAT,
            {**STREAM, "stream_options": None},
            {**STREAM, "stream_options": {"include_usage": True}},
        ),
        (
            Endpoint.CHAT,
            {**STREAM, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            {**STREAM, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
        (Endpoint.CHAT, {**STREAM, "stream_options": "yes"}, {**STREAM, "stream_options": "yes"}),
        (Endpoint.CHAT, {**CHAT, "stream": False}, {**CHAT, "stream": False}),
        (
            Endpoint.COMPLETIONS,
            {"prompt": "p", "stream": True},
            {"prompt": "p", "stream": True, "stream_options": {"include_usage": True}},
        ),
        (Endpoint.RESPONSES, {"input": "i", "stream": True}, {"input": "i", "stream": True}),
        (Endpoint.MESSAGES, STREAM, STREAM),
    ],
)
def test_the_plain_leg(endpoint: Endpoint, body: dict[str, Any], expected: dict[str, Any]) -> None:
    leg = plain_leg(endpoint, fields_of(body), "leg-1")
    assert msgspec.json.decode(leg.body) == expected
    assert (leg.path, leg.headers) == (endpoint.value, {"X-Request-Id": "leg-1"})


def test_an_escaped_name_is_the_same_name() -> None:
    fields = msgspec.json.decode(b'{"kv_transfer\\u005fparams": {"x": 1}, "model": "m"}', type=Fields)
    assert plain_leg(Endpoint.CHAT, fields, "l").body == b'{"model":"m"}'


def test_numbers_that_no_engine_takes_are_not_ours_to_judge() -> None:
    body = b'{"stream":true,"stream_options":{"x":1e999,"y":10000000000000000000000000000}}'
    leg = plain_leg(Endpoint.CHAT, msgspec.json.decode(body, type=Fields), "l")
    assert b'{"x":1e999,"y":10000000000000000000000000000,"include_usage":true}' in leg.body


@pytest.mark.parametrize(
    ("endpoint", "options", "wants"),
    [
        (Endpoint.CHAT, None, False),
        (Endpoint.CHAT, {}, False),
        (Endpoint.CHAT, {"include_usage": None}, False),
        (Endpoint.CHAT, {"include_usage": True}, True),
        (Endpoint.CHAT, {"include_usage": 1}, True),
        (Endpoint.CHAT, [], True),
        (Endpoint.RESPONSES, None, True),
        (Endpoint.MESSAGES, None, True),
    ],
)
def test_who_wants_usage(endpoint: Endpoint, options: object, wants: bool) -> None:
    assert client_wants_usage(endpoint, fields_of({"stream_options": options})) is wants


OTHERS = {"session_id": "s", "prompt_cache_key": "k", "vllm_xargs": {}, "cache_salt": "x", "input_ids": [1]}
SAID = {"model": "m", "priority": 5, **OTHERS}


@pytest.mark.parametrize(
    ("engine", "endpoint", "untaken"),
    [
        ("vllm", Endpoint.CHAT, set()),
        ("sglang", Endpoint.CHAT, {"priority", "input_ids"}),
        ("sglang", Endpoint.COMPLETIONS, {"priority", "input_ids"}),
        ("trtllm", Endpoint.CHAT, {"priority", "session_id", "prompt_cache_key", "vllm_xargs"}),
        ("trtllm", Endpoint.COMPLETIONS, SAID.keys() - {"model", "input_ids"}),
    ],
)
def test_each_engine_is_sent_what_it_takes(engine: str, endpoint: Endpoint, untaken: set[str]) -> None:
    """Also of what is not the client's own, as a tenant's salt."""
    fields = Edited.of(fields_of(SAID), {"cache_salt": msgspec.Raw(b'"tenant"')})
    sent = msgspec.json.decode(plain_leg(endpoint, fields, "l", engine).body)
    assert sent.keys() == SAID.keys() - untaken
    assert sent.get("cache_salt") in ("tenant", None)


@pytest.mark.parametrize(
    ("error", "is_hidden"),
    [
        (b"cannot reach 10.0.0.5:8100", True),
        (b"cannot reach 10.0.0.5:21001", True),
        (b"no engine p-0", True),
        (b"no session 8998", False),  # a number says nothing of where P is
        (b"out of memory", False),
    ],
)
def test_errors_name_no_p_that_has_not_answered_yet(
    make_pair: Callable[..., Pair], error: bytes, is_hidden: bool
) -> None:
    pair = make_pair(of_prefill={"engine_id": "p-0", "bootstrap_port": "8998"})
    assert Redaction("10.0.0.9:8200", Handoff.untold(pair).params.values()).applies_to(error) == is_hidden
