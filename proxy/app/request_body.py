"""A request's body: read within its time, and decoded where its client compressed it."""

from __future__ import annotations

import asyncio
import zlib

from quart import request

from ..bodies.body_memory import ROOM, BodyRoom
from ..bodies.body_reader import Body, body_of
from ..bodies.received import ReceivedBody
from ..errors import BodyTooLarge, RequestError
from ..runtime.loop_watch import time_limit

_GZIP = ("gzip", "x-gzip")
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_SIZE_BYTES = 4  # at the end of a gzip member: the size of what it holds, modulo 2 ** 32
_AT_ONCE_BYTES = 2048  # decoded in under 10 ms whatever they hold; more is decoded beside the event loop


async def whole_body(limit_s: float, limit_bytes: int) -> Body:
    """The body of the current request, decoded; RequestError (408) if it takes longer than `limit_s`.

    Quart's own limit is an `asyncio.wait_for`. In Python 3.11 that swallows a cancellation that comes just as its task
    is done: the proxy would then never notice that the client has left.
    """
    is_compressed = check_coding(request.headers.get("Content-Encoding", ""))
    try:
        async with time_limit(limit_s):
            received = ReceivedBody()
            async for data in request.body:
                received.add(data)
                if received.size > limit_bytes:
                    raise BodyTooLarge(f"the body is larger than {limit_bytes} bytes")
    except TimeoutError as exc:
        error = RequestError(f"the body did not come within {limit_s:g} s")
        error.status = 408
        raise error from exc
    body = received.take()
    return await decoded(body, limit_bytes, request.scope.get("state", {}).get(ROOM)) if is_compressed else body


def check_coding(coding: str) -> bool:
    """Whether a body with this Content-Encoding is to be decoded; RequestError (415) for one that is not known."""
    if coding.lower() in _GZIP:
        return True
    if coding.lower() in ("", "identity"):
        return False
    error = RequestError("content-encoding: must be gzip or identity", param="content-encoding")
    error.status = 415
    raise error


async def decoded(body: Body, limit_bytes: int, room: BodyRoom | None) -> Body:
    """A gzip body decoded, once it has room for what it says that it holds; PPDError if it gets none.

    RequestError (400) if it is not gzip, BodyTooLarge if it holds more than `limit_bytes`.
    """
    data = body if isinstance(body, bytes) else body.view()
    size = int.from_bytes(data[-_SIZE_BYTES:], "little")
    if room is not None:
        await room.wait(min(size, limit_bytes))
    if len(data) <= _AT_ONCE_BYTES:
        return _decoded(data, size, limit_bytes)
    return body_of([await asyncio.to_thread(_decoded, data, size, limit_bytes)])


def _decoded(body: bytes | memoryview, size: int, limit_bytes: int) -> bytes:
    """size: as the body says, so more is not decoded."""
    # One member only: of many tiny ones each would copy all that follow it.
    member = zlib.decompressobj(_GZIP_WINDOW)
    try:
        data = member.decompress(body, min(size, limit_bytes) + 1)
    except zlib.error:
        raise RequestError("the body is not gzip, as its content-encoding says") from None
    if len(data) > limit_bytes:
        raise BodyTooLarge(f"the decoded body is larger than {limit_bytes} bytes")
    if not member.eof or member.unused_data:
        raise RequestError("the body must be one whole gzip member and nothing after it")
    return data
