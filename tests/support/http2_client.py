"""A client of HTTP/2 in a few lines: streams opened, reset and read one by one, as no well-behaved client would."""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h2.connection
import h2.events


@dataclass
class Stream:
    """What has come of one answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_ended: bool = False
    is_reset: bool = False


class Http2Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._connection = h2.connection.H2Connection()
        self._connection.initiate_connection()
        self.streams: defaultdict[int, Stream] = defaultdict(Stream)
        self.is_closed = False

    def open(self, method: str, path: str, *headers: tuple[str, str], is_whole: bool = True) -> int:
        """Begins a request; its stream's number. One that is not whole has a body to be sent."""
        stream = self._connection.get_next_available_stream_id()
        pseudo = [(":method", method), (":path", path), (":scheme", "https"), (":authority", "proxy")]
        self._connection.send_headers(stream, [*pseudo, *headers], end_stream=is_whole)
        return stream

    def upload(self, stream: int, data: bytes, *, is_last: bool = False) -> None:
        self._connection.send_data(stream, data, end_stream=is_last)

    def trail(self, stream: int, *trailers: tuple[str, str]) -> None:
        """Ends a request by trailers."""
        self._connection.send_headers(stream, list(trailers), end_stream=True)

    def reset(self, stream: int) -> None:
        self._connection.reset_stream(stream)

    async def flush(self) -> None:
        self._writer.write(self._connection.data_to_send())
        await self._writer.drain()

    async def read(self) -> None:
        """The next bytes of whatever streams; `is_closed` at the end of the connection."""
        await self.flush()
        try:
            data = await self._reader.read(65536)
        except ConnectionError:
            data = b""
        if not data:
            self.is_closed = True
            return
        for event in self._connection.receive_data(data):
            self._take(event)
        await self.flush()

    async def ended(self, stream: int) -> Stream:
        """One answer, whole, or as far as it came."""
        found = self.streams[stream]
        while not (found.is_ended or found.is_reset or self.is_closed):
            await self.read()
        return found

    def _take(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived(stream_id=int(number), headers=headers):
                named = {name.decode(): value.decode() for name, value in headers or ()}
                self.streams[number].status = int(named.pop(":status"))
                self.streams[number].headers = named
            case h2.events.DataReceived(stream_id=int(number), data=data):
                self.streams[number].body += data or b""
                self._connection.acknowledge_received_data(event.flow_controlled_length or 0, number)
            case h2.events.StreamEnded(stream_id=int(number)):
                self.streams[number].is_ended = True
            case h2.events.StreamReset(stream_id=int(number)):
                self.streams[number].is_reset = True
            case h2.events.ConnectionTerminated():
                self.is_closed = True


@asynccontextmanager
async def http2(port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Http2Client]:
    """tls: the client's; None: to a server that takes HTTP/2 without it."""
    if tls is not None:
        tls.set_alpn_protocols(["h2", "http/1.1"])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    if tls is not None:
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
    try:
        yield Http2Client(reader, writer)
    finally:
        writer.transport.abort()
