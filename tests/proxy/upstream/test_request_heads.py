"""What a worker is sent before a body: whose key, what is accepted, and nothing that breaks a head."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Phase
from ppd.proxy.upstream.call import UNASKABLE, Call
from ppd.proxy.upstream.client import Upstream
from tests.support.scripted_workers import PATIENT, WHOLE, worker


@pytest.mark.parametrize(
    ("key", "is_trusted", "given", "seen"),
    [
        ("", True, {"authorization": "Bearer client"}, b"authorization: bearer client"),
        ("own", True, {}, b"authorization: bearer own"),
        ("own", True, {"authorization": "Bearer client"}, b"authorization: bearer own"),
        ("own", False, {}, b""),
    ],
)
async def test_the_proxys_key_goes_to_trusted_workers_alone(
    key: str, is_trusted: bool, given: dict[str, str], seen: bytes
) -> None:
    head = await head_sent(Upstream(keepalive_s=4.0, key=key), given, is_trusted=is_trusted)
    assert [line for line in head if b"authorization" in line] == ([seen] if seen else [])


@pytest.mark.parametrize(("given", "seen"), [({}, b"*/*"), ({"accept": "text/event-stream"}, b"text/event-stream")])
async def test_a_worker_hears_once_what_is_accepted(given: dict[str, str], seen: bytes) -> None:
    head = await head_sent(Upstream(keepalive_s=4.0), given)
    assert [line for line in head if line.startswith(b"accept:")] == [b"accept: " + seen]


async def head_sent(upstream: Upstream, given: dict[str, str], *, is_trusted: bool = True) -> list[bytes]:
    """The lines of a request's head, in lower case; the upstream is closed after it."""
    heads = list[bytes]()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).lower())
        writer.write(WHOLE)
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(take, "127.0.0.1", 0)
    target = replace(worker(listening.sockets[0].getsockname()[1]), is_trusted=is_trusted)
    async with upstream.answer(Call(target), "/", headers=given, timeouts=PATIENT) as answer:
        assert await answer.body() == b"hi"
    await upstream.close()
    listening.close()
    return heads[0].split(b"\r\n")


@pytest.mark.parametrize("value", ["a\r\nX: 1", "a\nX: 1", "a\rX: 1"])
async def test_what_does_not_fit_into_a_head_is_the_failure_of_its_worker(upstream: Upstream, value: str) -> None:
    call = Call(worker(1))
    with pytest.raises(LegError) as failure:
        async with upstream.answer(call, "/", headers={"x-request-id": value}, timeouts=PATIENT):
            pass
    assert (failure.value.phase, failure.value.cause, failure.value.worker) == (
        Phase.CONNECT,
        Cause.REFUSED,
        call.worker_id,
    )
    assert failure.value.message == UNASKABLE.message
