from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.openai.answer import AnswerObserver, AnswerSummary
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.openai.sse import LIMIT_BYTES
from ppd.proxy.openai.stream_relay import Edits, StreamRelay, broken_off

CHAT = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    b": keep-alive\n\n"
    + 'data: {"id":"c","choices":[{"index":0,"delta":{"content":"Grüße \\"usage\\" 世界"}}]}\n\n'.encode()
    + b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
)
USAGE = (
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":9}}}\n\n'
)
FINISH = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"kv_transfer_params":{"a":1}}\n\n'
DONE = b"data: [DONE]\n\n"
RESPONSES = (
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"r"}}\n\n'
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"Hi"}\n\n'
)
COMPLETED = (
    b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r","status":"completed",'
    b'"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":9},"output_tokens":2}}}\n\n'
)
MESSAGES = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","usage":{"input_tokens":9}}}\n\n'
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"text":"Hi"}}\n\n'
)
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
ERROR = b'data: {"error":{"message":"m","type":"InternalServerError","param":null,"code":500}}\n\n'

WHOLE = [
    (Endpoint.CHAT, CHAT + USAGE + DONE),
    (Endpoint.COMPLETIONS, b'data: {"id":"c","choices":[{"index":0,"text":"Hi"}]}\n\n' + DONE),
    (Endpoint.RESPONSES, RESPONSES + COMPLETED),
    (Endpoint.MESSAGES, MESSAGES + STOP),
    (Endpoint.CHAT, CHAT + ERROR),
    (Endpoint.CHAT, (CHAT + USAGE + DONE).replace(b"\n", b"\r\n")),
    (Endpoint.CHAT, (CHAT + USAGE + DONE).replace(b"\n", b"\r")),
    (Endpoint.CHAT, b"data: not json\n\nid: 7\n\n" + CHAT + DONE + b"\n"),
]
EDITS = [
    Edits(),
    Edits(hide_usage=True),
    Edits(cached_tokens=4),
    Edits(hide_usage=True, cached_tokens=4),
]
CUTS = st.lists(st.integers(0, 10_000), max_size=10)


def relayed(endpoint: Endpoint, edits: Edits, stream: bytes, cuts: list[int]) -> tuple[bytes, AnswerSummary]:
    """What the client gets of a stream that comes in pieces, and what was learned from it."""
    observer = AnswerObserver(endpoint)
    relay = StreamRelay(endpoint, edits, observer)
    bounds = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    parts = [relay.feed(stream[start:end]) for start, end in pairwise(bounds)]
    return b"".join([*parts, relay.finish()]), observer.summary


@given(st.sampled_from(WHOLE), CUTS)
def test_a_stream_without_edits_is_relayed_byte_for_byte(case: tuple[Endpoint, bytes], cuts: list[int]) -> None:
    endpoint, stream = case
    assert relayed(endpoint, Edits(), stream, cuts)[0] == stream


STREAMS = st.sampled_from([stream for _, stream in WHOLE] + [CHAT + FINISH + DONE, CHAT, RESPONSES, CHAT[:-9]])
PIECES = st.lists(
    st.sampled_from([CHAT, USAGE, FINISH, DONE, ERROR, COMPLETED, STOP, b"\n", b"\r", b"\r\n", b"data: ", b"{}"])
    | st.binary(max_size=8),
    max_size=12,
).map(b"".join)


@given(st.sampled_from(Endpoint), st.sampled_from(EDITS), STREAMS | PIECES, CUTS)
def test_splits_change_neither_the_bytes_nor_the_summary(
    endpoint: Endpoint, edits: Edits, stream: bytes, cuts: list[int]
) -> None:
    assert relayed(endpoint, edits, stream, cuts) == relayed(endpoint, edits, stream, [])


@given(st.sampled_from(Endpoint), st.sampled_from(EDITS), st.lists(st.binary(max_size=40), max_size=8))
def test_garbage_never_raises_and_ends_in_an_error(endpoint: Endpoint, edits: Edits, chunks: list[bytes]) -> None:
    observer = AnswerObserver(endpoint)
    relay = StreamRelay(endpoint, edits, observer)
    out = b"".join([*(relay.feed(chunk) for chunk in chunks), relay.finish()])
    assert observer.summary.completed or observer.summary.error or out.endswith(broken_off(endpoint))


def test_a_chunk_of_whole_events_without_edits_is_passed_on_as_it_is() -> None:
    relay = StreamRelay(Endpoint.CHAT, Edits(hide_usage=True, cached_tokens=4), AnswerObserver(Endpoint.CHAT))
    event = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
    assert relay.feed(event) is event


@pytest.mark.parametrize(
    ("endpoint", "terminator"),
    [(Endpoint.CHAT, b""), (Endpoint.CHAT, DONE), (Endpoint.MESSAGES, STOP), (Endpoint.RESPONSES, COMPLETED)],
)
def test_nothing_follows_a_workers_error(endpoint: Endpoint, terminator: bytes) -> None:
    """vLLM ends an error with [DONE]; a client would take what it has for the whole answer."""
    out, summary = relayed(endpoint, Edits(), ERROR + terminator, [])
    assert out == ERROR
    assert summary.error is not None and not summary.completed


