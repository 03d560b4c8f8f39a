"""Channels between processes: whole batches in order, for a process that reads late, never, or from the middle."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ppd.proxy.peers import channels as module
from ppd.proxy.peers.channels import PACKET_BYTES, Channels, End, Ends, make_ends
from ppd.proxy.peers.events import Event, LimitCharged, SessionDropped

SMALL = "s"
LARGE = "l" * (3 * PACKET_BYTES)


class Receiver:
    """Channels whose events are kept."""

    def __init__(self, ends: Ends) -> None:
        self.received: list[tuple[int, str]] = []
        self.lost: list[int] = []
        self.channels = Channels(ends, {SessionDropped: self._apply}, self.lost.append)

    def _apply(self, sender: int, event: Event) -> None:
        assert isinstance(event, SessionDropped)
        self.received.append((sender, event.session_id))

    def texts(self) -> list[str]:
        self.channels.drain()
        return [text for _, text in self.received]


@contextmanager
def receivers(count: int = 2) -> Iterator[tuple[list[dict[int, End]], list[Receiver]]]:
    ends = make_ends(count)
    try:
        yield ends, [Receiver(of_one) for of_one in ends]
    finally:
        for end in (end for of_one in ends for end in of_one.values()):
            end.close()


def send(receiver: Receiver, *texts: str) -> None:
    for text in texts:
        receiver.channels.queue(SessionDropped(text))
    receiver.channels.flush()


async def until_received(speaker: Receiver, listener: Receiver, text: str) -> None:
    async with asyncio.timeout(60):
        while text not in listener.texts():
            await asyncio.sleep(0)


async def test_a_socket_is_asked_only_where_something_was_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    with receivers() as (ends, (one, two)):
        send(one, "first")
        assert two.texts() == ["first"]
        with monkeypatch.context() as without:
            without.setattr(ends[1][0], "socket", None)
            assert two.texts() == ["first"]
        send(one, "second")
        assert two.texts() == ["first", "second"]


async def test_whoever_drains_knows_what_was_said_before_its_request_was_read() -> None:
    """However many others look, and whenever: a client has its answer after it was told, and asks again after that."""
    loop, count = asyncio.get_running_loop(), 200
    client, accepted = socket.socketpair()
    looked: dict[int, bool] = {}

    async def turn(number: int) -> None:
        two.channels.drain()
        looked[number] = (0, str(number)) in two.received

    def read() -> None:
        tasks.extend([loop.create_task(turn(number)) for number in accepted.recv(count)])

    tasks: list[asyncio.Task[None]] = []
    with client, accepted, receivers() as (_, (one, two)):
        loop.add_reader(accepted, read)
        for number in range(count):
            two.channels.drain()
            send(one, str(number))
            client.send(bytes([number]))
            if number % 3:
                await asyncio.sleep(0)
        async with asyncio.timeout(60):
            while len(looked) < count:
                await asyncio.sleep(0)
        loop.remove_reader(accepted)
    assert all(looked.values())


async def test_what_one_said_that_died_before_it_counted_is_heard_too() -> None:
    with receivers() as (ends, (one, two)):
        send(one, "last words")
        packet = ends[1][0].socket.recv(2 * PACKET_BYTES)
        assert two.texts() == []
        two.channels.open()
        ends[0][1].socket.send(packet)
        async with asyncio.timeout(60):
            while not two.received:
                await asyncio.sleep(0)
        assert two.received == [(0, "last words")]
        two.channels.close()


async def test_a_successor_is_heard_at_once_whose_predecessor_died_before_it_counted() -> None:
    with receivers() as (ends, (one, two)):
        send(one, "last words")
        packet = ends[1][0].socket.recv(2 * PACKET_BYTES)
        assert two.texts() == []
        ends[0][1].socket.send(packet)
        successor = Receiver(ends[0])
        successor.channels.open()
        send(successor, "first words")
        assert two.texts() == ["last words", "first words"]
        successor.channels.close()


async def test_a_socket_is_not_asked_for_more_than_was_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call and an exception that a turn need not wait for."""
    with receivers() as (ends, (one, two)):
        assert two.texts() == []  # nor is it known what a predecessor has read before this
        with monkeypatch.context() as watched:
            asked = WatchedSocket(ends[1][0].socket)
            watched.setattr(ends[1][0], "socket", asked)
            send(one, "first")
            assert two.texts() == ["first"]
            send(one, "second")
            send(one, "third")
            assert two.texts() == ["first", "second", "third"]
            assert asked.times == 3


