"""Channels between the processes of one proxy: a socket pair for every two of them, with events in order on each.

When `flush` returns, what was queued is in the others' sockets, unless one of them is far behind. So a process that
drains its sockets before it looks for a session knows every turn whose answer a client has had from any process.

The supervisor makes the pairs before it forks and keeps them open: what is sent to a process that died waits for its
successor.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

import msgspec

from .events import AnyEvent, Appliers
from .pulse import Pulse

log = logging.getLogger(__name__)

PACKET_BYTES = 48 * 1024  # of a batch in one packet: several must fit into a socket's buffer
PACKETS_AT_ONCE = 1000  # read before this process does anything else, so that a faster sender cannot occupy it
ROUND_S = 0.002  # what can wait is sent and read once in this time: each packet costs both ends a wake-up
BUFFER_BYTES = 4 * 1024 * 1024  # asked of the system, which may give less
BACKLOG_BYTES = 64 * 1024 * 1024  # kept for a peer that does not read; beyond it, the peer needs a new snapshot
SERIALS = 1 << 40  # session numbers of one process: the next process's numbers begin above them

_WHOLE, _FIRST, _MIDDLE, _LAST = b"wfml"  # what a packet begins with: it is a whole batch, or a part of one
_BEGINS_WHOLE = bytes((_WHOLE,))
_DECODER = msgspec.msgpack.Decoder(list[AnyEvent])
_ENCODER = msgspec.msgpack.Encoder()


class End:
    """One end of a channel: a socket, and in shared memory how many packets each side has sent.

    Reading an empty socket costs a system call and an exception, 10 us in a busy process, and a turn looks twice. So
    a socket is read as often as packets were sent.
    """

    def __init__(self, own: socket.socket, sent: memoryview, side: int) -> None:
        """sent: by side, packets of all processes that were there, and one more for each of them."""
        self.socket = own
        self.sent = sent
        self.side = side

    def begin(self) -> None:
        """Counts the packet that a predecessor may have sent, but not counted, when it died."""
        self.sent[self.side] += 1

    def send(self, packet: bytes) -> bool:
        """False where the socket has no room for it now."""
        try:
            self.socket.send(packet)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:  # the other end is closed for good, as the proxy is ending
            return True
        self.sent[self.side] += 1  # after the send: whoever sees the count finds the packet. Only this side writes it
        return True

    def close(self) -> None:
        self.socket.close()


Ends = Mapping[int, End]
"""One process's ends of its channels, by the index of the process at the other end."""


def make_ends(count: int) -> list[dict[int, End]]:
    """The ends of each of `count` processes. Sockets keep packets whole, so a successor never begins inside one."""
    ends: list[dict[int, End]] = [{} for _ in range(count)]
    for one in range(count):
        for other in range(one):
            sent = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ends[one][other], ends[other][one] = (End(own, sent, side) for side, own in enumerate(pair))
    for end in (end.socket for one in ends for end in one.values()):
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    return ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Which of a proxy's processes this is, and what it has from its start; by default the only one."""

    index: int = 0
    ends: Ends = field(default_factory=dict)
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """Keys the hashes of prompts. All processes need the same, or none finds another's sessions."""
    pulse: Pulse = field(default_factory=Pulse)

    @property
    def leads(self) -> bool:
        """Whether it watches the workers, and tells the others what it sees."""
        return self.index == 0

    @property
    def serials(self) -> Iterator[int]:
        """By which its sessions are numbered."""
        return count(self.index * SERIALS + 1)


class Channels:
    """One process's channels to all others."""

    def __init__(
        self,
        ends: Ends,
        appliers: Appliers,
        on_lost: Callable[[int], None],
        pending: Callable[[], Iterable[AnyEvent]] = tuple,
        on_drained: Callable[[], None] = lambda: None,
    ) -> None:
        """on_lost(peer): events for it were dropped, and it needs a snapshot.

        pending: what else to send, asked for at each flush, and encoded before anything else is done; on_drained: all
        that had come was applied.
        """
        self._channels = [_Channel(peer, end, self, appliers, on_lost) for peer, end in ends.items()]
        self._by_peer = {channel.peer: channel for channel in self._channels}
        self._outbox: list[AnyEvent] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._await_flush: list[asyncio.Future[None]] = []
        self._pending = pending
        self._on_drained = on_drained

    @property
    def peers(self) -> list[int]:
        return list(self._by_peer)

    def open(self) -> None:
        """Reads what comes from now on; before that only `drain` reads. Before anything is sent."""
        for channel in self._channels:
            channel.begin()

    def close(self) -> None:
        """Reads no more. Turns that end later still send."""
        self.flush()
        for channel in self._channels:
            channel.close()

    def queue(self, event: AnyEvent) -> None:
        """Sends to all within `ROUND_S`, or at the next flush."""
        self._outbox.append(event)
        if self._flushing is None:
            self.schedule_flush()

    def schedule_flush(self) -> None:
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(ROUND_S, self._round)

    def flush(self) -> None:
        """Puts what is queued and pending into the others' sockets."""
        self._outbox.extend(self._pending())
        if self._outbox:
            self._send_outbox()

    def flushed(self) -> asyncio.Future[None]:
        """Done after the next flush, which comes at once, but after all that this round of the event loop does.

        A packet costs both ends more than what is in it, and turns that end together share one so.
        """
        loop = asyncio.get_running_loop()
        if not self._await_flush:
            loop.call_soon(self._flush_for_all)
        waiter = loop.create_future()  # one each: who is cancelled cancels it
        self._await_flush.append(waiter)
        return waiter

    def _flush_for_all(self) -> None:
        waiters, self._await_flush = self._await_flush, []
        try:
            self.flush()
        finally:
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _send_outbox(self) -> None:
        outbox, self._outbox = self._outbox, []  # if these cannot be encoded, the next ones still can
        packets = _packets(_ENCODER.encode(outbox))
        for channel in self._channels:
            channel.send(packets)

    def _round(self) -> None:
        self._flushing = None
        self.flush()

    def send(self, peer: int, events: Iterable[AnyEvent]) -> None:
        """Sends to one peer, after what is queued for all."""
        self.flush()
        self._by_peer[peer].send(_packets(_ENCODER.encode(list(events))))

    def backlog_bytes(self, peer: int) -> int:
        """Bytes for this peer that do not fit into its socket."""
        return self._by_peer[peer].backlog_bytes

    def drain(self) -> None:
        """Applies all that has been sent to this process until now."""
        has_read = False
        for channel in self._channels:
            if channel.drain():
                has_read = True
        if has_read:
            self._on_drained()


