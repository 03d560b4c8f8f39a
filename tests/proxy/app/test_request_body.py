"""A body is read within its time, and a client that leaves as it ends is noticed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from quart import Quart

from ppd.proxy.app.request_body import whole_body

SCOPE: dict[str, Any] = {
    "type": "http",
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "path": "/",
    "raw_path": b"/",
    "query_string": b"",
    "root_path": "",
    "headers": [(b"host", b"x"), (b"content-length", b"2")],
    "client": ("1", 1),
    "server": ("1", 1),
    "extensions": {},
    "asgi": {"spec_version": "2.1"},
}


@pytest.mark.parametrize("ticks", range(6))
async def test_a_client_that_leaves_as_its_body_ends_is_noticed(ticks: int) -> None:
    """`ticks`: rounds of the loop between the body's end and the leaving."""
    app, answered, waiting = Quart("test"), [], asyncio.Event()
    app.config["BODY_TIMEOUT"] = None

    @app.post("/")
    async def turn() -> str:
        waiting.set()
        await whole_body(60.0, 1024)
        await asyncio.sleep(0.05)
        answered.append("to nobody")
        return ""

    events = [
        {"type": "http.request", "body": b"{}", "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        if len(events) == 2:
            await waiting.wait()
            await asyncio.sleep(0)
        else:
            for _ in range(ticks):
                await asyncio.sleep(0)
        return events.pop(0) if events else await asyncio.Event().wait()

    async def send(_: Any) -> None: ...

    async with asyncio.timeout(20):
        await app.asgi_app(SCOPE, receive, send)  # type: ignore[arg-type]
    assert answered == []


async def test_a_body_that_takes_too_long_is_refused() -> None:
    app = Quart("test")
    app.config["BODY_TIMEOUT"] = None
    statuses = []

    @app.post("/")
    async def turn() -> str:
        try:
            await whole_body(0.01, 1024)
        except Exception as exc:
            statuses.append(getattr(exc, "status", None))
        return ""

    async def receive() -> Any:
        return await asyncio.Event().wait()

    async def send(_: Any) -> None: ...

    answering = asyncio.create_task(app.asgi_app(SCOPE, receive, send))  # type: ignore[arg-type]
    async with asyncio.timeout(20):
        while not statuses:
            await asyncio.sleep(0.005)
    answering.cancel()
    assert statuses == [408]
