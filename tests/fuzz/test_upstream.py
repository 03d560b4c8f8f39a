"""Bytes from workers: whatever they are and however they are cut, a client gets an answer or an error that it reads."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd.proxy.openai.answer import AnswerObserver, AnswerSummary
from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.openai.stream_relay import Edits, StreamRelay
from ppd.proxy.sessions.prefix_chain import PrefixEnd
from tests.support.proxy_thread import Target
from tests.support.raw_http import Answer, exchange, post
from tests.support.requests import parse

# -- pure: events with any value in any place, cut anywhere

NUMBERS = st.sampled_from([0, 1, -1, 9, 2**31, 2**63, 2**64, 10**30, 10**400, -(10**30), 0.5, 1e300, True])
TEXTS = st.sampled_from(
    ["", "x", "\u00e9\u4e16", "[DONE]", "data: ", "\n\n", "\u2028", '"', "\\", "\x00", "stop", "abort"]
)
JSON = st.recursive(
    st.none() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
CALL = {"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a'}}
DETAILS = {"prompt_tokens_details": {"cached_tokens": 9}, "input_tokens_details": {"cached_tokens": 9}}
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "input_tokens": 9, "output_tokens": 2, **DETAILS}
ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "content": [{"text": "x"}]}
RESPONSE = {"id": "r", "status": "completed", "output": [ITEM], "usage": USAGE, "error": None}
EVENTS: dict[Endpoint, list[dict[str, Any]]] = {
    Endpoint.CHAT: [
        {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "x"}}]},
        {"id": "c", "choices": [{"index": 0, "delta": {"tool_calls": [CALL], "reasoning": "r"}, "token_ids": [1]}]},
        {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "kv_transfer_params": {"a": 1}},
        {"id": "c", "choices": [], "usage": {**USAGE, "cache_read_input_tokens": 1}},
        {"error": {"message": "m", "type": "t", "param": None, "code": 500}},
        {"object": "error", "message": "m", "code": 500},
    ],
    Endpoint.RESPONSES: [
        {"type": "response.created", "response": RESPONSE},
        {"type": "response.output_text.delta", "delta": "x", "output_index": 0},
        {"type": "response.output_item.added", "item": ITEM, "output_index": 1},
        {"type": "response.function_call_arguments.delta", "delta": '{"', "output_index": 1},
        {"type": "response.completed", "response": RESPONSE, "sequence_number": 4},
        {"type": "error", "message": "m", "code": "500"},
    ],
    Endpoint.MESSAGES: [
        {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 9}, "content": []}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "t", "name": "f"}},
        {"type": "content_block_delta", "index": 1, "delta": {"partial_json": '{"', "text": "x", "thinking": "y"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
        {"type": "error", "error": {"type": "t", "message": "m"}},
    ],
}
EVENTS[Endpoint.COMPLETIONS] = [{"id": "c", "choices": [{"index": 0, "text": "x"}]}, *EVENTS[Endpoint.CHAT]]
ENDS = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\r\n\n", b"\n"])
LINES = st.sampled_from([b"data: ", b"data:", b"event: e\ndata: ", b": c\ndata: ", b"id: \x00\ndata: ", b"data", b" "])
EDITS = st.sampled_from([Edits(), Edits(hide_usage=True, cached_tokens=4)])
CUTS = st.lists(st.integers(0, 10_000), max_size=10)
FEW_CUTS = st.lists(st.integers(0, 10_000), max_size=3)


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    bounds = [0, *sorted(each % (len(data) + 1) for each in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(bounds)]


def replaced(draw: Any, event: Any) -> Any:
    """An event with other values in one or two places."""
    event = json.loads(json.dumps(event))
    for _ in range(draw(st.integers(0, 2))):
        inner, key = event, draw(st.sampled_from([*event]))
        while isinstance(inner[key], dict | list) and inner[key] and draw(st.booleans()):
            inner = inner[key]
            key = draw(st.sampled_from([*inner] if isinstance(inner, dict) else range(len(inner))))
        inner[key] = draw(JSON)
    return event


@st.composite
def streams(draw: Any, endpoint: Endpoint) -> bytes:
    parts: list[bytes] = []
    for event in draw(st.lists(st.sampled_from(EVENTS[endpoint]), max_size=6)):
        data = json.dumps(replaced(draw, event), ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
        if draw(st.integers(0, 5)) == 0:
            at = draw(st.integers(0, len(data)))
            data = data[:at] + draw(st.sampled_from([b"\xff", b"\\ud800", b'"', b"[" * 2000, b"\x00"])) + data[at:]
        parts.append(draw(LINES) + data + draw(ENDS))
    parts.append(draw(st.sampled_from([b"data: [DONE]\n\n", b"data: [DONE]", b"", b"data: {"])))
    return b"".join(parts)


def relayed(
    endpoint: Endpoint, edits: Edits, stream: bytes, cuts: list[int]
) -> tuple[bytes, AnswerSummary, PrefixEnd | None]:
    """What the client gets, what was learned, and the key that the conversation would have."""
    reply = ReplyKey(parse(endpoint))
    observer = AnswerObserver(endpoint, reply)
    relay = StreamRelay(endpoint, edits, observer)
    out = b"".join([*(relay.feed(piece) for piece in cut(stream, cuts)), relay.finish()])
    return out, observer.summary, reply.key()


@pytest.mark.parametrize("endpoint", Endpoint)
@given(data=st.data(), edits=EDITS, cuts=CUTS)
@settings(max_examples=150)
def test_events_of_any_content_are_read_alike_however_they_are_cut(
    endpoint: Endpoint, data: st.DataObject, edits: Edits, cuts: list[int]
) -> None:
    stream = data.draw(streams(endpoint))
    whole = relayed(endpoint, edits, stream, [])
    assert relayed(endpoint, edits, stream, cuts) == whole
    assert relayed(endpoint, edits, stream, list(range(len(stream)))) == whole
    if b"_transfer_params" not in stream and edits == Edits() and whole[1].error is None:
        assert whole[0].startswith(stream.rpartition(b"\n\n")[0])


@pytest.mark.parametrize("endpoint", Endpoint)
@given(data=st.data())
@settings(max_examples=150)
def test_what_is_learned_of_any_answer_is_a_count(endpoint: Endpoint, data: st.DataObject) -> None:
    _, summary, _ = relayed(endpoint, Edits(), data.draw(streams(endpoint)), [])
    for count in (summary.prompt_tokens, summary.completion_tokens, summary.cached_tokens):
        assert count is None or 0 <= count < 2**31


@pytest.mark.parametrize("count", [-1, 2**31, 10**400])
@pytest.mark.parametrize("endpoint", Endpoint)
def test_a_count_that_is_none_is_no_count(endpoint: Endpoint, count: int) -> None:
    usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens"), count)
    observer = AnswerObserver(endpoint)
    observer.observe_body(json.dumps({"id": "x", "choices": [], "usage": usage}).encode())
    summary = observer.summary
    assert summary.ended
    assert (summary.prompt_tokens, summary.completion_tokens, summary.cached_tokens) == (None, None, None)


# -- through a running proxy: a worker that answers with any bytes


class OddWorker:
    """Healthy, serves model `sim`, and answers each POST with `pieces`, as they stand.

    `is_read` returns once the proxy has read what was sent to it: else two pieces could become one on their way.
    """

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.pieces: list[bytes] = []
        self.is_read: Callable[[], None] = lambda: None
        self.asked = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(65536) or b"\r\n\r\n"
                if head.startswith(b"POST"):
                    self.asked += 1
                    for piece in self.pieces:
                        connection.sendall(piece)
                        self.is_read()
                    return
                body = b'{"data":[{"id":"sim"}]}' if b"/v1/models" in head.split(b"\r\n")[0] else b""
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                )
            except OSError:
                pass


@pytest.fixture(scope="module")
def odd() -> Iterator[OddWorker]:
    worker = OddWorker()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def target(start_target: Callable[..., Target], odd: OddWorker) -> Target:
    # It fails all the time, and is to be asked again each time.
    return start_target(
        "",
        workers=(f"D={odd.address},model=sim",),
        attempts=1,
        first_event_timeout_s=2.0,
        queue_timeout_s=0.1,
        breaker_failures=10**6,
    )


def asked(
    target: Target, odd: OddWorker, endpoint: Endpoint, answer: bytes, *, stream: bool, cuts: Sequence[int] = ()
) -> Answer:
    """What the client gets when the worker says this, in pieces: one answer, and if an error, one that it can read."""
    prompt = {Endpoint.COMPLETIONS: {"prompt": "x"}, Endpoint.RESPONSES: {"input": "x"}}
    messages = {"messages": [{"role": "user", "content": "x"}]}
    odd.pieces, odd.asked = cut(answer, cuts), 0
    odd.is_read = partial(passed, target)
    body = json.dumps({"model": "sim", "max_tokens": 2, "stream": stream, **prompt.get(endpoint, messages)}).encode()
    heard = exchange(target.port, post(endpoint.value, body), quiet_s=10)
    (found,) = heard.answers
    assert heard.is_closed and odd.asked > 0
    assert found.status != 500 or b'"internal_error"' not in found.body, (answer, found)
    if found.status >= 400:
        assert "error" in json.loads(found.body)
    assert odd.address.encode() not in heard.data
    target.alarms.check()
    return found


def passed(target: Target) -> None:
    """What was sent before has been read: the loop's first pass finds it, and before a second one it is taken."""
    for _ in range(2):
        target.call(lambda: None)


JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("endpoint", Endpoint)
@given(data=st.data(), cuts=FEW_CUTS)
@settings(max_examples=40)
def test_a_stream_of_any_events_is_answered(
    target: Target, odd: OddWorker, endpoint: Endpoint, data: st.DataObject, cuts: list[int]
) -> None:
    asked(target, odd, endpoint, STREAM_HEAD + data.draw(streams(endpoint)), stream=True, cuts=cuts)


@pytest.mark.parametrize("endpoint", Endpoint)
@given(data=st.data(), cuts=FEW_CUTS)
@settings(max_examples=40)
def test_a_whole_answer_of_any_content_is_answered(
    target: Target, odd: OddWorker, endpoint: Endpoint, data: st.DataObject, cuts: list[int]
) -> None:
    shape = data.draw(st.sampled_from([{**RESPONSE, "choices": [], "content": []}, *EVENTS[endpoint]]))
    body = json.dumps(replaced(data.draw, shape)).encode()
    if data.draw(st.integers(0, 3)) == 0:
        at = data.draw(st.integers(0, len(body)))
        body = body[:at] + data.draw(st.sampled_from([b"\xff", b"", b"\\ud800", b"[" * 2000])) + body[at:]
    status = data.draw(st.sampled_from([200, 200, 400, 422, 500, 501]))
    head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nConnection: close\r\n" % status
    asked(target, odd, endpoint, head + b"Content-Length: %d\r\n\r\n" % len(body) + body, stream=False, cuts=cuts)


