"""The wires between the processes of one proxy: a socket pair for each two of them, and events in order on each.

What is sent is in the other's socket when `flush` returns, unless that one is far behind. So a process that drains its
sockets before it looks for a session knows every turn whose answer a client has had, whichever process gave it.

The pairs are made before the processes, and stay open in the process that started them: what is sent to one that died
waits for its successor.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import msgspec

from .events import AnyEvent, Event

log = logging.getLogger(__name__)

PACKET_BYTES = 48 * 1024  # of a batch in one packet: several must fit into a socket's buffer
PACKETS_AT_ONCE = (
    1000  # heard before this process does anything else: it must not listen for ever to one that is faster
)
ROUND_S = 0.002  # what can wait is told, and heard, once in this time: each packet costs both ends a wake-up
BUFFER_BYTES = 4 * 1024 * 1024  # asked of the system, which may give less
BACKLOG_BYTES = 64 * 1024 * 1024  # for one that does not read; then it has to be told everything again

_WHOLE, _FIRST, _MIDDLE, _LAST = b"w", b"f", b"m", b"l"
_DECODER = msgspec.msgpack.Decoder(list[AnyEvent])
_ENCODER = msgspec.msgpack.Encoder()


class End:
    """Of a wire: a socket, and beside it how often each side has spoken, in memory that both processes see.

    To ask a socket for nothing costs a system call and an exception, 10 us in a busy process, which looks twice a turn.
    """

    def __init__(self, own: socket.socket, spoken: memoryview, side: int) -> None:
        self.socket = own
        self._spoken = spoken
        self._side = side

    def send(self, packet: bytes) -> None:
        self.socket.send(packet)
        self._spoken[self._side] += 1  # not before: who sees it finds the packet. Nobody else writes this number.

    def spoken(self) -> int:
        """By the other side, in all its lives; what was just being sent when one of them ended may be missing."""
        count: int = self._spoken[1 - self._side]
        return count

    def close(self) -> None:
        self.socket.close()


Ends = Mapping[int, End]
"""One process's ends of its wires, by the number of the process at the other end."""


def wires(count: int) -> list[dict[int, End]]:
    """The ends of each of so many processes. Packets keep their boundaries, so a successor never begins inside one."""
    ends: list[dict[int, End]] = [{} for _ in range(count)]
    for one in range(count):
        for other in range(one):
            spoken = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ends[one][other], ends[other][one] = (End(own, spoken, side) for side, own in enumerate(pair))
    for end in (end.socket for one in ends for end in one.values()):
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    return ends


class Mesh:
    """One process's wires to all others. `on_event(sender, event)` gets what they say; `on_lost(peer)` is told that
    one had to be given up on, and must hear everything again."""

    def __init__(self, ends: Ends, on_event: Callable[[int, Event], None], on_lost: Callable[[int], None]) -> None:
        self._wires = [_Wire(peer, end, self, on_event, on_lost) for peer, end in ends.items()]
        self._by_peer = {wire.peer: wire for wire in self._wires}
        self._outbox: list[Event] = []
        self._flushing: asyncio.TimerHandle | None = None
        self.before_flush: Callable[[], Iterable[Event]] = tuple
        self.after_hearing: Callable[[], None] | None = None  # when all that has come was taken

    @property
    def peers(self) -> list[int]:
        return list(self._by_peer)

    def open(self) -> None:
        """From now on what comes is heard."""
        for wire in self._wires:
            wire.listen()

    def close(self) -> None:
        """Hears no more. What ends later is still told."""
        self.flush()
        for wire in self._wires:
            wire.close()

    def tell(self, event: Event) -> None:
        """To all, within `ROUND_S` or with what is flushed before that."""
        self._outbox.append(event)
        self.remind()

    def remind(self) -> None:
        """There will be something to say."""
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(ROUND_S, self._round)

    def say(self, event: Event) -> None:
        """To all at once, and before what can wait."""
        batch = _ENCODER.encode([event])
        for wire in self._wires:
            wire.send(batch)

    def flush(self) -> None:
        """What was told is in the others' sockets."""
        self._outbox.extend(self.before_flush())
        if self._outbox:
            batch = _ENCODER.encode(self._outbox)
            self._outbox.clear()
            for wire in self._wires:
                wire.send(batch)

    def _round(self) -> None:
        self._flushing = None
        self.flush()

    def send(self, peer: int, events: Iterable[Event]) -> None:
        """To one alone, after what was told to all."""
        self.flush()
        self._by_peer[peer].send(_ENCODER.encode(list(events)))

    def behind(self, peer: int) -> int:
        """Bytes for it that do not fit into its socket."""
        return self._by_peer[peer].backlog_bytes

    def drain(self) -> None:
        """Hears all that was said until now."""
        has_heard = False
        for wire in self._wires:
            has_heard |= wire.drain()
        if has_heard and self.after_hearing is not None:
            self.after_hearing()


