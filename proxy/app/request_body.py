"""Reads a request's body, with a time limit."""

from __future__ import annotations

import asyncio

from quart import request

from ..bodies.body_reader import Body
from ..bodies.received import ReceivedBody
from ..errors import BodyTooLarge, RequestError


async def whole_body(limit_s: float, limit_bytes: int) -> Body:
    """The body of the current request; RequestError (408) if it takes longer than `limit_s`.

    Quart's own limit is an `asyncio.wait_for`. In Python 3.11 that swallows a cancellation that comes just as its task
    is done: the proxy would then never notice that the client has left.
    """
    try:
        async with asyncio.timeout(limit_s):
            received = ReceivedBody()
            async for data in request.body:
                received.add(data)
                if received.size > limit_bytes:
                    raise BodyTooLarge(f"the body is larger than {limit_bytes} bytes")
            return received.take()
    except TimeoutError as exc:
        error = RequestError(f"the body did not come within {limit_s:g} s")
        error.status = 408
        raise error from exc
