from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ppd.proxy.openai.answer import AnswerObserver
from ppd.proxy.openai.edits import edited_body
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.openai.stream_relay import Edits, StreamRelay

KV = {"remote_host": "10.0.0.5", "remote_block_ids": [[1]]}
USAGE = {"prompt_tokens": 30, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 30, "other": 1}}
COUNTED = {"prompt_tokens": 30, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 16, "other": 1}}
CHOICE = {"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}
INPUT_USAGE = {"input_tokens": 30, "input_tokens_details": {"cached_tokens": 30}, "output_tokens": 4}
INPUT_COUNTED = {"input_tokens": 30, "input_tokens_details": {"cached_tokens": 16}, "output_tokens": 4}
READ_USAGE = {"input_tokens": 0, "cache_read_input_tokens": 30, "output_tokens": 4}
READ_COUNTED = {"input_tokens": 14, "cache_read_input_tokens": 16, "output_tokens": 4}

NONE = Edits()
HIDE = Edits(hide_usage=True)
COUNT = Edits(cached_tokens=16)


def relayed(endpoint: Endpoint, edits: Edits, event: bytes) -> bytes:
    return StreamRelay(endpoint, edits, AnswerObserver(endpoint)).feed(event)


def as_event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


@pytest.mark.parametrize(
    ("endpoint", "edits", "given", "expected"),
    [
        (Endpoint.CHAT, NONE, {"choices": [CHOICE], "kv_transfer_params": KV}, {"choices": [CHOICE]}),
        (Endpoint.COMPLETIONS, NONE, {"choices": [], "ec_transfer_params": KV}, {"choices": []}),
        (Endpoint.CHAT, HIDE, {"choices": [CHOICE], "usage": USAGE}, {"choices": [CHOICE]}),
        (Endpoint.CHAT, COUNT, {"choices": [], "usage": USAGE}, {"choices": [], "usage": COUNTED}),
        (Endpoint.COMPLETIONS, COUNT, {"choices": [CHOICE], "usage": USAGE}, {"choices": [CHOICE], "usage": COUNTED}),
        (
            Endpoint.RESPONSES,
            COUNT,
            {"type": "response.completed", "response": {"usage": INPUT_USAGE, "kv_transfer_params": KV}},
            {"type": "response.completed", "response": {"usage": INPUT_COUNTED}},
        ),
        (
            Endpoint.MESSAGES,
            COUNT,
            {"type": "message_delta", "usage": READ_USAGE, "kv_transfer_params": KV},
            {"type": "message_delta", "usage": READ_COUNTED},
        ),
        (
            Endpoint.MESSAGES,
            COUNT,
            {"type": "message_start", "message": {"usage": READ_USAGE, "kv_transfer_params": KV}},
            {"type": "message_start", "message": {"usage": READ_COUNTED}},
        ),
    ],
)
def test_events_are_edited(endpoint: Endpoint, edits: Edits, given: Any, expected: Any) -> None:
    assert relayed(endpoint, edits, as_event(given)) == as_event(expected)


def test_a_usage_chunk_that_the_client_did_not_ask_for_is_dropped() -> None:
    assert relayed(Endpoint.CHAT, HIDE, as_event({"choices": [], "usage": USAGE})) == b""


def test_other_lines_of_an_edited_event_stay() -> None:
    event = b'event: response.completed\r\ndata: {"response": {"kv_transfer_params": {"a": 1}, "id" : "r"}}\r\n\r\n'
    expected = b'event: response.completed\r\ndata: {"response":{"id":"r"}}\r\n\r\n'
    assert relayed(Endpoint.RESPONSES, NONE, event) == expected


UNTOUCHED = [
    (Endpoint.CHAT, NONE, b'{"choices": [ ], "usage": {"prompt_tokens": 1.0}}'),
    (Endpoint.CHAT, NONE, b'{"kv_transfer_params": null, "x": 1}'),
    (Endpoint.CHAT, HIDE, b'{"choices": [{"delta": {"content": "the \\"usage\\" of it"}}]}'),
    (Endpoint.CHAT, HIDE, b'{"choices": [{"delta": {"content": "usage"}}], "usage": null}'),
    (Endpoint.CHAT, HIDE, b'{"choices": [{"delta": {"content": "\\"kv_transfer_params\\": {}"}}]}'),
    (Endpoint.CHAT, COUNT, b'{"usage": {"prompt_tokens": 3, "prompt_tokens_details": null}}'),
    (Endpoint.CHAT, COUNT, b'{"usage": {"prompt_tokens_details": {"cached_tokens": null}}}'),
    (Endpoint.MESSAGES, COUNT, b'{"usage": {"input_tokens": 3, "cache_read_input_tokens": null}}'),
    (Endpoint.MESSAGES, HIDE, b'{"type": "message_delta", "delta": {}}'),
    (Endpoint.RESPONSES, COUNT, b'{"type": "x", "response": "cached_tokens"}'),
    (Endpoint.CHAT, HIDE, b'{"usage": '),
    (Endpoint.CHAT, HIDE, b"[DONE]"),
]


@pytest.mark.parametrize(("endpoint", "edits", "data"), UNTOUCHED)
def test_what_needs_no_edit_stays_verbatim(endpoint: Endpoint, edits: Edits, data: bytes) -> None:
    event = b"data: " + data + b"\n\n"
    assert relayed(endpoint, edits, event) is event
    assert edited_body(data, edits) is data


@pytest.mark.parametrize(
    ("endpoint", "edits", "given", "expected"),
    [
        (Endpoint.CHAT, HIDE, {"usage": USAGE, "kv_transfer_params": KV}, {"usage": USAGE}),
        (Endpoint.CHAT, COUNT, {"usage": USAGE}, {"usage": COUNTED}),
        (Endpoint.RESPONSES, COUNT, {"usage": INPUT_USAGE, "ec_transfer_params": KV}, {"usage": INPUT_COUNTED}),
        (Endpoint.MESSAGES, COUNT, {"usage": READ_USAGE}, {"usage": READ_COUNTED}),
    ],
)
def test_bodies_are_edited(endpoint: Endpoint, edits: Edits, given: Any, expected: Any) -> None:
    assert edited_body(msgspec.json.encode(given), edits) == msgspec.json.encode(expected)


def test_the_rest_of_an_edited_body_stays_verbatim() -> None:
    body = b'{"choices":[ {"message" : {"content":"\\u00e9"}} ],"n":1.50,"kv_transfer_params":{"a":1}}'
    expected = b'{"choices":[ {"message" : {"content":"\\u00e9"}} ],"n":1.50}'
    assert edited_body(body, NONE) == expected


def test_a_body_shows_its_usage_asked_for_or_not() -> None:
    body = b'{"choices":[],"usage":{"prompt_tokens":1}}'
    assert edited_body(body, HIDE) is body
