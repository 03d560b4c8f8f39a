"""What a coverage-guided fuzzer feeds: one function a parser, that takes any bytes and fails where a promise is broken.

`tests/fuzz/fuzz.py` runs one of them. The first bytes of an input choose the endpoint, the pieces and the limits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import msgspec
from google.protobuf.message import DecodeError

from ppd.proxy import plane
from ppd.proxy.config import SessionKey
from ppd.proxy.connectors.leg import Handoff
from ppd.proxy.connectors.nixl import handle_params
from ppd.proxy.discovery.heartbeat import decode
from ppd.proxy.errors import FormatError, RequestError
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.gateway.messages import ProcessingRequest, Stage, _decoded_stage, read_stage
from ppd.proxy.gateway.wire.frames import END_HEADERS, END_STREAM, PREFACE, FrameType, frame
from ppd.proxy.openai.answer import AnswerObserver, AnswerSummary
from ppd.proxy.openai.edits import Edits, edited_body
from ppd.proxy.openai.prompts.tool_calls import CanonicalJson
from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.openai.sse import EventSplitter, Fragment, event_data, with_data
from ppd.proxy.openai.stream_relay import StreamRelay, broken_off
from ppd.proxy.openai.units import check_depth
from ppd.proxy.sessions.prefix_chain import PrefixEnd
from tests.proxy.gateway.connections import call, echoed, fake_picker
from tests.support.fake_connections import Answered, Pace, Served, answered, served
from tests.support.requests import depth_of, parse, parse_bytes

ENDPOINTS = [*Endpoint]
D = Worker(role=Role.DECODE, address="d:1")
REQUESTS = {endpoint: parse(endpoint) for endpoint in Endpoint}
EDITS = (Edits(), Edits(hide_usage=True, cached_tokens=4), Edits(hide_token_ids=True))


def splitter(data: bytes) -> None:
    """Whatever the cuts, the same events, and the stream byte for byte."""
    step, limit, stream = data[:1], data[1:2], data[2:]
    whole, cut = (EventSplitter(4 + int.from_bytes(limit)) for _ in range(2))
    first = [*whole.feed(stream), whole.rest()]
    second = [*(part for piece in pieces(stream, step) for part in cut.feed(piece)), cut.rest()]
    assert b"".join(first) == b"".join(second) == stream
    assert events(first[:-1]) == events(second[:-1])
    for event in events(first):
        if event_data(event) is not None:
            assert event_data(with_data(event, b"new")) == b"new"


def relay(data: bytes) -> None:
    """Whatever the cuts, the same bytes, counts and key; a stream without its end says so."""
    kind, step, stream = int.from_bytes(data[:1]), data[1:2], data[2:]
    endpoint, edits = ENDPOINTS[kind % 4], EDITS[kind // 4 % 3]
    out, summary, key = relayed(endpoint, edits, [stream])
    assert (out, summary, key) == relayed(endpoint, edits, pieces(stream, step))
    assert summary.completed or summary.error is not None or out.endswith(broken_off(endpoint))
    check_counts(summary)


def answers(data: bytes) -> None:
    """A whole answer is read and edited, and what was JSON stays it."""
    endpoint, body = ENDPOINTS[int.from_bytes(data[:1]) % 4], data[1:]
    observer = AnswerObserver(endpoint, ReplyKey(REQUESTS[endpoint]), reads_handle=True)
    observer.observe_body(body)
    if (told := observer.summary.handle) is not None:
        handle_params(told.params, D, Handoff({}, 0, None))
    check_counts(observer.summary)
    for edits in EDITS:
        edited = edited_body(body, edits)
        assert edited == body or msgspec.json.decode(edited, type=msgspec.Raw)


def turns(data: bytes) -> None:
    """A request, or one refusal that can be sent."""
    kind = int.from_bytes(data[:1])
    try:
        parse_bytes(data[1:], ENDPOINTS[kind % 4], session_key=[*SessionKey][kind // 4 % 2])
    except RequestError as exc:
        assert exc.status == 400 and len(exc.message) < 1000
        msgspec.json.encode(exc.message)


def nesting(data: bytes) -> None:
    """As deep as a decoder finds it."""
    limit, body = int.from_bytes(data[:1]) % 8, data[1:]
    try:
        check_depth(body, limit)
        is_refused = False
    except RequestError:
        is_refused = True
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    assert is_refused == (depth_of(value) > limit)


def arguments(data: bytes) -> None:
    """A call's arguments have one canonical form wherever they were cut."""
    step, text = int.from_bytes(data[:1]) or 1, data[1:].decode("utf-8", "replace")
    whole, cut = CanonicalJson(), CanonicalJson()
    bounds = [*range(0, len(text), step), len(text)]
    second = "".join(cut.feed(text[start:end]) for start, end in pairwise(bounds)) + cut.rest()
    assert whole.feed(text) + whole.rest() == second
    if plane.IS_BUILT:
        assert plane.canonical_json(text.encode()) in (None, second.encode("utf-8", "surrogatepass"))