class WatchedSocket:
    def __init__(self, one: socket.socket) -> None:
        self._socket = one
        self.times = 0

    def recv_into(self, buffer: memoryview) -> int:
        self.times += 1
        return self._socket.recv_into(buffer)


def test_what_a_forked_process_says_is_counted_here() -> None:
    ends = make_ends(2)
    pid = os.fork()
    if pid == 0:
        try:
            ends[0][1].send(b"from the child")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert list(ends[1][0].sent[:2]) == [0, 1]
    assert ends[1][0].socket.recv(100) == b"from the child"
    for end in (end for of_one in ends for end in of_one.values()):
        end.close()


@pytest.mark.parametrize(
    "size", [0, 1, PACKET_BYTES - 20, *range(PACKET_BYTES - 6, PACKET_BYTES + 3), 5 * PACKET_BYTES]
)
async def test_a_batch_of_any_size_arrives_whole_at_all(size: int) -> None:
    with receivers(3) as (_, (one, *others)):
        send(one, "x" * size)
        send(one, "end")
        for other in others:
            assert other.texts() == ["x" * size, "end"]
            assert {sender for sender, _ in other.received} == {0}


async def test_what_was_told_is_there_when_flush_returns_and_in_the_order_of_telling() -> None:
    with receivers() as (_, (one, two)):
        send(one, *map(str, range(2000)))
        one.channels.queue(SessionDropped("all"))
        one.channels.send(1, [SessionDropped("one")])
        assert two.texts() == [*map(str, range(2000)), "all", "one"]


async def test_those_who_await_a_flush_in_one_round_share_a_packet_and_go_on_when_it_is_there() -> None:
    with receivers() as (ends, (one, two)):
        told = list[tuple[str, list[str]]]()

        async def tell(text: str) -> None:
            one.channels.queue(SessionDropped(text))
            await one.channels.flushed()
            told.append((text, two.texts()))

        first, left, last = (asyncio.create_task(tell(text)) for text in ("a", "b", "c"))
        await asyncio.sleep(0)
        before = ends[0][1].sent[ends[0][1].side]
        left.cancel()  # its client has left: the others wait on
        await asyncio.gather(first, last)
        assert told == [("a", ["a", "b", "c"]), ("c", ["a", "b", "c"])]
        assert ends[0][1].sent[ends[0][1].side] - before == 1
        await tell("d")
        assert told[-1] == ("d", ["a", "b", "c", "d"])
        assert left.cancelled()


async def test_who_awaits_a_flush_goes_on_where_it_fails() -> None:
    with receivers() as (_, (one, two)):
        asyncio.get_running_loop().set_exception_handler(lambda _, context: None)
        one.channels.queue(SessionDropped(object()))  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            await one.channels.flushed()
        one.channels.queue(SessionDropped("next"))
        async with asyncio.timeout(60):
            await one.channels.flushed()
        assert two.texts() == ["next"]


async def test_what_ends_after_the_close_is_still_told() -> None:
    with receivers() as (_, (one, two)):
        one.channels.queue(SessionDropped("before"))
        one.channels.close()
        one.channels.queue(SessionDropped("after"))
        await until_received(one, two, "after")
        assert two.texts() == ["before", "after"]


async def test_what_was_not_flushed_goes_at_the_end_of_the_round() -> None:
    with receivers() as (_, (one, two)):
        two.channels.open()
        one.channels.queue(SessionDropped("a"))
        one.channels.queue(SessionDropped("b"))
        assert two.texts() == []
        async with asyncio.timeout(60):
            while len(two.received) < 2:
                await asyncio.sleep(0)
        assert two.received == [(0, "a"), (0, "b")]
        two.channels.close()


