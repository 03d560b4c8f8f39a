from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.openai.answer import ABORTED, AnswerObserver, AnswerSummary
from ppd.proxy.openai.request import Endpoint


class Heard:
    """A sink that keeps what it was given."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: dict[int, list[str]] = {}
        self.reasoned = False

    def add_text(self, text: str) -> None:
        self.text += text

    def add_tool_call(self, index: int, id: str | None, name: str | None, arguments: str) -> None:
        call = self.calls.setdefault(index, ["", "", ""])
        for position, piece in enumerate((id, name, arguments)):
            call[position] += piece or ""

    def add_reasoning(self) -> None:
        self.reasoned = True


def seen(endpoint: Endpoint, *events: Any) -> tuple[AnswerSummary, Heard]:
    heard = Heard()
    observer = AnswerObserver(endpoint, heard)
    for event in events:
        observer.observe(event if isinstance(event, bytes) else msgspec.json.encode(event))
    return observer.summary, heard


def read(endpoint: Endpoint, body: Any) -> tuple[AnswerSummary, Heard]:
    heard = Heard()
    observer = AnswerObserver(endpoint, heard)
    observer.observe_body(body if isinstance(body, bytes) else msgspec.json.encode(body))
    return observer.summary, heard


def delta(finish_reason: str | None = None, index: int = 0, **members: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": members, "logprobs": None, "finish_reason": finish_reason}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice]}


def function(index: int, arguments: str, **members: Any) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": arguments, **members.pop("function", {})}, **members}


OPENAI_USAGE = {
    "prompt_tokens": 30,
    "completion_tokens": 4,
    "total_tokens": 34,
    "prompt_tokens_details": {"cached_tokens": 16, "created_cache_tokens": None},
}
RESPONSES_USAGE = {"input_tokens": 30, "input_tokens_details": {"cached_tokens": 16}, "output_tokens": 4}
DONE = b"[DONE]"
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": ""}}

CHAT_STREAM: tuple[Any, ...] = (
    delta(role="assistant", content=""),
    delta(reasoning="hm"),
    delta(content="Hel"),
    delta(index=1, content="other choice"),
    delta(content="lo"),
    delta(tool_calls=[CALL]),
    delta(tool_calls=[function(0, '{"q":')]),
    delta(tool_calls=[function(0, "1}")]),
    delta(finish_reason="tool_calls"),
    {"id": "chatcmpl-1", "choices": [], "usage": OPENAI_USAGE},
    DONE,
)
CHAT_BODY = {
    "id": "chatcmpl-1",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Hello",
                "reasoning": "hm",
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"q":1}'}}
                ],
            },
            "finish_reason": "tool_calls",
        },
        {"index": 1, "message": {"content": "other choice"}, "finish_reason": "stop"},
    ],
    "usage": OPENAI_USAGE,
    "kv_transfer_params": None,
}
RESPONSES_STREAM: tuple[Any, ...] = (
    {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress", "usage": None}},
    {"type": "response.output_item.added", "output_index": 0, "item": {"type": "message", "id": "m", "content": []}},
    {"type": "response.reasoning_text.delta", "output_index": 0, "delta": "hm"},
    {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "Hel"},
    {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "lo"},
    {
        "type": "response.output_item.added",
        "output_index": 1,
        "item": {"type": "function_call", "id": "fc", "call_id": "call_1", "name": "look_up", "arguments": ""},
    },
    {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": '{"q":'},
    {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": "1}"},
    {"type": "response.completed", "response": {"id": "resp_1", "status": "completed", "usage": RESPONSES_USAGE}},
)
RESPONSES_BODY = {
    "id": "resp_1",
    "status": "completed",
    "output": [
        {"type": "message", "id": "m", "content": [{"type": "output_text", "text": "Hello"}]},
        {"type": "function_call", "id": "fc", "call_id": "call_1", "name": "look_up", "arguments": '{"q":1}'},
        {"type": "reasoning", "id": "rs", "content": [{"type": "reasoning_text", "text": "hm"}]},
    ],
    "usage": RESPONSES_USAGE,
}
MESSAGES_STREAM: tuple[Any, ...] = (
    {"type": "message_start", "message": {"id": "msg_1", "usage": {"input_tokens": 30, "output_tokens": 0}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "content_block_start",
        "index": 1,
        "content_block": {"type": "tool_use", "id": "call_1", "name": "look_up", "input": {}},
    },
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"q":'}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "1}"}},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use"},
        "usage": {"input_tokens": 14, "cache_read_input_tokens": 16, "output_tokens": 4},
    },
    {"type": "message_stop"},
)
MESSAGES_BODY = (
    b'{"id": "msg_1", "type": "message", "content": [{"type": "text", "text": "Hello"},'
    b' {"type": "tool_use", "id": "call_1", "name": "look_up", "input": {"q":1}},'
    b' {"type": "thinking", "thinking": "hm"}], "stop_reason": "tool_use",'
    b' "usage": {"input_tokens": 14, "cache_read_input_tokens": 16, "output_tokens": 4}}'
)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (Endpoint.CHAT, {"choices": [{"index": 0, "message": {"content": "Hel"}, "finish_reason": "abort"}]}),
        (
            Endpoint.COMPLETIONS,
            {"choices": [{"index": at, "text": "x", "finish_reason": end} for at, end in enumerate(("stop", "abort"))]},
        ),
        (Endpoint.MESSAGES, MESSAGES_BODY.replace(b'"stop_reason": "tool_use"', b'"stop_reason": null')),
        (Endpoint.RESPONSES, RESPONSES_BODY | {"status": "cancelled"}),
    ],
)
def test_an_answer_that_its_engine_gave_up_is_told_by_its_end(endpoint: Endpoint, body: Any) -> None:
    assert read(endpoint, body)[0].finish_reason == ABORTED


@pytest.mark.parametrize("others", [("stop",), ("stop", "length"), ("abort",)])
def test_a_stream_was_given_up_where_one_of_its_choices_was(others: tuple[str, ...]) -> None:
    ends = [delta(end, index=at) for at, end in enumerate((*others, "abort"))]
    for events in (ends, ends[::-1]):
        assert seen(Endpoint.CHAT, delta(content="x"), *events, DONE)[0].finish_reason == ABORTED


def test_a_stream_of_a_message_that_its_engine_gave_up_ends_without_a_reason() -> None:
    *begun, end, stop = MESSAGES_STREAM
    assert seen(Endpoint.MESSAGES, *begun, end | {"delta": {"stop_reason": None}})[0].finish_reason is None
    assert seen(Endpoint.MESSAGES, *begun, end | {"delta": {"stop_reason": None}}, stop)[0].finish_reason == ABORTED


@pytest.mark.parametrize(
    ("endpoint", "stream", "body", "response_id", "finish_reason", "index"),
    [
        (Endpoint.CHAT, CHAT_STREAM, CHAT_BODY, None, "tool_calls", 0),
        (Endpoint.RESPONSES, RESPONSES_STREAM, RESPONSES_BODY, "resp_1", "completed", 1),
        (Endpoint.MESSAGES, MESSAGES_STREAM, MESSAGES_BODY, "msg_1", "tool_use", 1),
    ],
)
def test_a_stream_and_a_body_say_the_same(
    endpoint: Endpoint, stream: tuple[Any, ...], body: Any, response_id: str | None, finish_reason: str, index: int
) -> None:
    for summary, heard in (seen(endpoint, *stream), read(endpoint, body)):
        assert (summary.prompt_tokens, summary.completion_tokens, summary.cached_tokens) == (30, 4, 16)
        assert (summary.response_id, summary.finish_reason) == (response_id, finish_reason)
        assert summary.completed and summary.first_token_seen
        assert (summary.undecodable, summary.error) == (0, None)
        assert heard.reasoned
        assert heard.text == "Hello"
        assert heard.calls == {index: ["call_1", "look_up", '{"q":1}']}


def test_a_call_of_a_custom_tool_is_a_call() -> None:
    patch = "*** Begin Patch\n"
    item = {"type": "custom_tool_call", "id": "ctc", "call_id": "call_1", "name": "apply_patch", "input": ""}
    stream = (
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        *({"type": "response.custom_tool_call_input.delta", "output_index": 0, "delta": piece} for piece in patch),
        {"type": "response.output_item.done", "output_index": 0, "item": {**item, "input": patch}},
    )
    body = {"id": "resp_1", "status": "completed", "output": [{**item, "input": patch}]}
    for summary, heard in (seen(Endpoint.RESPONSES, *stream), read(Endpoint.RESPONSES, body)):
        assert summary.first_token_seen
        assert heard.calls == {0: ["call_1", "apply_patch", patch]}


def test_completions() -> None:
    stream = [
        {"id": "cmpl-1", "choices": [{"index": 0, "text": "Hel", "finish_reason": None}]},
        {"id": "cmpl-1", "choices": [{"index": 0, "text": "lo", "finish_reason": "length"}]},
        DONE,
    ]
    summary, heard = seen(Endpoint.COMPLETIONS, *stream)
    assert (heard.text, summary.finish_reason, summary.events) == ("Hello", "length", 2)
    assert summary.completed and summary.prompt_tokens is None
    body = {
        "id": "cmpl-1",
        "choices": [{"index": 0, "text": "Hello", "finish_reason": "length"}],
        "usage": OPENAI_USAGE,
    }
    summary, heard = read(Endpoint.COMPLETIONS, body)
    assert (heard.text, summary.prompt_tokens) == ("Hello", 30)


@pytest.mark.parametrize(
    ("endpoint", "events", "is_seen"),
    [
        (Endpoint.CHAT, [delta(role="assistant", content="")], False),
        (Endpoint.CHAT, [delta(role="assistant", content=""), delta(finish_reason="stop")], False),
        (Endpoint.CHAT, [delta(content="x")], True),
        (Endpoint.CHAT, [delta(reasoning_content="x")], True),
        (Endpoint.CHAT, [delta(tool_calls=[CALL])], True),
        (Endpoint.RESPONSES, RESPONSES_STREAM[:2], False),
        (Endpoint.RESPONSES, [{"type": "response.reasoning_text.delta", "delta": "x"}], True),
        (Endpoint.MESSAGES, MESSAGES_STREAM[:2], False),
        (Endpoint.MESSAGES, [{"type": "content_block_delta", "delta": {"thinking": "x"}}], True),
    ],
)
def test_the_first_token_is_the_first_thing_written(endpoint: Endpoint, events: list[Any], is_seen: bool) -> None:
    assert seen(endpoint, *events)[0].first_token_seen is is_seen


@pytest.mark.parametrize(
    ("endpoint", "events"),
    [
        (Endpoint.CHAT, CHAT_STREAM[:-1]),
        (Endpoint.RESPONSES, RESPONSES_STREAM[:-1]),
        (Endpoint.RESPONSES, (*RESPONSES_STREAM[:-1], DONE)),
        (Endpoint.MESSAGES, MESSAGES_STREAM[:-1]),
        (Endpoint.MESSAGES, (*MESSAGES_STREAM[:-1], DONE)),
    ],
)
def test_a_stream_without_its_terminator_is_not_complete(endpoint: Endpoint, events: tuple[Any, ...]) -> None:
    assert not seen(endpoint, *events)[0].completed


FAILED = {"id": "resp_1", "status": "failed", "error": {"code": "server_error", "message": "m"}}


@pytest.mark.parametrize(
    ("endpoint", "events", "error"),
    [
        (Endpoint.CHAT, [{"error": {"message": "m", "code": 500}}, DONE], {"message": "m", "code": 500}),
        (
            Endpoint.CHAT,
            [{"object": "error", "message": "m", "code": 500}],
            {"object": "error", "message": "m", "code": 500},
        ),
        (Endpoint.MESSAGES, [{"type": "error", "error": {"type": "t", "message": "m"}}], {"type": "t", "message": "m"}),
        (
            Endpoint.RESPONSES,
            [{"type": "error", "message": "m", "code": "c", "param": None}],
            {"message": "m", "type": "upstream_error", "param": None, "code": "c"},
        ),
        (
            Endpoint.RESPONSES,
            [{"type": "response.failed", "response": FAILED}],
            {"message": "m", "type": "upstream_error", "param": None, "code": "server_error"},
        ),
        (Endpoint.RESPONSES, [{"error": {"message": "m"}}], {"message": "m"}),
    ],
)
def test_an_error_is_kept_in_openais_shape_and_is_no_completion(
    endpoint: Endpoint, events: list[Any], error: dict[str, Any]
) -> None:
    summary, _ = seen(endpoint, *events)
    assert summary.error is not None and msgspec.json.decode(summary.error)["error"] == error
    assert summary.events == 1
    assert not summary.completed


def test_an_incomplete_response_says_why() -> None:
    response = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "usage": RESPONSES_USAGE}
    summary, _ = seen(Endpoint.RESPONSES, {"type": "response.incomplete", "response": response})
    assert (summary.finish_reason, summary.completed) == ("max_output_tokens", True)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"id": 5, "choices": 5, "type": 5}',
        b"\xff",
        b"[" * 100_000,
        b'{"id": "\\ud800", "type": ',
    ],
)
@pytest.mark.parametrize("endpoint", Endpoint)
def test_what_cannot_be_read_is_counted(endpoint: Endpoint, data: bytes) -> None:
    summary, _ = seen(endpoint, data)
    assert (summary.events, summary.undecodable, summary.completed) == (1, 1, False)
    assert not read(endpoint, data)[0].completed


@given(st.sampled_from(Endpoint), st.lists(st.binary(max_size=60), max_size=5))
def test_garbage_never_raises(endpoint: Endpoint, events: list[bytes]) -> None:
    assert seen(endpoint, *events)[0].undecodable <= len(events)


MEMBERS = ["error", "choices", "usage", "delta", "message", "response", "item", "index", "type", "content", "id"]
SHAPES = st.recursive(
    st.none() | st.integers(-5, 5) | st.sampled_from(["", "error", "message_stop", "function_call", "tool_use"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(MEMBERS), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(Endpoint), st.dictionaries(st.sampled_from(MEMBERS), SHAPES, max_size=5))
def test_json_of_other_shapes_never_raises(endpoint: Endpoint, event: dict[str, Any]) -> None:
    assert seen(endpoint, event)[0].events == 1
    assert read(endpoint, event)[0].events == 1


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
def test_a_number_that_json_lacks_leaves_the_rest_of_the_answer_readable(number: bytes) -> None:
    body = (
        b'{"id":"c","choices":[{"index":0,"message":{"content":"NaN"},"logprobs":{"x":%b},"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":3,"completion_tokens":%b}}' % (number, number)
    )
    summary, heard = read(Endpoint.CHAT, body)
    assert (summary.undecodable, summary.prompt_tokens, summary.completion_tokens) == (0, 3, None)
    assert (heard.text, summary.ended) == ("NaN", True)
    assert read(Endpoint.CHAT, body + b"NaN")[0].undecodable == 1
