"""Which headers of a client the picker reads."""

from __future__ import annotations

import pytest

from ppd.proxy.gateway.headers import read
from ppd.proxy.gateway.messages import ProcessingRequest

LONG = 200 * "a"


@pytest.mark.parametrize(
    ("names", "read_as"),
    [
        ((":path", "x-a1", "content-type"), (":path", "x-a1", "content-type")),
        (("X-A", "x-b"), ("x-a", "x-b")),
        (("x-a", "X-A"), ("x-a",)),
        (("x a", "x-b"), ("x-b",)),
        (("", "x-b"), ("x-b",)),
        (("x-a\nx-c", "x-b"), ("x-b",)),
        ((f"{LONG}_", "x-b"), (f"{LONG}_", "x-b")),  # at once: a pattern that tries every split never ends
        ((f"{LONG}(", "x-b"), ("x-b",)),
    ],
)
def test_only_names_that_http_has_are_read(names: tuple[str, ...], read_as: tuple[str, ...]) -> None:
    request = ProcessingRequest()
    for name in names:
        request.request_headers.headers.headers.add(key=name, raw_value=b"1")
    assert tuple(read(request.request_headers.headers)) == read_as


@pytest.mark.parametrize(
    ("values", "read_as"),
    [
        ((b"1", b"2"), {"a": "1", "b": "2"}),
        ((b"", b"2"), {"a": "", "b": "2"}),
        ((b"caf\xe9", b"2"), {"a": "caf\xe9", "b": "2"}),
        ((b"1\n2", b"3"), {"b": "3"}),
        ((b"1\r", b"2"), {"b": "2"}),
        ((b"1", b"2\0"), {"a": "1"}),
        ((b"\n", b"\n"), {}),
    ],
)
def test_only_values_that_http_has_are_read(values: tuple[bytes, bytes], read_as: dict[str, str]) -> None:
    request = ProcessingRequest()
    for name, value in zip("ab", values, strict=True):
        request.request_headers.headers.headers.add(key=name, raw_value=value)
    assert read(request.request_headers.headers) == read_as


def test_a_value_that_is_text_is_read_too() -> None:
    request = ProcessingRequest()
    request.request_headers.headers.headers.add(key="a", value="1")
    request.request_headers.headers.headers.add(key="b", raw_value=b"2")
    assert read(request.request_headers.headers) == {"a": "1", "b": "2"}


def test_of_a_repeated_header_the_first_counts() -> None:
    request = ProcessingRequest()
    for value in (b"1", b"2"):
        request.request_headers.headers.headers.add(key="authorization", raw_value=value)
    assert read(request.request_headers.headers) == {"authorization": "1"}
