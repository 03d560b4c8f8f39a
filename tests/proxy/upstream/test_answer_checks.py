"""What is an answer, and how much of a stream is held until it has begun, however its worker goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import cast

import pytest

from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Phase
from ppd.proxy.fleet.worker import Role
from ppd.proxy.openai.answer import AnswerObserver
from ppd.proxy.openai.edits import Edits, Redaction
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.openai.stream_relay import StreamRelay
from ppd.proxy.upstream.answer_checks import OPENING_LIMIT_BYTES, check_begun, check_whole, has_begun, until_begun
from ppd.proxy.upstream.call import Answer
from tests.support.attempts import view
from tests.support.clock import scenario

PIECE = 1024 * 1024
IDLE_S = 30.0
OPENINGS = {
    Endpoint.CHAT: b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    Endpoint.RESPONSES: b'data: {"type":"response.created","response":{"id":"r"}}\n\n',
}
COMMENTS = b": still here\n\n" * (PIECE // 14)
FLOODS = {"an event without an end": (b'data: {"x":"', b"y" * PIECE), "comments": (b"", COMMENTS)}


class Flood:
    """An answer that opens, and never comes to an end."""

    first_s = 60.0

    def __init__(self, *pieces: bytes, is_slow: bool = False) -> None:
        """is_slow: each piece takes a second."""
        self.is_slow = is_slow
        self._pieces: Iterator[bytes] = chain(pieces, repeat(pieces[-1]))
        self.taken_bytes = 0
        self.left_s = list[float]()  # that each piece may take

    async def chunk(self, *, by_s: float) -> bytes:
        self.left_s.append(by_s - asyncio.get_running_loop().time())
        await asyncio.sleep(1.0 if self.is_slow else 0.0)
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
        return await until_begun(endpoint, cast(Answer, flood), relay, observer, IDLE_S)


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


@scenario
async def test_all_before_the_first_event_has_one_limit_and_the_next_event_one_of_its_own() -> None:
    text = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
    flood = Flood(b": a\n\n", b": b\n\n", OPENINGS[Endpoint.CHAT], b": c\n\n", text, is_slow=True)
    assert (await begun(Endpoint.CHAT, flood)).endswith(text)
    assert flood.left_s == [60.0, 59.0, 58.0, IDLE_S, IDLE_S - 1.0]


async def test_a_stream_that_ends_before_it_began_is_broken() -> None:
    class Ending(Flood):
        async def chunk(self, *, by_s: float) -> bytes:
            return b""

    with pytest.raises(LegError) as failure:
        await begun(Endpoint.CHAT, Ending(b"x"))
    assert failure.value.cause is Cause.RESET


CHAT, RESPONSES = Endpoint.CHAT, Endpoint.RESPONSES
TEXT = b'{"choices":[{"index":0,"delta":{"content":"hi"},"message":{"content":"hi"}}]}'


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def ends(reason: str, tokens: int | None = None) -> bytes:
    usage = "null" if tokens is None else f'{{"prompt_tokens":3,"completion_tokens":{tokens}}}'
    return f'{{"choices":[{{"index":0,"delta":{{}},"finish_reason":"{reason}"}}],"usage":{usage}}}'.encode()


OPENED = OPENINGS[CHAT]
ROLE = b'{"choices":[{"index":0,"delta":{"content":""}}]}'


@pytest.mark.parametrize(
    ("data", "is_begun"),
    [
        (b"", False),
        (b": still here\n\n", False),
        (OPENED, False),
        (OPENED + event(TEXT), True),
        (event(TEXT), True),
        (OPENED + event(ROLE), True),  # from the model, which has begun
        (OPENED + event(ends("stop")), False),  # the usage after it tells whether there was a token
        (OPENED + event(ends("stop")) + event(b"[DONE]"), True),
        (OPENED + event(b'{"error":{"message":"no","code":503}}'), True),
        (event(b"{"), True),
    ],
)
def test_an_answer_has_begun_with_its_first_event_of_the_model(data: bytes, is_begun: bool) -> None:
    observer = AnswerObserver(CHAT)
    StreamRelay(CHAT, Edits(), observer).feed(data)
    assert has_begun(CHAT, observer) == is_begun


VIEW = view(Role.DECODE)
SECRET = b'{"error":{"message":"ask 10.0.0.9:1","code":503}}'


def redaction(_: object) -> Redaction:
    return Redaction("10.0.0.9:1")


def cause_of(check: Callable[[], None]) -> tuple[Cause, int] | None:
    """None: it is an answer."""
    try:
        check()
    except LegError as exc:
        assert (exc.worker, exc.phase) == (VIEW.id, Phase.FIRST_EVENT)
        assert b"10.0.0.9" not in exc.body
        return exc.cause, exc.status
    return None


ERRORS: list[tuple[bytes, tuple[Cause, int] | None]] = [
    (b'{"error":{"message":"busy","code":503}}', (Cause.OVERLOADED, 503)),
    (b'{"error":{"message":"no","code":400}}', (Cause.REQUEST, 400)),
    (b'{"error":{"message":"no","code":600}}', (Cause.ERROR_EVENT, 502)),
    (b'{"error":{"message":"no","code":"x"}}', (Cause.ERROR_EVENT, 502)),
    (SECRET, (Cause.OVERLOADED, 503)),
]


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        *((event(error), cause) for error, cause in ERRORS),
        (OPENED + event(TEXT), None),
        (event(TEXT) + event(b"{"), None),  # it has begun
        (event(b"{"), (Cause.MALFORMED, 502)),
        (event(b"[DONE]"), (Cause.MALFORMED, 502)),
        (OPENED + event(ends("abort")), (Cause.MALFORMED, 502)),
        (OPENED + event(ends("stop", 0)), (Cause.MALFORMED, 502)),  # an abort that ends as usual
        (OPENED + event(ends("stop", 1)), None),  # the model has nothing to say
    ],
)
def test_a_stream_that_begins_with_no_answer_is_a_failure(data: bytes, cause: tuple[Cause, int] | None) -> None:
    observer = AnswerObserver(CHAT)
    StreamRelay(CHAT, Edits(), observer).feed(data)
    assert cause_of(lambda: check_begun(observer, VIEW, redaction)) == cause


def whole(reason: str | None, content: str, tokens: int) -> bytes:
    finish = "null" if reason is None else f'"{reason}"'
    choice = f'{{"index":0,"message":{{"content":"{content}"}},"finish_reason":{finish}}}'
    return f'{{"choices":[{choice}],"usage":{{"prompt_tokens":3,"completion_tokens":{tokens}}}}}'.encode()


@pytest.mark.parametrize(
    ("endpoint", "body", "cause"),
    [
        *((CHAT, error, cause) for error, cause in ERRORS),
        (CHAT, whole("stop", "hi", 1), None),
        (CHAT, whole("stop", "hi", 0), None),  # whatever it counts
        (CHAT, whole("stop", "", 1), None),
        (CHAT, whole("stop", "", 0), (Cause.MALFORMED, 502)),
        (CHAT, whole("abort", "hi", 1), (Cause.MALFORMED, 502)),
        (CHAT, b"{", (Cause.MALFORMED, 502)),
        (CHAT, b"{}", (Cause.MALFORMED, 502)),
        (RESPONSES, b'{"id":"r","object":"response","status":"queued","output":[]}', None),
        (RESPONSES, b"{}", (Cause.MALFORMED, 502)),
    ],
)
def test_a_200_without_an_answer_is_a_failure(endpoint: Endpoint, body: bytes, cause: tuple[Cause, int] | None) -> None:
    observer = AnswerObserver(endpoint)
    observer.observe_body(body)
    assert cause_of(lambda: check_whole(endpoint, observer, VIEW, redaction)) == cause
