"""What the edge around the app knows of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.proxy.bodies.body_memory import BodyMemory
from ppd.proxy.downstream.asgi_edge import GuardedExchange


def exchange_of(event: dict[str, Any]) -> GuardedExchange:
    """event: what the client does when it is listened to."""

    async def receive() -> Any:
        return event

    async def send(_: Any) -> None:
        pass

    room = BodyMemory(1 << 20, 1.0).room()
    return GuardedExchange({"http_version": "1.1", "path": "/metrics"}, receive, send, room, 60.0)


@pytest.mark.parametrize(
    ("length", "sent", "is_broken"),
    [("6", b"abcdef", False), ("6", b"abc", True), (None, b"abcdef", True), ("0", b"", False)],
)
async def test_a_client_that_has_the_whole_body_may_go_before_the_app_says_that_it_was_all(
    length: str | None, sent: bytes, is_broken: bool
) -> None:
    """An app sends a body in pieces and then an empty one; a client that was told the length closes before that."""
    exchange = exchange_of({"type": "http.disconnect"})
    headers = [] if length is None else [(b"content-length", length.encode())]
    await exchange.send({"type": "http.response.start", "status": 200, "headers": headers, "trailers": False})
    await exchange.send({"type": "http.response.body", "body": sent, "more_body": True})
    await exchange.receive()
    assert exchange.is_broken is is_broken