def frames(data: bytes) -> None:
    """An announcement, or refused."""
    try:
        decode(data)
    except FormatError as exc:
        assert len(exc.message) < 300


def clients(data: bytes) -> None:
    """Whatever the cuts, the same requests, refusals and answers."""
    pace, step, stream = Pace(int.from_bytes(data[:1]) % 3), data[1:2], data[2:]

    async def both() -> tuple[Served, Served]:
        return await served([stream], pace), await served(pieces(stream, step), pace)

    whole, cut = asyncio.run(both())
    assert cut == whole


def workers(data: bytes) -> None:
    """Whatever the cuts, the same answer; of one that breaks, less may be seen where more came at once.

    What is behind an answer was not asked for: together with it, it may break it, and the connection is not kept.
    """
    is_reset, step, stream = bool(int.from_bytes(data[:1]) % 2), data[1:2], data[2:]

    async def heard(*parts: bytes) -> Answered:
        return await answered(parts, is_reset=is_reset)

    async def all_ways() -> None:
        size = (await heard(*pieces(stream, b"\x01"))).size
        single = await heard(*pieces(stream[:size], b"\x01"))
        for parts in ([stream[:size]], pieces(stream[:size], step)):
            other = await heard(*parts)
            assert replace(other.answer, body=b"") == replace(single.answer, body=b"")
            assert other.answer.body == single.answer.body[: None if single.answer.is_whole else len(other.answer.body)]
            assert other.is_kept == single.is_kept
        assert not (single.is_kept and single.answer.headers.get(b"connection", b"").lower() == b"close")
        together = await heard(stream)
        assert not (together.is_kept and stream[size:].strip(b"\r\n"))

    asyncio.run(all_ways())


def http2(data: bytes) -> None:
    """Whatever the cuts, the same frames back; and whatever a gateway tells the picker, nothing is left of it.

    Of the first byte, the last bit chooses between the two, the next one sends the preface first, and the third
    makes the rest messages of one call.
    """
    kind, step, stream = int.from_bytes(data[:1]), data[1:2], data[2:]
    if kind & 4:
        stream = call(1, *messages(stream))
    if kind & 2:
        stream = PREFACE + stream
    if kind & 1:
        fake_picker().serve(pieces(stream, step))
    else:
        assert echoed([stream]) == echoed(pieces(stream, step))


def stages(data: bytes) -> None:
    """Read from its bytes or as a message: the same; and what stands around it is not read."""
    around = memoryview(b"\x12" + data + b"\x50\x01")[1:-2]
    try:
        told = told_in(_decoded_stage(ProcessingRequest.FromString(data)))
    except DecodeError:
        told = None
    for given in (data, around):
        try:
            found = told_in(read_stage(given))
        except DecodeError:
            found = None
        assert found == told


def told_in(stage: Stage) -> tuple[object, ...]:
    """All that it says, to be compared."""
    said = {} if stage.metadata is None else stage.metadata.filter_metadata
    metadata = {name: said[name].SerializeToString(deterministic=True) for name in said}
    return *msgspec.structs.astuple(msgspec.structs.replace(stage, metadata=None)), metadata


def messages(data: bytes) -> list[bytes]:
    """Each behind its length, of two bytes."""
    found = []
    while data:
        end = 2 + int.from_bytes(data[:2])
        found.append(data[2:end])
        data = data[end:]
    return found


def pieces(data: bytes, step: bytes) -> list[bytes]:
    bounds = [*range(0, len(data), int.from_bytes(step) or 1), len(data)]
    return [data[start:end] for start, end in pairwise(bounds)]


def events(parts: list[bytes]) -> list[bytes]:
    return [part for part in parts if type(part) is not Fragment]


def relayed(endpoint: Endpoint, edits: Edits, parts: list[bytes]) -> tuple[bytes, AnswerSummary, PrefixEnd | None]:
    """What the client gets, what was learned, and the key that the conversation would have."""
    reply = ReplyKey(REQUESTS[endpoint])
    observer = AnswerObserver(endpoint, reply, reads_handle=edits.hide_token_ids)
    relay = StreamRelay(endpoint, edits, observer)
    out = b"".join([*(relay.feed(part) for part in parts), relay.finish()])
    return out, observer.summary, reply.key()