async def test_while_more_comes_it_is_read_once_in_a_round_and_nobody_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, watched = asyncio.get_running_loop(), list[int]()
    add_reader = loop.add_reader

    def watch(end: socket.socket, on_readable: Callable[[], None]) -> None:
        watched.append(end.fileno())
        add_reader(end, on_readable)

    monkeypatch.setattr(loop, "add_reader", watch)
    with receivers() as (_, (one, two)):
        two.channels.open()
        for number in range(9):
            send(one, str(number))
            async with asyncio.timeout(60):
                while len(two.received) <= number:
                    await asyncio.sleep(0)
        assert len(watched) == 1, "only before the first"
        async with asyncio.timeout(60):
            while len(watched) == 1:  # nothing came for a whole round
                await asyncio.sleep(0)
        two.channels.close()


@pytest.mark.parametrize("text", [SMALL * 40_000, LARGE], ids=["whole", "in-parts"])
async def test_who_does_not_read_for_a_while_gets_all_in_order(text: str) -> None:
    with receivers() as (_, (one, two)):
        wanted = [f"{number} {text}" for number in range(400)]
        for each in wanted[:300]:
            send(one, each)
        assert one.channels.backlog_bytes(1) > 0
        for each in wanted[300:]:
            send(one, each)
        await until_received(one, two, wanted[-1])
        assert two.texts() == wanted
        assert one.channels.backlog_bytes(1) == 0
        assert not one.lost
        one.channels.close()


async def test_who_never_reads_costs_a_bounded_backlog_and_is_told_everything_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BACKLOG_BYTES", 20 * PACKET_BYTES)
    with receivers() as (_, (one, two)):
        most = 0
        for number in range(300):
            send(one, f"{number} {LARGE}")
            most = max(most, one.channels.backlog_bytes(1))
        assert most <= 20 * PACKET_BYTES + len(LARGE)
        assert not one.lost, "there is no room yet to tell it anything"
        async with asyncio.timeout(60):
            while not one.lost:
                two.channels.drain()
                await asyncio.sleep(0)
        assert one.lost == [1]
        before = len(two.texts())
        send(one, "again", LARGE)
        await until_received(one, two, LARGE)
        assert two.texts()[before:] == ["again", LARGE]
        # Of what was received nothing is mixed, and the order is that of telling.
        numbers = [int(text.split()[0]) for text in two.texts()[:before]]
        assert numbers == sorted(set(numbers))
        one.channels.close()


@pytest.mark.parametrize("read", [1, 2, 3])
async def test_a_successor_that_begins_inside_a_batch_passes_over_the_rest_of_it(read: int) -> None:
    with receivers() as (ends, (one, _)):
        send(one, LARGE)
        send(one, "next")
        for _ in range(read):
            assert ends[1][0].socket.recv(2 * PACKET_BYTES)
        successor = Receiver(ends[1])
        assert successor.texts() == ["next"]


@pytest.mark.parametrize("then", [SMALL, LARGE])
@pytest.mark.parametrize("sent", [1, 2, 3])
async def test_a_writer_that_dies_inside_a_batch_spoils_nothing_of_its_successors(sent: int, then: str) -> None:
    with receivers() as (ends, (one, two)):
        send(one, LARGE)
        packets = [ends[1][0].socket.recv(2 * PACKET_BYTES) for _ in range(4)]
        for packet in packets[:sent]:
            ends[0][1].send(packet)
        assert two.texts() == []
        send(Receiver(ends[0]), then)
        assert two.texts() == [then]


@pytest.mark.parametrize(
    "packet", [b"x", b"w", b"wno msgpack", b"w\x91\x91\xa4none", b"l" * 9, b"m" * 9, os.urandom(200)]
)
async def test_what_no_process_says_harms_nobody_who_listens(packet: bytes) -> None:
    with receivers() as (ends, (one, two)):
        ends[0][1].send(packet)
        send(one, "after")
        assert two.texts() == ["after"]


async def test_an_event_that_cannot_be_taken_does_not_take_others_with_it() -> None:
    """It is read wherever a session is looked for: that turn must not fail for it, nor what came with it be lost."""
    with receivers() as (_, (one, two)):
        one.channels.queue(LimitCharged("key", "no such limit", 1.0))  # which the receiver does not take
        send(one, "after")
        assert two.texts() == ["after"]


async def test_the_others_gone_is_no_failure() -> None:
    with receivers() as (ends, (one, _)):
        ends[1][0].close()
        send(one, SMALL, LARGE)
        assert one.texts() == []
        assert one.channels.backlog_bytes(1) == 0