def test_half_an_event_waits_for_its_other_half() -> None:
    relay = StreamRelay(Endpoint.CHAT, Edits(), AnswerObserver(Endpoint.CHAT))
    assert relay.feed(FINISH[:30]) == b""
    assert b"kv_transfer_params" not in relay.feed(FINISH[30:])


@pytest.mark.parametrize(
    ("edits", "stream", "expected"),
    [
        (Edits(hide_usage=True), CHAT + USAGE + DONE, CHAT + DONE),
        (
            Edits(cached_tokens=4),
            CHAT + USAGE + DONE,
            CHAT + USAGE.replace(b'"cached_tokens":9', b'"cached_tokens":4') + DONE,
        ),
        (Edits(), FINISH + DONE, FINISH.replace(b',"kv_transfer_params":{"a":1}', b"") + DONE),
    ],
)
def test_only_the_events_to_edit_change(edits: Edits, stream: bytes, expected: bytes) -> None:
    out, summary = relayed(Endpoint.CHAT, edits, stream, [])
    assert out == expected
    assert summary.completed


def test_the_observer_sees_what_the_worker_said() -> None:
    _, summary = relayed(Endpoint.CHAT, Edits(hide_usage=True, cached_tokens=4), CHAT + USAGE + DONE, [])
    assert (summary.prompt_tokens, summary.completion_tokens, summary.cached_tokens) == (9, 2, 9)
    assert summary.events == 4


@pytest.mark.parametrize(
    ("endpoint", "stream", "kept"),
    [
        (Endpoint.CHAT, CHAT, CHAT),
        (Endpoint.CHAT, b"", b""),
        (Endpoint.CHAT, CHAT + b'data: {"id":"c","choi', CHAT),
        (Endpoint.CHAT, CHAT + b": comm", CHAT),
        (Endpoint.CHAT, CHAT + USAGE[:-1], CHAT + USAGE[:-1] + b"\n\n"),
        (Endpoint.RESPONSES, RESPONSES, RESPONSES),
        (Endpoint.RESPONSES, RESPONSES + DONE, RESPONSES + DONE),
        (Endpoint.MESSAGES, MESSAGES, MESSAGES),
    ],
)
def test_a_stream_that_breaks_off_ends_in_an_error_and_no_terminator(
    endpoint: Endpoint, stream: bytes, kept: bytes
) -> None:
    out, summary = relayed(endpoint, Edits(), stream, [])
    assert out == kept + broken_off(endpoint)
    assert not summary.completed


@pytest.mark.parametrize("stream", [CHAT + DONE[:-1], CHAT + DONE[:-2], CHAT + b"data: [DONE]\r\n"])
def test_a_terminator_without_its_blank_line_is_a_terminator(stream: bytes) -> None:
    out, summary = relayed(Endpoint.CHAT, Edits(), stream, [])
    assert summary.completed
    assert out.startswith(stream) and out.endswith(b"\n\n")


def test_a_relay_finishes_once() -> None:
    relay = StreamRelay(Endpoint.CHAT, Edits(), AnswerObserver(Endpoint.CHAT))
    assert relay.finish() == broken_off(Endpoint.CHAT)
    assert relay.finish() == b""


def test_an_endless_event_is_passed_on_and_closed() -> None:
    relay = StreamRelay(Endpoint.CHAT, Edits(), AnswerObserver(Endpoint.CHAT))
    huge = b"data: " + b"x" * LIMIT_BYTES
    assert relay.feed(huge) == huge
    assert relay.feed(b"yy") == b"yy"
    assert relay.finish() == b"\n\n" + broken_off(Endpoint.CHAT)


@pytest.mark.parametrize("endpoint", Endpoint)
def test_the_error_event_is_one_that_the_endpoints_clients_raise_on(endpoint: Endpoint) -> None:
    *head, data = broken_off(endpoint).strip().split(b"\n")
    error: dict[str, Any] = msgspec.json.decode(data.removeprefix(b"data: "))
    assert error["error"]["message"]
    if endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        assert head == [] and set(error["error"]) == {"message", "type", "param", "code"}
    else:
        assert head == [b"event: error"] and error["type"] == "error"


NAN = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"NaN, \\"NaN"},"logprobs":[NaN,-Infinity]}]%b}\n\n'


@pytest.mark.parametrize(
    ("more", "edits", "left"),
    [
        (b"", Edits(), b""),
        (b',"kv_transfer_params":{"a":Infinity}', Edits(), b""),
        (b',"usage":{"prompt_tokens":NaN,"completion_tokens":2}', Edits(hide_usage=True), b""),
        (b',"usage":{"prompt_tokens":NaN,"completion_tokens":2}', Edits(), None),
    ],
)
def test_numbers_that_json_lacks_are_passed_on_and_break_nothing(more: bytes, edits: Edits, left: bytes | None) -> None:
    observer = AnswerObserver(Endpoint.CHAT)
    out = StreamRelay(Endpoint.CHAT, edits, observer).feed(NAN % more)
    assert out == NAN % (more if left is None else left)
    assert (observer.summary.undecodable, observer.summary.first_token_seen) == (0, True)
    assert observer.summary.prompt_tokens is None