def check_counts(summary: AnswerSummary) -> None:
    for count in (summary.prompt_tokens, summary.completion_tokens, summary.cached_tokens):
        assert count is None or 0 <= count < 2**31


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (splitter, relay, answers, turns, nesting, arguments, frames, clients, workers, http2, stages)
}


def _json(kind: int, value: object) -> bytes:
    return bytes([kind]) + json.dumps(value).encode()


_USAGE = {"prompt_tokens": 9, "completion_tokens": -1, "prompt_tokens_details": {"cached_tokens": 9}}
_HANDLE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_num_tokens": 1, "remote_block_ids": [[1]]}
_USER = {"role": "user", "content": [{"type": "text", "text": "x"}]}
_RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}


def _stage(stage: str, value: dict[str, object], **more: object) -> bytes:
    request = ProcessingRequest(**{stage: value, **more})
    return bytes(request.SerializeToString())


def _headers(**values: str) -> dict[str, object]:
    return {"headers": {"headers": [{"key": key, "raw_value": value.encode()} for key, value in values.items()]}}


_BLOCK = b"\x83\x84\x86"  # of HPACK: POST, /, http
_BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
_CHAT = _headers(**{":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"})
_TURN = [
    _stage("request_headers", _CHAT),
    _stage("request_body", {"body": _BODY, "end_of_stream": True}),
    _stage("response_headers", _headers(**{":status": "200", "content-type": "text/event-stream"})),
    _stage("response_body", {"body": b'data: {"choices":[]}\n\ndata: [DONE]\n\n', "end_of_stream": True}),
]
_PIECES = [
    _stage("request_headers", _CHAT, protocol_config={"request_body_mode": 4, "response_body_mode": 4}),
    _stage("request_body", {"body": _BODY[:9]}),
    _stage("request_body", {"body": _BODY[9:]}),
    _stage("request_trailers", {}),
    _stage("response_headers", {**_headers(**{":status": "503"}), "end_of_stream": True}),
]
_OTHERS = [
    _stage("request_headers", {**_headers(**{":method": "GET", ":path": "/v1/models"}), "end_of_stream": True}),
    _stage("response_trailers", {}),
]


def _told(stages: list[bytes]) -> bytes:
    return b"".join(len(each).to_bytes(2) + each for each in stages)


_SUBSET = {"filter_metadata": {"envoy.lb.subset_hint": {"fields": {"names": {"string_value": "a,b"}}}}}

