"""A body is read within its time, and a client that leaves as it ends is noticed."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

import pytest
from quart import Quart

from ppd.proxy.app.request_body import check_coding, decoded, whole_body
from ppd.proxy.bodies.body_memory import BodyMemory
from ppd.proxy.errors import RequestError

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

    async with asyncio.timeout(60):
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
    async with asyncio.timeout(60):
        while not statuses:
            await asyncio.sleep(0.005)
    answering.cancel()
    assert statuses == [408]


@pytest.mark.parametrize("size", [0, 1, 1000, 100_000])
async def test_a_gzip_body_is_decoded(size: int) -> None:
    body = b"x" * size
    assert await decoded(gzip.compress(body, mtime=0), 100_000, None) == body


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(gzip.compress(b"x" * 1001), 413, id="one byte too many"),
        pytest.param(gzip.compress(b"0" * 20_000_000), 413, id="a bomb of 19 KB"),
        pytest.param(gzip.compress(b"x" * 1000)[:-1], 400, id="cut"),
        pytest.param(gzip.compress(b"x") + gzip.compress(b"x"), 400, id="two"),
        pytest.param(gzip.compress(b"x") * 100_000, 400, id="many"),
        pytest.param(gzip.compress(b"x") + b"{}", 400, id="more behind it"),
        pytest.param(zlib.compress(b"x"), 400, id="zlib"),
        pytest.param(b"{}", 400, id="plain"),
        pytest.param(b"", 400, id="empty"),
    ],
)
async def test_what_is_too_large_or_no_gzip_is_refused(body: bytes, status: int) -> None:
    with pytest.raises(RequestError) as caught:
        await decoded(body, 1000, None)
    assert caught.value.status == status


@pytest.mark.parametrize("size", [1000, 50_000, 3_000_000])
async def test_a_gzip_body_takes_the_room_of_what_it_decodes_to(size: int) -> None:
    memory = BodyMemory(8_000_000, 60.0)
    large, small, room = memory.room(), memory.room(), memory.room()
    await large.wait(7_000_000)
    await small.wait(1_000_000)
    body = bytes(size)
    decoding = asyncio.create_task(decoded(gzip.compress(body), 10_000_000, room))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not decoding.done()
    large.free()
    small.free()
    found = await decoding
    assert bytes(found if isinstance(found, bytes) else found.view()) == body
    assert memory.held_bytes == size
    room.free()


async def test_a_gzip_body_that_tells_less_than_it_holds_is_no_gzip() -> None:
    memory = BodyMemory(5_000_000, 60.0)
    lying = gzip.compress(bytes(2_000_000))[:-4] + (1000).to_bytes(4, "little")
    with pytest.raises(RequestError) as caught:
        await decoded(lying, 10_000_000, memory.room())
    assert (caught.value.status, memory.held_bytes) == (400, 1000)


@pytest.mark.parametrize(
    ("coding", "is_compressed"), [("", False), ("identity", False), ("gzip", True), ("GZIP", True), ("x-gzip", True)]
)
def test_what_a_body_may_be_coded_with(coding: str, is_compressed: bool) -> None:
    assert check_coding(coding) is is_compressed


@pytest.mark.parametrize("coding", ["br", "zstd", "deflate", "gzip, gzip", "gzip, identity", "nonsense"])
def test_any_other_coding_is_refused(coding: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_coding(coding)
    assert (caught.value.status, caught.value.param) == (415, "content-encoding")
