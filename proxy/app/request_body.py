"""A request's body, whole and in time."""

from __future__ import annotations

import asyncio

from quart import request

from ..errors import RequestError


async def whole_body(limit_s: float) -> bytes:
    """The body of the request at hand; RequestError (408) where it takes longer.

    Not by Quart's own limit, an `asyncio.wait_for`: in Python 3.11 that swallows a cancellation which comes as its task
    is done, and the client of a turn that was just read would never be seen to leave.
    """
    try:
        async with asyncio.timeout(limit_s):
            data = await request.get_data(cache=False)
    except TimeoutError as exc:
        error = RequestError(f"the body did not come within {limit_s:g} s")
        error.status = 408
        raise error from exc
    assert isinstance(data, bytes), "asked for as bytes"
    return data
