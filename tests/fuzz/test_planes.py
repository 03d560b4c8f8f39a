"""One corpus of odd requests for every way in: the proxy's own data plane, the application's, and TLS."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from ppd.proxy.config import DataPlane
from tests.support.credentials import Authority
from tests.support.proxy_thread import Target
from tests.support.raw_http import Heard, exchange_all

BODY = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
JSON = b"Content-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
WHOLE = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
QUIET_S = 3.0  # longer than a connection lingers
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"


@dataclass
class Way:
    """How requests get in; `target` is the proxy behind it."""

    target: Target
    tls: ssl.SSLContext | None = None

    def exchange_all(self, payloads: dict[str, bytes]) -> dict[str, Heard]:
        heard = exchange_all(self.target.port, [*payloads.values()], quiet_s=QUIET_S, tls=self.tls)
        return dict(zip(payloads, heard, strict=True))


@pytest.fixture(scope="module", params=["native", "direct", "asgi", "native tls", "asgi tls"])
def way(
    request: pytest.FixtureRequest, start_target: Callable[..., Target], tmp_path_factory: pytest.TempPathFactory
) -> Way:
    plane, _, has_tls = request.param.partition(" ")
    if not has_tls:
        return Way(start_target("D1", data_plane=DataPlane(plane), body_limit_bytes=100_000))
    authority = Authority(tmp_path_factory.mktemp("authority"))
    own, trusting = authority.issue("proxy"), ssl.create_default_context(cafile=authority.ca)
    files = {"tls_cert_file": own.cert, "tls_key_file": own.key}
    return Way(
        start_target("D1", data_plane=DataPlane(plane), body_limit_bytes=100_000, tls=trusting, **files), trusting
    )


def chat(framing: bytes, body: bytes, *, target: bytes = b"/v1/chat/completions", version: bytes = b"1.1") -> bytes:
    return b"POST %b HTTP/%b\r\nHost: x\r\n%b%b\r\n%b" % (target, version, JSON, framing, body)


def get(target: bytes, headers: bytes = b"", line_end: bytes = b"\r\n") -> bytes:
    return (b"GET %b HTTP/1.1\r\nHost: x\r\n%b\r\n" % (target, headers)).replace(b"\r\n", line_end)


DOUBTFUL: dict[str, tuple[bytes, list[int]]] = {
    "folded line": (chat(LENGTH + b"X: a\r\n b\r\n", BODY), [400]),
    "line folded with a tab": (chat(LENGTH + b"X: a\r\n\tb\r\n", BODY), [400]),
    "folded length": (chat(b"Content-Length:\r\n %d\r\n" % len(BODY), BODY), [400]),
    "folded encoding": (chat(b"Transfer-Encoding:\r\n chunked\r\n", WHOLE), [400]),
    "bare LF": (get(b"/health", line_end=b"\n"), [400]),
    "one bare LF": (b"GET /health HTTP/1.1\r\nHost: x\nX: y\r\n\r\n", [400]),
    "bare LF ends the head": (b"GET /health HTTP/1.1\r\nHost: x\r\n\n", [400]),
    "bare CR": (b"GET /health HTTP/1.1\r\nHost: x\rX: y\r\n\r\n", [400]),
    "bare LF in chunks": (chat(CHUNKED, WHOLE.replace(b"\r\n", b"\n")), [400]),
    "Content-Length: n, n": (chat(b"Content-Length: %d, %d\r\n" % (len(BODY), len(BODY)), BODY), [400]),
    "two Content-Lengths": (chat(LENGTH + LENGTH, BODY), [400]),
    "a length and chunks": (chat(LENGTH + CHUNKED, WHOLE), [400]),
    "chunks in HTTP/1.0": (chat(CHUNKED, WHOLE, version=b"1.0"), [400]),
    "chunks twice": (chat(CHUNKED + CHUNKED, WHOLE), [400, 501]),
    "20-digit chunk size": (chat(CHUNKED, b"1" + b"0" * 19 + b"\r\n" + BODY), [400]),
    "chunk size beyond 64 bits": (chat(CHUNKED, b"1" + b"0" * 16 + b"\r\n" + BODY), [400]),
    "0x chunk size": (chat(CHUNKED, b"0x%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)), [400]),
    "space before a chunk size": (chat(CHUNKED, b" %x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)), [400]),
    "space before a colon": (get(b"/health").replace(b"Host: x", b"Host : x"), [400]),
    "no Host": (get(b"/health").replace(b"Host: x\r\n", b""), [400]),
    "two Hosts": (get(b"/health", b"Host: y\r\n"), [400]),
    "HTTP/1.2": (get(b"/health").replace(b"1.1", b"1.2"), [400, 505]),
    "preface of no version": (b"PRI * HTTP/2.1\r\nHost: x\r\n\r\n", [400, 505]),
    "preface with a header": (b"PRI * HTTP/2.0\r\nHost: x\r\n\r\nSM\r\n\r\n", [400]),
    "absolute form of another scheme": (get(b"ftp://x/health"), [400]),
    "absolute form without a host": (get(b"http:///health"), [400]),
    "absolute form with a user": (get(b"http://me@x/health"), [400]),
    "absolute form with half an address": (get(b"http://[::1/health"), [400]),
    "authority form": (get(b"x:80"), [400]),
}

CLEAR: dict[str, tuple[bytes, int]] = {
    "plain": (get(b"/health"), 200),
    "a turn": (chat(LENGTH, BODY), 200),
    "a turn in chunks": (chat(CHUNKED, WHOLE), 200),
    "absolute form": (get(b"http://y/health"), 200),
    "absolute form with a port": (get(b"HTTP://Y:80/health?a=b"), 200),
    "absolute form of an address": (get(b"https://[::1]:8/health"), 200),
    "absolute form with an escape": (get(b"http://y/%68ealth"), 200),
    "absolute form without a path": (get(b"http://y"), 404),
    "absolute form with a query alone": (get(b"http://y?a=b"), 404),
    "a turn in absolute form": (chat(LENGTH, BODY, target=b"http://y/v1/chat/completions"), 200),
    "an offer of h2c": (get(b"/health", H2C), 200),
    "an offer of h2c with a turn": (chat(H2C + LENGTH, BODY), 200),
    "no such path": (get(b"/v1/nothing"), 404),
}


def test_what_is_in_doubt_is_refused_and_ends_the_connection(way: Way) -> None:
    """Whatever stands before the proxy may have read it otherwise, so what follows is not taken for a request."""
    for name, heard in way.exchange_all({name: payload + SMUGGLED for name, (payload, _) in DOUBTFUL.items()}).items():
        assert heard.is_closed and b"smuggled" not in heard.data, name
        assert [answer.status for answer in heard.answers] in [[status] for status in DOUBTFUL[name][1]], name
    way.target.alarms.check()


def test_what_is_clear_is_answered_and_keeps_the_connection(way: Way) -> None:
    for name, heard in way.exchange_all({name: payload * 2 for name, (payload, _) in CLEAR.items()}).items():
        assert not heard.is_closed, name
        assert [answer.status for answer in heard.answers] == [CLEAR[name][1]] * 2, name
    way.target.alarms.check()


def test_who_sends_too_large_a_body_gets_the_whole_answer(way: Way) -> None:
    """A client that reads only when it has sent everything; the buffers of the two kernels hold a part of it."""
    body = b"x" * 12_000_000
    payloads = {}
    for path in (b"/v1/chat/completions", b"/v1/embeddings"):
        payloads[f"{path!r} announced"] = chat(b"Content-Length: %d\r\n" % len(body), body, target=path)
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        payloads[f"{path!r} chunked"] = chat(CHUNKED, chunks, target=path)
    for name, heard in way.exchange_all(payloads).items():
        assert [answer.status for answer in heard.answers] == [413], name
        assert json.loads(heard.answers[0].body)["error"]["type"] == "invalid_request_error", name
        assert heard.is_closed, name
