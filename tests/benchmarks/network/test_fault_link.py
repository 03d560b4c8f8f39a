"""The bad network itself: what it does to bytes and to connections."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from random import Random

import pytest

from benchmarks.network.fault_link import Conditions, FaultLink, LinkDirection, Way
from tests.tidy_loop import unheard

pytestmark = pytest.mark.e2e  # processes and sockets, for which it waits

Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def arrivals(conditions: Conditions, *sends: tuple[float, int], seed: int = 0) -> list[float]:
    line = LinkDirection(Random(seed))
    return [line.arrival_s(now_s, size, conditions) for now_s, size in sends]


def test_latency_is_added_once_to_each_chunk() -> None:
    assert arrivals(Conditions(latency_s=0.5), (1.0, 10), (1.25, 10_000)) == [1.5, 1.75]


def test_without_conditions_all_arrives_at_once() -> None:
    assert arrivals(Conditions(), (1.0, 10), (1.0, 10**6)) == [1.0, 1.0]


def test_bandwidth_lets_one_chunk_wait_for_the_other() -> None:
    conditions = Conditions(bandwidth_bps=100, latency_s=1)
    assert arrivals(conditions, (0.0, 100), (0.5, 50), (9.0, 100)) == [2.0, 2.5, 11.0]


def test_jitter_is_drawn_within_its_bounds() -> None:
    sends = [(float(n), 1) for n in range(500)]
    times = arrivals(Conditions(latency_s=0.25, jitter_s=0.5), *sends)
    delays = [arrived - sent for arrived, (sent, _) in zip(times, sends, strict=True)]
    assert 0.25 <= min(delays) < 0.3
    assert 0.7 < max(delays) <= 0.75


def test_jitter_keeps_the_order() -> None:
    times = arrivals(Conditions(jitter_s=0.5), *[(n * 0.001, 1) for n in range(500)])
    assert times == sorted(times)


@pytest.mark.parametrize("loss", [0.01, 0.05, 0.5])
def test_so_many_packets_are_lost_and_each_loss_waits_for_a_time_out(loss: float) -> None:
    sends = [(n * 1000.0, 1) for n in range(4000)]
    stalls = [
        round(arrived - sent, 6)
        for arrived, (sent, _) in zip(arrivals(Conditions(loss=loss), *sends), sends, strict=True)
    ]
    lost = sum(stall > 0 for stall in stalls) / len(sends)
    assert lost == pytest.approx(loss, rel=0.3)
    twice = sum(stall >= 0.6 for stall in stalls) / len(sends)
    assert twice == pytest.approx(loss**2, abs=0.02)
    assert min((stall for stall in stalls if stall), default=0) == 0.2


def test_a_large_chunk_is_many_packets() -> None:
    small = sum(arrivals(Conditions(loss=0.1), (0.0, 1), seed=seed)[0] > 0 for seed in range(300))
    large = sum(arrivals(Conditions(loss=0.1), (0.0, 20 * 1448), seed=seed)[0] > 0 for seed in range(300))
    assert small < 60
    assert large > 240


def test_what_is_behind_a_lost_packet_waits_too() -> None:
    times = arrivals(Conditions(loss=0.5), *[(n * 0.01, 1) for n in range(50)])
    assert times == sorted(times)


def test_the_same_seed_is_the_same_weather() -> None:
    sends = [(n * 0.1, 3000) for n in range(100)]
    bad = Conditions(latency_s=0.01, jitter_s=0.05, loss=0.1)
    assert arrivals(bad, *sends, seed=3) == arrivals(bad, *sends, seed=3) != arrivals(bad, *sends, seed=4)


class Far:
    """The target: keeps the ends of its connections."""

    def __init__(self) -> None:
        self.pipes: asyncio.Queue[Pipe] = asyncio.Queue()
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pipes.put_nowait((reader, writer))


@asynccontextmanager
async def linked(conditions: Conditions | None = None) -> AsyncIterator[tuple[FaultLink, Far]]:
    far = Far()
    server = await asyncio.start_server(far.serve, "127.0.0.1", 0)
    far.port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(60), server, FaultLink("127.0.0.1", far.port, conditions=conditions) as link:
        yield link, far


@asynccontextmanager
async def connected(conditions: Conditions | None = None) -> AsyncIterator[tuple[FaultLink, Far, Pipe, Pipe]]:
    """The client's end, and the target's."""
    async with linked(conditions) as (link, far), AsyncExitStack() as stack:
        near = await connect(link)
        stack.callback(near[1].close)
        distant = await far.pipes.get()
        stack.callback(distant[1].close)
        yield link, far, near, distant


async def connect(link: FaultLink) -> Pipe:
    host, _, port = link.address.partition(":")
    return await asyncio.open_connection(host, int(port))


async def is_silent(reader: asyncio.StreamReader) -> bool:
    """Whether nothing comes, not even an end, while the loop has time for all that is under way."""
    reading = asyncio.ensure_future(reader.read(100))
    await asyncio.wait({reading}, timeout=0.05)
    if reading.done():
        return False
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return True


async def test_bytes_and_ends_pass_both_ways() -> None:
    async with connected() as (link, _, near, far):
        blob = bytes(range(256)) * 4000
        near[1].write(blob)
        assert await far[0].readexactly(len(blob)) == blob
        far[1].write(blob[::-1])
        assert await near[0].readexactly(len(blob)) == blob[::-1]
        near[1].write_eof()
        assert await far[0].read() == b""
        far[1].write(b"last words")
        far[1].close()
        assert await near[0].read() == b"last words"
        near[1].close()
        while link.connections:
            await asyncio.sleep(0)


async def test_latency_is_waited_out_and_later_chunks_do_not_add_to_it() -> None:
    async with connected(Conditions(latency_s=0.1)) as (_, _, near, far):
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for _ in range(5):
            near[1].write(b"x")
            await asyncio.sleep(0.01)
        await far[0].readexactly(1)
        assert loop.time() - begun >= 0.1
        await far[0].readexactly(4)


@pytest.mark.parametrize("ways", [(), (Way.OUT,), (Way.BACK,)], ids=["both", "out", "back"])
async def test_a_partition_holds_what_is_sent_until_it_is_healed(ways: tuple[Way, ...]) -> None:
    async with connected() as (link, _, near, far):
        await link.partition(*ways)
        near[1].write(b"out")
        far[1].write(b"back")
        far[1].write_eof()
        assert await is_silent(far[0]) is (Way.OUT in (ways or Way))
        assert await is_silent(near[0]) is (Way.BACK in (ways or Way))
        link.heal()
        if Way.OUT in (ways or Way):
            assert await far[0].readexactly(3) == b"out"
        if Way.BACK in (ways or Way):
            assert await near[0].read() == b"back"


async def test_a_partition_answers_no_syn_until_it_is_healed() -> None:
    async with linked() as (link, far):
        await link.partition()
        attempts = [asyncio.ensure_future(connect(link)) for _ in range(3)]
        done, _ = await asyncio.wait(attempts, timeout=0.1)
        assert not done
        link.heal()
        for _, writer in await asyncio.gather(*attempts):
            writer.close()
        for _ in attempts:
            (await far.pipes.get())[1].close()
        assert far.pipes.empty(), "what plugged the port is no client"


async def test_a_partition_can_accept_and_be_silent() -> None:
    async with linked() as (link, far):
        await link.partition(accepts=True)
        reader, writer = await connect(link)
        writer.write(b"hello")
        assert await is_silent(reader)
        assert far.pipes.empty()
        link.heal()
        distant = await far.pipes.get()
        assert await distant[0].readexactly(5) == b"hello"
        for end in (writer, distant[1]):
            end.close()


async def test_partitions_come_and_go() -> None:
    async with linked() as (link, far):
        for _ in range(3):
            await link.partition()
            await link.partition()
            link.heal()
            link.heal()
            _, writer = await connect(link)
            (await far.pipes.get())[1].close()
            assert far.pipes.empty(), "one connection for one client, and none for what plugged the port"
            writer.close()


async def test_a_reset_reaches_both_ends() -> None:
    async with connected() as (link, _, near, far):
        link.reset()
        for reader in (near[0], far[0]):
            with pytest.raises(ConnectionResetError):
                await reader.read()


@pytest.mark.parametrize("from_near", [True, False])
async def test_an_ends_own_reset_reaches_the_other(from_near: bool) -> None:
    async with connected() as (link, _, near, far):
        breaker, other = (near, far) if from_near else (far, near)
        breaker[1].write(b"before")
        assert await other[0].readexactly(6) == b"before"
        no_linger = struct.pack("ii", 1, 0)
        breaker[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        breaker[1].transport.abort()
        with pytest.raises(ConnectionResetError):
            await other[0].read()
        while link.connections:
            await asyncio.sleep(0)


async def test_a_target_that_is_not_there_resets_the_client() -> None:
    async with FaultLink("127.0.0.1", 1) as link:
        reader, writer = await connect(link)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


async def test_a_slow_reader_is_not_run_over() -> None:
    async with connected() as (_, _, near, far):
        sent = 0
        near[1].transport.set_write_buffer_limits(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                while sent < 10**9:
                    near[1].write(bytes(2**16))
                    await near[1].drain()
                    sent += 2**16
        assert sent < 10**8
        assert far[0] is not None


async def test_a_connection_that_comes_as_it_ends_is_closed() -> None:
    with unheard() as said, ExitStack() as clients:
        async with FaultLink("127.0.0.1", 1) as link:
            host, _, port = link.address.partition(":")
            client = clients.enter_context(socket.create_connection((host, int(port)), timeout=10))
            link._accept()
        assert client.recv(1) == b""
    assert said == []