SEEDS: dict[str, list[bytes]] = {
    "splitter": [b"\x04\x08data: a\n\ndata: b\r\n\r\n: c\r\r", b"\x02\x01\x02event: e\ndata: {}\n\n\n\ndata"],
    "relay": [
        b'\x00\x07data: {"id":"c","choices":[{"index":0,"delta":{"content":"x"}}]}\n\ndata: [DONE]\n\n',
        b'\x04\x07data: {"id":"c","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n',
        b'\x00\x02data: {"choices":[{"index":0,"delta":{}}],"kv_transfer_params":{"a":1}}\n\ndata: [DONE]',
        (
            b'\x08\x07data: {"choices":[{"index":0,"delta":{"content":""}}],"prompt_token_ids":[1,2]}\n\n'
            b'data: {"choices":[{"index":0,"delta":{"content":"x"},"token_ids":[3]}]}\n\n'
            b'data: {"choices":[{"index":0,"delta":{"content":"y"},"token_ids":[4]}]}\n\n'
            b'data: {"choices":[],"kv_transfer_params":{"remote_num_tokens":3}}\n\ndata: [DONE]\n\n'
        ),
        b'\x02\x03event: error\ndata: {"type":"error","message":"m","code":"500"}\n\n',
        b'\x03\x09data: {"type":"message_start","message":{"id":"m","usage":{"input_tokens":9}}}\n\n',
        b'\x06\x01data: {"type":"response.completed","response":{"id":"r","usage":{"input_tokens":1}}}\n\n',
    ],
    "answers": [
        _json(0, {"id": "x", "choices": [{"message": {"content": "x", "tool_calls": [{"id": "c"}]}}], "usage": _USAGE}),
        _json(1, {"id": "x", "choices": [{"text": "x", "finish_reason": "stop"}], "error": {"code": 1}}),
        _json(2, {"id": "r", "status": "completed", "output": [{"type": "function_call", "arguments": "{}"}]}),
        _json(3, {"id": "m", "content": [{"type": "tool_use", "id": "t", "input": {"a": 1}}], "usage": _USAGE}),
        b'\x00{"choices":[{"\xff":0}],"prompt_token_ids":[1]}',
        _json(0, {"choices": [{"token_ids": [3]}], "prompt_token_ids": [1], "kv_transfer_params": _HANDLE}),
    ],
    "turns": [
        _json(0, {"model": "m", "messages": [_USER], "n": 1, "tools": [], "max_tokens": 3}),
        _json(1, {"model": "m", "prompt": ["a", [1]], "stream": True, "stream_options": {"include_usage": True}}),
        _json(2, {"model": "m", "input": [{"type": "function_call_output", "output": "x"}], "conversation": "c"}),
        _json(3, {"model": "m", "system": "s", "messages": [_RESULT]}),
        _json(4, {"model": "m", "messages": [_USER], "session_id": 1, "cache_salt": "x"}),
    ],
    "nesting": [b'\x03{"a":["\\"[[",{"b":[]}]}', b'\x01["]\\\\",[["\\n"]]]'],
    "arguments": [b'\x03{"a": "\\u00e9\\ud83d\\ude00\\/", "b" : [1, 2]}', b'\x01"\\"\\\\u'],
    "frames": [
        msgspec.msgpack.encode({"version": 1, "role": "D", "http_address": "h:800", "models": ["m"]}),
        msgspec.msgpack.encode({"type": "P", "http_address": "h:1", "zmq_address": "h:2"}),
    ],
    "clients": [
        b"\x00\x07GET /a?b HTTP/1.1\r\nHost: p\r\n\r\nPOST /b HTTP/1.1\r\nHost: p\r\nContent-Length: 2\r\n\r\n{}",
        (
            b"\x01\x05POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\n{}\r\n"
            b"0\r\nA: b\r\n\r\n\r\nGET / HTTP/1.0\r\n\r\n"
        ),
        (
            b"\x02\x03POST / HTTP/1.1\r\nConnection: close\r\nContent-Length: 1\r\n"
            b"\r\nxGET / HTTP/1.1\r\nA:\r\nB: \t\r\n\r\n"
        ),
        b"\x01\x40GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nCONNECT a:1 HTTP/1.1\r\n\r\n",
        b"\x00\x09PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x01\x02GET / HTTP/1.1\r\n\r\nGET / HTTP/1.2\r\n\r\nGET /",
    ],
    "http2": [
        b"\x00\x05" + PREFACE[:20],
        b"\x02\x03"
        + frame(FrameType.SETTINGS, 0, 0, bytes((0, 4, 0, 0, 0, 2)))
        + frame(FrameType.HEADERS, END_HEADERS, 1, _BLOCK)
        + frame(FrameType.DATA, END_STREAM, 1, b"body")
        + frame(FrameType.WINDOW_UPDATE, 0, 1, bytes((0, 0, 0, 9)))
        + frame(FrameType.GOAWAY, 0, 0, bytes(8)),
        b"\x02\x07"
        + frame(FrameType.HEADERS, 0x28, 1, b"\x01\x00\x00\x00\x00\x00" + _BLOCK[:2] + b"\x00")
        + frame(FrameType.CONTINUATION, END_HEADERS, 1, _BLOCK[2:])
        + frame(FrameType.PING, 0, 0, bytes(8))
        + frame(FrameType.RST_STREAM, 0, 1, bytes(4)),
        b"\x03\x40" + call(1, *_TURN) + frame(FrameType.DATA, END_STREAM, 1),
        b"\x03\x00" + call(1, *_TURN[:2]) + call(3, *_PIECES) + frame(FrameType.RST_STREAM, 0, 1, bytes(4)),
        *(b"\x07\x30" + _told(stages) for stages in (_TURN, _PIECES, _OTHERS)),
    ],
    "stages": [
        *_TURN,
        *_PIECES,
        *_OTHERS,
        _stage("request_headers", _CHAT, observability_mode=True, metadata_context=_SUBSET),
    ],
    "workers": [
        b"\x00\x07HTTP/1.1 200 OK\r\nContent-Type: a/b \r\nContent-Length: 2\r\n\r\n{}",
        (
            b"\x00\x05HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\n{}\r\n"
            b"0\r\nA: b\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"
        ),
        b"\x00\x03HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\nA:\r\nB: \t\r\n\r\n",
        b"\x01\x04HTTP/1.0 200 OK\r\n\r\nuntil the end",
        b"\x00\x02HTTP/1.1 101 S\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nx",
        b"\x00\x09HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx\r\nbehind",
    ],
}
