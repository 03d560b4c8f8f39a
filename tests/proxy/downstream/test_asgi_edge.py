"""What the edge around the app knows of an answer."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from ppd.proxy.bodies.body_memory import BodyMemory
from ppd.proxy.config import ProxyConfig
from ppd.proxy.downstream.asgi_edge import Edge, GuardedExchange
from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Phase
from ppd.proxy.runtime.tasks import Drain
from ppd.proxy.telemetry.access_log import AccessLog
from tests.proxy.telemetry.test_access_log import Kept


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


@pytest.mark.parametrize(("is_whole", "is_broken"), [(True, False), (False, True)])
async def test_a_client_may_go_as_soon_as_it_has_the_end_of_an_answer_in_chunks(
    is_whole: bool, is_broken: bool
) -> None:
    """As one does that said `Connection: close`; the connection may tell of it before the app has returned."""
    exchange = exchange_of({"type": "http.disconnect"})
    await exchange.send({"type": "http.response.start", "status": 200, "headers": [], "trailers": False})
    await exchange.send({"type": "http.response.body", "body": b"abc", "more_body": True})
    if is_whole:
        await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
    exchange.leave()
    await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
    assert exchange.is_broken is is_broken


class Connection:
    """What an edge asks of its connection."""

    address, said = "", "open"

    def began(self, request: object) -> None: ...

    def ended(self, request: object, *, left: bool) -> None: ...

    def break_off(self) -> None:
        self.said = "broken off"

    def spoil(self) -> None:
        self.said = "spoilt"


def scope(connection: Connection, path: str, version: str = "1.1") -> Any:
    return {
        "type": "http",
        "http_version": version,
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"h")],
        "state": {"connection": connection},
    }


@pytest.mark.parametrize(("version", "said"), [("1.1", "broken off"), ("2", "spoilt")])
async def test_of_an_answer_that_its_worker_breaks_off_the_client_has_not_left(version: str, said: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
        await send({"type": "http.response.body", "body": b"abc", "more_body": True})
        raise LegError("", worker="w", phase=Phase.STREAM, cause=Cause.RESET)

    async def ignore(*_: Any) -> Any: ...

    connection, kept = Connection(), Kept()
    memory, log = BodyMemory(1 << 20, 1.0), AccessLog(as_json=True, lines=kept)
    edge = Edge(cast(Any, app), ProxyConfig(), Drain(), memory, log)
    await edge(scope(connection, "/v1/embeddings", version), ignore, ignore)
    assert connection.said == said
    (line,) = kept.lines
    told = json.loads(line)
    assert (told["status"], told["outcome"]) == (200, "broken")


@pytest.mark.parametrize(("path", "counted"), [("/v1/chat/completions", [413]), ("/v1/embeddings", [])])
async def test_a_turn_whose_body_gets_no_memory_as_it_comes_counts_as_rejected(path: str, counted: list[int]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"

    async def receive() -> Any:
        return {"type": "http.request", "body": b"x" * 2000, "more_body": True}

    async def send(event: Any) -> None:
        sent.append(event)

    sent: list[Any] = []
    rejected: list[int] = []
    edge = Edge(cast(Any, app), ProxyConfig(), Drain(), BodyMemory(1000, 1.0), rejected=rejected.append)
    await edge(scope(Connection(), path), receive, send)
    assert (sent[0]["status"], rejected) == (413, counted)