HEADS = st.lists(
    st.sampled_from(
        [
            b"HTTP/1.1 200 OK\r\n",
            b"HTTP/1.1 204 No\r\n",
            b"HTTP/1.1 100 Continue\r\n\r\n",
            b"HTTP/1.1 101 Switch\r\nUpgrade: x\r\n",
            b"HTTP/1.1 302 Found\r\nLocation: http://10.66.66.66/\r\n",
            b"HTTP/1.1 999 X\r\n",
            b"HTTP/1.1 0 X\r\n",
            b"HTTP/9.9 200\r\n",
            b"Content-Type: text/event-stream\r\n",
            b"Content-Type: application/json\r\n",
            b"Content-Type: text/event-stream\x01; a=\xff\r\n",
            b"Content-Type: a\r\n b\r\n",
            b"Content-Type:\r\n",
            b"Content-Encoding: gzip\r\n",
            b"Content-Encoding: \xff\x01\r\n",
            b"Content-Length: 5\r\n",
            b"Content-Length: 99999999\r\n",
            b"Content-Length: -1\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"Connection: close\r\n",
            b"Set-Cookie: a=b\r\n",
            b"X: \x00\r\n",
            b"\r\n",
            b'data: {"choices":[]}\n\n',
            b"5\r\n{}{}{\r\n0\r\n\r\n",
            b"zz\r\n",
            b"{}",
            b'{"id":"x","choices":[{"index":0,"message":{"content":"x"}}]}',
        ]
    )
    | st.binary(max_size=6),
    max_size=7,
).map(b"".join)


