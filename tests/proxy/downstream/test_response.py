"""Heads of responses, byte by byte."""

from __future__ import annotations

import pytest

from ppd.proxy.downstream import response
from ppd.proxy.errors import Overloaded
from tests.support.raw_http import read_answers


@pytest.mark.parametrize(
    ("size", "is_chunked", "framing"),
    [
        (5, False, b"Content-Length: 5"),
        (0, True, b"Content-Length: 0"),
        (None, True, b"Transfer-Encoding: chunked"),
        (None, False, b""),  # its end is the connection's
    ],
)
def test_a_head_tells_where_its_body_ends(size: int | None, is_chunked: bool, framing: bytes) -> None:
    head = response.head(200, (("A", "b"),), size=size, is_chunked=is_chunked)
    lines = head.split(b"\r\n")
    assert [lines[0], *lines[2:]] == [b"HTTP/1.1 200 OK", b"A: b", *filter(None, [framing]), b"", b""]
    assert lines[1].startswith(b"Date: ")


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\rb"])
@pytest.mark.parametrize("connection", ["", "Connection: close\r\n"])
def test_no_value_adds_a_line(value: str, connection: str) -> None:
    with pytest.raises(ValueError, match="line end"):
        response.head(200, (("A", value),), size=0, connection=connection)


@pytest.mark.parametrize(
    ("keeps_alive", "is_old", "told"),
    [(True, False, ""), (True, True, "keep-alive"), (False, False, "close"), (False, True, "close")],
)
def test_only_what_is_not_the_versions_own_way_is_told(keeps_alive: bool, is_old: bool, told: str) -> None:
    assert response.connection(keeps_alive, is_old=is_old) == (f"Connection: {told}\r\n" if told else "")


@pytest.mark.parametrize(("target", "is_theirs"), [(b"/v1/messages?beta=true", True), (b"/v1/models", False)])
def test_a_refusal_is_whole_in_the_shape_of_its_path(target: bytes, is_theirs: bool) -> None:
    error = Overloaded("full", reason="queue_full", retry_after_s=7.0)
    told = response.refusal(error, target, (("Vary", "Origin"),))
    (answer,) = read_answers(told)
    assert answer.status == 503 and answer.body.startswith(b'{"type":"error"') == is_theirs
    for line in (b"Retry-After: 7", b"Vary: Origin", b"Connection: close"):
        assert b"\r\n" + line + b"\r\n" in told
