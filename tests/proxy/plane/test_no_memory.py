"""Where no memory is left in the middle of sending, the connection ends: no byte is lost, or comes twice."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.proxy.plane.transports import BIG, SMALL_BYTES, Ends, Recorder, of_the_poller, take, until

allocator = pytest.importorskip("_testcapi", reason="this Python cannot be told that no memory is left")
PLACES = range(1, 25)  # of allocations, one of which fails; the last ones come after all is done
PARTS = (BIG, bytearray(BIG[:300_000]), memoryview(BIG)[7:200_000])
WHOLE = b"".join(PARTS)


@contextmanager
def one_allocation_fails(place: int) -> Iterator[None]:
    allocator.set_nomemory(place, place + 1)
    try:
        yield
    finally:
        allocator.remove_mem_hooks()


async def assert_all_or_its_beginning(
    ends: Ends, transport: asyncio.Transport, protocol: Recorder, wanted: bytes, peer: socket.socket
) -> None:
    """wanted: what `peer` still has to get."""
    if transport.is_closing():
        assert wanted.startswith(await take(peer))
        await until(lambda: protocol.lost)
        assert isinstance(protocol.lost[0], MemoryError) and ends.failures == protocol.lost
    else:
        transport.write(b"END")
        transport.write_eof()
        assert await take(peer) == wanted + b"END"
        transport.abort()
    assert all(isinstance(failure, MemoryError) for failure in ends.failures)  # be it of `pause_writing` alone
    ends.failures.clear()


def writes_at_once(ends: Ends, transport: asyncio.Transport, place: int) -> None:
    with one_allocation_fails(place):
        transport.write(BIG)


def writes_parts(ends: Ends, transport: asyncio.Transport, place: int) -> None:
    with one_allocation_fails(place):
        transport.writelines(PARTS)


WRITES: dict[Callable[[Ends, asyncio.Transport, int], None], bytes] = {writes_at_once: BIG, writes_parts: WHOLE}


@pytest.mark.parametrize("does", WRITES)
@of_the_poller
async def test_what_was_sent_in_part_is_followed_by_its_rest_or_by_nothing(
    ends: Ends, does: Callable[[Ends, asyncio.Transport, int], None]
) -> None:
    for place in PLACES:
        protocol = Recorder()
        transport, peer = await ends.pair(protocol, buffer_bytes=SMALL_BYTES)
        wanted = WRITES[does]
        try:
            does(ends, transport, place)
        except MemoryError:
            wanted = b""  # it is told to who writes, and the connection can be used
        await assert_all_or_its_beginning(ends, transport, protocol, wanted, peer)


@of_the_poller
async def test_what_was_kept_is_sent_once(ends: Ends) -> None:
    assert ends.poller is not None
    for place in PLACES:
        protocol = Recorder()
        transport, peer = await ends.pair(protocol, buffer_bytes=SMALL_BYTES)
        transport.writelines(PARTS)
        taken = b""
        with suppress(BlockingIOError):
            while part := peer.recv(65536):
                taken += part
        with suppress(MemoryError), one_allocation_fails(place):
            ends.poller._pump()  # type: ignore[attr-defined]
        await assert_all_or_its_beginning(ends, transport, protocol, WHOLE[len(taken) :], peer)