@given(answer=HEADS | HEADS.map(lambda rest: b"HTTP/1.1 200 OK\r\n" + rest), stream=st.booleans(), cuts=FEW_CUTS)
@settings(max_examples=150)
def test_any_bytes_are_answered(target: Target, odd: OddWorker, answer: bytes, stream: bool, cuts: list[int]) -> None:
    asked(target, odd, Endpoint.CHAT, answer, stream=stream, cuts=cuts)


CHOICE = b'"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]'


@pytest.mark.parametrize(
    "body",
    [
        b'{"id":"x",%s,"usage":{"prompt_tokens":-5,"completion_tokens":1}}' % CHOICE,
        b'{"id":"x",%s,"usage":{"prompt_tokens":5,"completion_tokens":-1}}' % CHOICE,
        b'{"id":"x",%s,"usage":{"prompt_tokens":1%s,"completion_tokens":1}}' % (CHOICE, b"0" * 400),
        b'{"id":"x",%s,"usage":{"prompt_tokens":18446744073709551616,"completion_tokens":1}}' % CHOICE,
        b'{"id":"x",%s,"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":-9}}}' % CHOICE,
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_counts_that_are_none_break_no_answer_and_no_receipt(
    target: Target, odd: OddWorker, body: bytes, stream: bool
) -> None:
    answer = JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    if stream:
        answer = STREAM_HEAD + b"data: " + body.replace(b"message", b"delta") + b"\n\ndata: [DONE]\n\n"
    found = asked(target, odd, Endpoint.CHAT, answer, stream=stream)
    assert found.status == 200
    if stream:
        assert found.body.endswith(b"data: [DONE]\n\n")
    id = (found.header(b"x-request-id") or b"").decode()
    heard = exchange(target.port, post(f"/admin/requests/{id}", b"", b"X-Admin-Key: operator\r\n", b"GET"), quiet_s=10)
    (receipt,) = heard.answers
    assert receipt.status == 200 and json.loads(receipt.body)["outcome"] == "completed"


@pytest.mark.parametrize(
    "event",
    [
        b'{"error":{"message":"m","code":500},"x":"\xff"}',
        b'{"x":"\xff","error":{"message":"m","code":500}}',
        b'{"error":5}',
        b'{"error":{"code":%s}}' % (b"9" * 400),
        b'{"error":{"code":500.5}}',
        b'{"error":{"code":true}}',
        b'{"error":{"message":"m","code":[]}}',
        b'{"object":"error","message":"m\xff","code":500}',
        b'{"object":"error","x":"\xff","message":"m","code":500}',
    ],
)
def test_an_error_in_place_of_the_first_event_is_told_whatever_it_holds(
    target: Target, odd: OddWorker, event: bytes
) -> None:
    found = asked(target, odd, Endpoint.CHAT, STREAM_HEAD + b"data: " + event + b"\n\n", stream=True)
    assert found.status >= 400 or b'"error"' in found.body
