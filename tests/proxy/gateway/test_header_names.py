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
