"""Heads of requests that no client library would write: one answer for each request, and never one that says 500."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import h2.config
import h2.connection
import h2.events
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.proxy_thread import Target
from tests.support.raw_http import exchange, exchange_all, post, read_answers

BODY = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
CHAT = "/v1/chat/completions"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def target(start_target: Callable[..., Target]) -> Target:
    return start_target("D1")


# -- framing

JSON = b"Content-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    "framing",
    [
        LENGTH + CHUNKED,
        CHUNKED + LENGTH,
        CHUNKED + b"Content-Length: 0\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5, 6\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 0x5\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 5 5\r\n",
        b"Content-Length : 5\r\n",
        b"Content-Length:\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked\x0b\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"X: a\rTransfer-Encoding: chunked\r\n",
        b"X: a\x00\r\n" + CHUNKED,
        CHUNKED + CHUNKED,
        LENGTH + b"Transfer-Encoding: identity\r\n",
    ],
)
def test_a_request_whose_length_is_in_doubt_is_refused_and_its_connection_ends(target: Target, framing: bytes) -> None:
    """Whoever stands before the proxy may have read another length: what follows is not to be taken for a request."""
    head = b"POST %s HTTP/1.1\r\nHost: x\r\n%s\r\n" % (CHAT.encode(), framing)
    heard = exchange(target.port, head + b"0\r\n\r\n" + SMUGGLED, quiet_s=10)
    assert heard.is_closed
    assert len(heard.answers) <= 1 and b"smuggled" not in heard.data
    assert [answer.status for answer in heard.answers] in ([], [400], [411], [501])


@pytest.mark.parametrize(
    ("request_", "statuses"),
    [
        (b"POST %s HTTP/1.1\r\nHost: x\r\n%s\r\n%s" % (CHAT.encode(), JSON + LENGTH, BODY) + SMUGGLED, [200, 404]),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + CHUNKED + b"\r\n0\r\n\r\n" + SMUGGLED, [200, 404]),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 3, [200] * 3),
    ],
)
def test_requests_one_behind_the_other_are_answered_in_turn(
    target: Target, request_: bytes, statuses: list[int]
) -> None:
    heard = exchange(target.port, request_, quiet_s=2)
    assert [answer.status for answer in heard.answers] == statuses


# -- whatever bytes

NAMES = st.sampled_from(
    "Host Authorization X-Api-Key X-Admin-Key X-PPD-Force-Route X-Request-Id X-Session-ID X-Session-Affinity Accept "
    "X-Correlation-ID Content-Type Traceparent Tracestate Anthropic-Version Cookie Expect Upgrade Connection TE "
    "Content-Encoding Accept-Encoding Range If-None-Match Forwarded X-Forwarded-Host X-HTTP-Method-Override".split()
).map(str.encode) | st.binary(max_size=12)
VALUES = st.binary(max_size=24) | st.sampled_from(
    [b"websocket", b"h2c", b"100-continue", b"multipart/form-data", b"application/json; charset=\xff", b"a\r\n b", b""]
)
LINES = st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=4).map(
    lambda lines: b"".join(b"%s: %s\r\n" % line for line in lines)
)
PLACES = st.sampled_from(
    [
        (b"POST", CHAT, BODY),
        (b"POST", "/v1/messages", BODY),
        (b"POST", "/v1/embeddings", b'{"model":"sim","input":"x"}'),
        (b"POST", "/v1/audio/transcriptions?a=b", b"x"),
        (b"GET", "/v1/models", b""),
        (b"GET", "/admin/requests?limit=3", b""),
        (b"GET", "/ready", b""),
    ]
)
REQUESTS = st.builds(lambda place, lines: post(place[1], place[2], lines, place[0]), PLACES, LINES)


def check(target: Target, payloads: list[bytes]) -> None:
    """No answer is a 500, all are HTTP, and nothing went wrong behind them."""
    for payload, heard in zip(payloads, exchange_all(target.port, payloads), strict=True):
        if heard.data.startswith(b"HTTP/1.1 101") or payload.startswith(b"PRI * HTTP/2.0"):
            continue  # another protocol from here on
        for answer in read_answers(heard.data):
            assert answer.status < 600 and answer.status != 500, (payload, answer)
    target.alarms.check()


@given(payloads=st.lists(REQUESTS, min_size=8, max_size=8))
@settings(max_examples=40)
def test_no_headers_make_the_proxy_fail(target: Target, payloads: list[bytes]) -> None:
    check(target, payloads)


@pytest.mark.parametrize("code", [*range(1, 9), *range(14, 32), 127])
def test_a_control_character_in_any_header_that_workers_get_is_refused(target: Target, code: int) -> None:
    names = (b"Authorization", b"X-Api-Key", b"X-Session-ID", b"Traceparent", b"Accept", b"Anthropic-Version")
    payloads = [post(CHAT, BODY, b"%s: a%cb\r\n" % (name, code)) for name in names]
    payloads.append(post("/v1/embeddings", BODY, b"Content-Type: application/json;%c\r\n" % code))
    for heard in exchange_all(target.port, payloads, quiet_s=10):
        assert [answer.status for answer in heard.answers] == [400]
    target.alarms.check()


TARGETS = st.sampled_from(
    [
        "*",
        "health",
        "//health",
        "http://10.0.0.1:9/health",
        "http://[::1/health",
        "/%ff%00%0d%0aX: y",
        "/v1/audio/%0d%0aHost:%20evil",
        "/v1/audio/a?%0d%0a",
        "/v1/audio/a?b=http://10.0.0.1/#c",
        "/admin/workers/%ff",
        "/admin/requests?limit=" + "1" * 5000,
        "/admin/requests?limit=%ff",
        "/admin/requests?limit=%D9%A3",
        "/admin/requests?" + "&" * 3000,
        "/admin/sessions/%00",
        "10.0.0.1:80",
    ]
) | st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=30)
METHODS = st.sampled_from(b"GET POST PUT PATCH DELETE OPTIONS CONNECT TRACE PURGE get".split())


@given(
    lines=st.lists(st.tuples(METHODS, TARGETS), min_size=8, max_size=8),
    body=st.sampled_from([b"", BODY, b"\xff", b"[" * 500]),
)
@settings(max_examples=40)
def test_no_target_makes_the_proxy_fail(target: Target, lines: list[tuple[bytes, str]], body: bytes) -> None:
    check(target, [post(path, body, b"X-Admin-Key: operator\r\n", method) for method, path in lines])


EDITS = st.lists(
    st.tuples(
        st.integers(0, 400), st.integers(0, 6), st.binary(max_size=4) | st.sampled_from([b"\r\n", b"\n", b"\r", b": "])
    ),
    min_size=1,
    max_size=4,
)


@given(
    many=st.lists(EDITS, min_size=8, max_size=8),
    request_=st.sampled_from(
        [
            post(CHAT, BODY, b"X-Session-ID: a\r\n"),
            post("/v1/embeddings", b'{"model":"sim","input":"x"}'),
            b"POST %s HTTP/1.1\r\nHost: x\r\n%sTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
            % (CHAT.encode(), JSON, len(BODY), BODY),
        ]
    ),
)
@settings(max_examples=40)
def test_no_damaged_request_makes_the_proxy_fail(
    target: Target, many: list[list[tuple[int, int, bytes]]], request_: bytes
) -> None:
    payloads = []
    for edits in many:
        payload = bytearray(request_)
        for at, cut, put in edits:
            start = at % len(payload)
            payload[start : start + cut] = put
        payloads.append(bytes(payload))
    check(target, payloads)


# -- HTTP/2, which Hypercorn speaks to whoever asks

H2_HEAD = [
    (":method", "POST"),
    (":path", CHAT),
    (":scheme", "http"),
    (":authority", "x"),
    ("content-type", "application/json"),
]


def h2_status(port: int, head: list[tuple[str, str]], body: bytes) -> str | None:
    """The status of one request over HTTP/2; None where the connection or the stream is ended without one."""
    config = h2.config.H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
    connection = h2.connection.H2Connection(config)
    connection.initiate_connection()
    connection.send_headers(1, head)
    connection.send_data(1, body, end_stream=True)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(connection.data_to_send())
        while data := client.recv(65536):
            for event in connection.receive_data(data):
                if isinstance(event, h2.events.ResponseReceived):
                    return dict(event.headers)[b":status"].decode()
                if isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated):
                    return None
    return None


@pytest.mark.parametrize(
    ("extra", "status"),
    [
        ([("x-session-id", "a")], "200"),
        ([("x-session-id", "a\x01b")], "400"),
        ([("x-session-id", "a\x7fb")], "400"),
        ([("x-session-id", "a\r\nx-data-parallel-rank: 1")], None),
        ([("x-session-id", "a\x00")], None),
        ([(":path", "/v1/embeddings?a b")], "400"),
        ([(":path", "/v1/embeddings?a HTTP/1.1\r\nHost: y\r\n\r\n")], None),
        ([(":path", "v1/embeddings")], "400"),
        ([(":path", "*")], "400"),
        ([(":path", "http://10.0.0.1/health")], "400"),
        ([(":authority", "a/../b?c")], "200"),
        ([("transfer-encoding", "chunked")], None),
        ([("content-length", "3")], None),
        ([("x-ppd-force-route", "LOCAL")], "403"),
    ],
)
def test_http_2_is_held_to_the_same(target: Target, extra: list[tuple[str, str]], status: str | None) -> None:
    replaced = dict(extra)
    head = [(name, replaced.pop(name, value)) for name, value in H2_HEAD] + [*replaced.items()]
    assert h2_status(target.port, head, BODY) == status
    target.alarms.check()