class _Wire:
    def __init__(
        self,
        peer: int,
        end: End,
        mesh: Mesh,
        on_event: Callable[[int, Event], None],
        on_lost: Callable[[int], None],
    ) -> None:
        self.peer = peer
        self._end = end
        self._heard = -1  # of what the other has spoken, when there was no more to read
        self._mesh = mesh
        self._on_event = on_event
        self._on_lost = on_lost
        self._buffer = memoryview(bytearray(2 * PACKET_BYTES))
        self._parts: list[bytes] | None = None  # of a batch larger than a packet; None: not in one
        self._backlog: deque[bytes] = deque()
        self.backlog_bytes = 0
        self._is_writing = False
        self._is_lost = False
        self._listening: asyncio.TimerHandle | None = None  # soon again

    def listen(self) -> None:
        """Hears what comes, and then not before `ROUND_S`, however much comes; who needs it sooner drains."""
        self._listening = None
        asyncio.get_running_loop().add_reader(self._end.socket, self._came)

    def _came(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._end.socket)
        self._heard = -1  # whatever the number says: the other may have died before it could write it
        self._listening = loop.call_later(ROUND_S, self.listen)
        self._mesh.drain()

    def send(self, batch: bytes) -> None:
        for packet in _packets(batch):
            if self._backlog or not self._sent(packet):
                self._backlog.append(packet)
                self.backlog_bytes += len(packet)
        if self.backlog_bytes > BACKLOG_BYTES:
            self._backlog.clear()
            self.backlog_bytes = 0
            self._is_lost = True
        if (self._backlog or self._is_lost) and not self._is_writing:
            self._is_writing = True
            asyncio.get_running_loop().add_writer(self._end.socket, self._catch_up)

    def drain(self) -> bool:
        """Whether there was anything."""
        spoken = self._end.spoken()
        if spoken == self._heard:
            return False
        packets = 0
        try:
            while packets < PACKETS_AT_ONCE and (size := self._end.socket.recv_into(self._buffer)):
                packets += 1
                self._take(self._buffer[:size])
        except BlockingIOError:
            self._heard = spoken  # what was spoken while this was read is for the next time
        return packets > 0

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        if self._listening is not None:
            self._listening.cancel()
        loop.remove_reader(self._end.socket)
        loop.remove_writer(self._end.socket)

    def _sent(self, packet: bytes) -> bool:
        try:
            self._end.send(packet)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:  # the other end is closed for good: the proxy is ending
            return True
        return True

    def _catch_up(self) -> None:
        while self._backlog and self._sent(self._backlog[0]):
            self.backlog_bytes -= len(self._backlog.popleft())
        if not self._backlog:
            self._is_writing = False
            asyncio.get_running_loop().remove_writer(self._end.socket)
            if self._is_lost:
                self._is_lost = False
                self._on_lost(self.peer)

    def _take(self, packet: memoryview) -> None:
        kind, body = packet[:1], packet[1:]
        if kind == _FIRST:
            self._parts = [bytes(body)]
            return
        if kind != _WHOLE:
            if self._parts is None:  # the rest of what a predecessor began to read, or its writer to write
                return
            self._parts.append(bytes(body))
            if kind == _MIDDLE:
                return
            body = memoryview(b"".join(self._parts))
        self._parts = None
        try:
            events = _DECODER.decode(body)
        except msgspec.MsgspecError as exc:
            log.error("process %d of this proxy said what can't be read: %s", self.peer, exc)
            return
        for event in events:
            try:
                self._on_event(self.peer, event)
            except Exception:  # the others of the batch are as true as before
                log.exception("what process %d of this proxy said could not be taken", self.peer)


def _packets(batch: bytes) -> Iterable[bytes]:
    if len(batch) <= PACKET_BYTES:
        return (_WHOLE + batch,)
    parts = [batch[start : start + PACKET_BYTES] for start in range(0, len(batch), PACKET_BYTES)]
    kinds = [_FIRST] + [_MIDDLE] * (len(parts) - 2) + [_LAST]
    return [kind + part for kind, part in zip(kinds, parts, strict=True)]
