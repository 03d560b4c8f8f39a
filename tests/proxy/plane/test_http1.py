"""HTTP/1.1 in any pieces: the compiled parsers and those for machines without them say the same."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.plane import IS_BUILT, http1, uncompiled

BOTH = pytest.mark.parametrize("parsers", [http1, uncompiled], ids=["compiled", "uncompiled"])


def test_it_is_built() -> None:
    assert IS_BUILT, "make test builds proxy/plane"


class Told:
    """What a parser told of requests; parts of bodies are joined."""

    parser: Any

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_message_begin(self) -> None:
        self.events.append("begin")

    def on_head(self) -> None:
        said = self.parser
        start = said.method, said.target, said.headers, said.fields
        self.events.append((*start, said.version, said.keeps_alive, said.offers_upgrade))

    def on_body(self, data: bytes) -> None:
        if isinstance(self.events[-1], bytes):
            self.events[-1] += data
        else:
            self.events.append(data)

    def on_message_complete(self) -> None:
        self.events.append("whole")


def requests(parsers: Any, pieces: list[bytes]) -> tuple[list[Any], str]:
    """Their events, and how it ended."""
    told = Told()
    parser = told.parser = parsers.RequestParser(told)
    for piece in pieces:
        try:
            parsed = parser.feed(piece)
        except parsers.NotHttp:
            return told.events, "not HTTP"
        if parsed < len(piece):
            return told.events, f"{len(piece) - parsed} bytes behind an offer"
    return told.events, ""


def answers(parsers: Any, pieces: list[bytes]) -> dict[str, Any]:
    parser, body, failed = parsers.AnswerParser(), b"", ""
    for piece in pieces:
        try:
            body += parser.feed(piece)
        except parsers.NotHttp:
            failed = "not HTTP"
            break
    names = ("status", "headers", "is_whole", "is_followed", "can_be_kept", "lasts_until_closed")
    return {"body": body, "failed": failed, **{name: getattr(parser, name) for name in names}}


def cut(wire: bytes, places: list[int]) -> list[bytes]:
    return [
        wire[start:end] for start, end in pairwise(sorted({0, len(wire), *(at for at in places if at < len(wire))}))
    ]


GET = b"GET /a?b HTTP/1.1\r\nHost: p\r\n\r\n"
POST = b"POST /v1/x HTTP/1.1\r\nHOST: p\r\nX-Odd:\t v \t\r\nX-Odd: w\r\nEmpty:\r\n"
TRAILERS = b"Trailer: t\r\nContent-Length: 7\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n1\r\nd\r\n0\r\n" + TRAILERS
REQUESTS = [
    GET,
    POST + b"Content-Length: 4\r\n\r\nabcd",
    POST + CHUNKED,
    GET + POST + CHUNKED + b"\r\n" + GET,
    POST + b"Connection: close\r\n\r\n" + GET,
    POST + b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\nab",
    b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\nxyz",
    b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"GET / HTTP/2.0\r\n\r\n",
    b"GET / HTTP/1.1\r\nA B: c\r\n\r\n",
    b"GET / HTTP/1.1\r\nA: b\rC: d\r\n\r\n",
    b"GET / HTTP/1.1\nHost: p\n\n",
    b"\x16\x03\x01\x00\xa5",
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
]
OK = b"HTTP/1.1 200 OK\r\n"
ANSWERS = [
    OK + b"Content-Length: 5\r\nX-A: 1\r\nx-a: 2 \r\n\r\nhello",
    OK + b"Content-Length: 0\r\n\r\n",
    OK + CHUNKED,
    OK + b"Content-Length: 2\r\n\r\nhi" + OK + b"Content-Length: 3\r\n\r\nbad",
    OK + b"Content-Length: 2\r\n\r\nhi\x00\x01",
    OK + b"Content-Length: 2\r\nConnection: close\r\n\r\nhixx",
    OK + b"Server: s\r\n\r\nuntil the end",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nContent-Length: 9\r\n\r\n"
    + OK
    + b"Content-Length: 1\r\n\r\nx",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc",
    b"HTTP/1.1 503 No\r\nRetry-After: 3\r\nContent-Length: 1\r\n\r\nx",
    b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx",
    b"SSH-2.0-OpenSSH\r\n",
    OK + b"Content-Length: x\r\n\r\n",
    OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
]
PLACES = st.lists(st.integers(1, 250), max_size=6)


@pytest.mark.parametrize("wire", REQUESTS, ids=range(len(REQUESTS)))
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_requests_are_the_same_to_both(wire: bytes, step: int) -> None:
    pieces = cut(wire, list(range(0, len(wire), step)))
    assert requests(http1, pieces) == requests(uncompiled, pieces)


@given(st.sampled_from(REQUESTS), st.sampled_from(REQUESTS), PLACES, st.integers(0, 250), st.integers(0, 255))
def test_mutated_requests_are_the_same_to_both(one: bytes, two: bytes, places: list[int], at: int, code: int) -> None:
    wire = one[:at] + bytes([code]) + one[at + 1 :] + two
    assert requests(http1, cut(wire, places)) == requests(uncompiled, cut(wire, places))


@pytest.mark.parametrize("wire", ANSWERS, ids=range(len(ANSWERS)))
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_answers_are_the_same_to_both(wire: bytes, step: int) -> None:
    pieces = cut(wire, list(range(0, len(wire), step)))
    assert answers(http1, pieces) == answers(uncompiled, pieces)


@given(st.sampled_from(ANSWERS), PLACES, st.integers(0, 250), st.integers(0, 255))
def test_mutated_answers_are_the_same_to_both(wire: bytes, places: list[int], at: int, code: int) -> None:
    wire = wire[:at] + bytes([code]) + wire[at + 1 :]
    assert answers(http1, cut(wire, places)) == answers(uncompiled, cut(wire, places))


@BOTH
def test_a_head(parsers: Any) -> None:
    told, ended = requests(parsers, [POST + b"Content-Length: 2\r\n\r\nab"])
    headers = [(b"host", b"p"), (b"x-odd", b"v"), (b"x-odd", b"w"), (b"empty", b""), (b"content-length", b"2")]
    fields = {"host": "p", "x-odd": "v", "empty": "", "content-length": "2"}
    assert told == ["begin", (b"POST", b"/v1/x", headers, fields, "1.1", True, False), b"ab", "whole"] and not ended


@BOTH
def test_one_answer_after_another(parsers: Any) -> None:
    parser = parsers.AnswerParser()
    for text in (b"one", b"three"):
        assert parser.feed(OK + b"Content-Length: %d\r\n\r\n%b" % (len(text), text)) == text
        assert parser.is_whole and parser.can_be_kept and parser.status == 200
        parser.next()
        assert not parser.is_whole and parser.status == 0 and parser.headers == {}


@pytest.mark.parametrize("line", [b"Trailer: %b\r\n" % (b"t" * 4000), b"t" * 4000], ids=["many lines", "one line"])
@BOTH
def test_trailers_are_as_long_as_a_head_at_most(parsers: Any, line: bytes) -> None:
    for lines, failed in ((60, ""), (80, "not HTTP")):
        start = b"" if line.endswith(b"\n") else b"Trailer: "
        end = b"\r\n" if not start else b"\r\n\r\n"
        said = answers(parsers, [OK + CHUNKED[: -len(TRAILERS)], start, *[line] * lines, end])
        assert (said["body"], said["failed"], said["is_whole"]) == (b"abcd", failed, not failed)


@BOTH
def test_so_are_extensions_of_chunks_between_two_parts_of_a_body(parsers: Any) -> None:
    for lines, body, failed in ((60, b"abcabc", ""), (80, b"", "not HTTP")):
        chunk = [b"3;x=", *[b"x" * 4000] * lines, b"\r\nabc\r\n"]
        said = answers(parsers, [OK, b"Transfer-Encoding: chunked\r\n\r\n", *chunk, *chunk, b"0\r\n\r\n"])
        assert (said["body"], said["failed"], said["is_whole"]) == (body, failed, not failed)


class Failing(Told):
    def on_body(self, data: bytes) -> None:
        raise LookupError("a defect")


@BOTH
def test_a_defect_behind_the_parser_is_raised_as_it_is(parsers: Any) -> None:
    told = Failing()
    parser = told.parser = parsers.RequestParser(told)
    with pytest.raises(LookupError, match="a defect"):
        parser.feed(POST + b"Content-Length: 2\r\n\r\nab")


def test_a_parser_that_is_called_while_it_parses_says_so() -> None:
    class Again(Told):
        def on_body(self, data: bytes) -> None:
            parser.feed(b"x")

    told = Again()
    parser = told.parser = http1.RequestParser(told)
    with pytest.raises(RuntimeError, match="while it parses"):
        parser.feed(POST + b"Content-Length: 2\r\n\r\nab")