class _Channel:
    def __init__(
        self,
        peer: int,
        end: End,
        channels: Channels,
        appliers: Appliers,
        on_lost: Callable[[int], None],
    ) -> None:
        self.peer = peer
        self._end = end
        self._sent, self._other = end.sent, 1 - end.side
        self._read = -math.inf  # packets, as the other side counts them; before the first one it is not known
        self._channels = channels
        self._appliers = appliers
        self._on_lost = on_lost
        self._buffer = memoryview(bytearray(2 * PACKET_BYTES))
        self._parts: list[bytes] | None = None  # of a batch larger than a packet; None: not in one
        self._backlog: deque[bytes] = deque()
        self.backlog_bytes = 0
        self._is_writing = False
        self._is_lost = False
        self._listening: asyncio.TimerHandle | None = None  # until then it does not read
        self._heard = 0  # of what the other side counts, when the pause before the next reading began

    def begin(self) -> None:
        self._end.begin()
        self._heard = self._sent[self._other]
        self.listen()

    def listen(self) -> None:
        """Reads what comes, then once in `ROUND_S` while more does; whoever needs it sooner calls `drain`."""
        if self._sent[self._other] != self._heard:
            self._pause()
            self._channels.drain()
        else:
            self._listening = None
            asyncio.get_running_loop().add_reader(self._end.socket, self._on_readable)

    def _pause(self) -> None:
        self._heard = self._sent[self._other]
        self._listening = asyncio.get_running_loop().call_later(ROUND_S, self.listen)

    def _on_readable(self) -> None:
        asyncio.get_running_loop().remove_reader(self._end.socket)
        self._read = -math.inf  # whatever the count says: the peer may have died before it could write it
        self._pause()
        self._channels.drain()

    def send(self, packets: Iterable[bytes]) -> None:
        for packet in packets:
            if self._backlog or not self._end.send(packet):
                self._backlog.append(packet)
                self.backlog_bytes += len(packet)
        if self._backlog or self._is_lost:
            self._bound_backlog()

    def _bound_backlog(self) -> None:
        if self.backlog_bytes > BACKLOG_BYTES:
            self._backlog.clear()
            self.backlog_bytes = 0
            self._is_lost = True
        if not self._is_writing:
            self._is_writing = True
            asyncio.get_running_loop().add_writer(self._end.socket, self._send_backlog)

    def drain(self) -> bool:
        """Whether there was anything to read."""
        sent = self._sent[self._other]
        most = sent - self._read
        if not most:
            return False
        most = min(most, PACKETS_AT_ONCE)
        packets, receive, buffer = 0, self._end.socket.recv_into, self._buffer
        try:
            while packets < most and (size := receive(buffer)):
                packets += 1
                if buffer[0] == _WHOLE:
                    self._parts = None
                    self._apply(buffer[1:size])
                else:
                    self._take_part(buffer[0], bytes(buffer[1:size]))
            self._read += packets
        except BlockingIOError:
            self._read = sent  # what was sent while this was read is for the next time
        return packets > 0

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        if self._listening is not None:
            self._listening.cancel()
        loop.remove_reader(self._end.socket)
        loop.remove_writer(self._end.socket)

    def _send_backlog(self) -> None:
        while self._backlog and self._end.send(self._backlog[0]):
            self.backlog_bytes -= len(self._backlog.popleft())
        if not self._backlog:
            self._is_writing = False
            asyncio.get_running_loop().remove_writer(self._end.socket)
            if self._is_lost:
                self._is_lost = False
                self._on_lost(self.peer)

    def _take_part(self, kind: int, part: bytes) -> None:
        if kind == _FIRST:
            self._parts = [part]
        elif self._parts is not None:  # else its beginning was a predecessor's to read, or was never written
            self._parts.append(part)
            if kind != _MIDDLE:
                batch, self._parts = b"".join(self._parts), None
                self._apply(batch)

    def _apply(self, batch: bytes | memoryview) -> None:
        peer, appliers = self.peer, self._appliers
        try:
            events = _DECODER.decode(batch)
        except msgspec.MsgspecError as exc:
            log.error("process %d of this proxy sent an event that cannot be read: %s", peer, exc)
            return
        for event in events:
            try:
                appliers[type(event)](peer, event)
            except Exception:  # the batch's other events still hold
                log.exception("what process %d of this proxy sent could not be applied", peer)


def _packets(batch: bytes) -> Iterable[bytes]:
    if len(batch) <= PACKET_BYTES:
        return (_BEGINS_WHOLE + batch,)
    parts = [batch[start : start + PACKET_BYTES] for start in range(0, len(batch), PACKET_BYTES)]
    kinds = [_FIRST] + [_MIDDLE] * (len(parts) - 2) + [_LAST]
    return [bytes((kind,)) + part for kind, part in zip(kinds, parts, strict=True)]
