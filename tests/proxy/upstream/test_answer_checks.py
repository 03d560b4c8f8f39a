"""How much of a stream is held until it has begun, however its worker goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import chain, repeat
from typing import cast

import pytest

from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Phase
from ppd.proxy.openai.answer import AnswerObserver
from ppd.proxy.openai.edits import Edits
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.openai.stream_relay import StreamRelay
from ppd.proxy.upstream.answer_checks import OPENING_LIMIT_BYTES, until_begun
from ppd.proxy.upstream.call import Answer

PIECE = 1024 * 1024
OPENINGS = {
    Endpoint.CHAT: b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    Endpoint.RESPONSES: b'data: {"type":"response.created","response":{"id":"r"}}\n\n',
}
COMMENTS = b": still here\n\n" * (PIECE // 14)
FLOODS = {"an event without an end": (b'data: {"x":"', b"y" * PIECE), "comments": (b"", COMMENTS)}


class Flood:
    """An answer that opens, and never comes to an end."""

    first_s = 60.0

    def __init__(self, *pieces: bytes) -> None:
        self._pieces: Iterator[bytes] = chain(pieces, repeat(pieces[-1]))
        self.taken_bytes = 0

    async def chunk(self, *, by_s: float) -> bytes:
        await asyncio.sleep(0)
        piece = next(piece for piece in self._pieces if piece)
        self.taken_bytes += len(piece)
        assert self.taken_bytes < 4 * OPENING_LIMIT_BYTES, "it is read for ever"
        return piece

    def failure(self, message: str, cause: Cause) -> LegError:
        return LegError(message, worker="w", phase=Phase.FIRST_EVENT, cause=cause)


async def begun(endpoint: Endpoint, flood: Flood) -> bytes:
    observer = AnswerObserver(endpoint)
    relay = StreamRelay(endpoint, Edits(), observer)
    async with asyncio.timeout(60):
        return await until_begun(endpoint, cast(Answer, flood), relay, observer, 60.0)


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("endpoint", OPENINGS)
async def test_what_comes_after_the_opening_event_is_passed_on_before_it_fills_the_memory(
    endpoint: Endpoint, flood: str
) -> None:
    opening, (start, rest) = OPENINGS[endpoint], FLOODS[flood]
    first = await begun(endpoint, Flood(opening, start, rest))
    assert first.startswith(opening + start + rest)
    assert len(first) <= OPENING_LIMIT_BYTES + PIECE


@pytest.mark.parametrize("flood", FLOODS)
async def test_what_comes_before_any_event_is_no_answer(flood: str) -> None:
    with pytest.raises(LegError) as failure:
        await begun(Endpoint.CHAT, Flood(*FLOODS[flood]))
    assert failure.value.cause is Cause.MALFORMED
