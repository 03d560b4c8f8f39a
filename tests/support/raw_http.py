"""HTTP/1.1 as bytes on a socket: requests that no client library would send, and every answer that comes back."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import h11

ERRORS = ({"message", "type", "param", "code"}, {"message", "type"})  # the members of OpenAI's, and of Anthropic's
QUIET_S = 0.25  # a server that has said nothing for so long waits for more


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: list[tuple[bytes, bytes]]  # names as they came
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


@dataclass(frozen=True, slots=True)
class Heard:
    """What a server said on one connection, and whether it then closed it."""

    data: bytes
    is_closed: bool

    @property
    def answers(self) -> list[Answer]:
        return read_answers(self.data)


def exchange(port: int, payload: bytes, *, quiet_s: float = QUIET_S, tls: ssl.SSLContext | None = None) -> Heard:
    return exchange_all(port, [payload], quiet_s=quiet_s, tls=tls)[0]


def exchange_all(
    port: int, payloads: Sequence[bytes], *, quiet_s: float = QUIET_S, tls: ssl.SSLContext | None = None
) -> list[Heard]:
    """Each payload on a connection of its own, all at once; read until every one is closed or all are quiet."""
    connections = [_connected(port, tls) for _ in payloads]
    heard: dict[socket.socket, bytearray] = {connection: bytearray() for connection in connections}
    with selectors.DefaultSelector() as selector:
        for connection, payload in zip(connections, payloads, strict=True):
            with contextlib.suppress(OSError):  # closed on us while we still wrote
                connection.sendall(payload)
            selector.register(connection, selectors.EVENT_READ)
        limit_s = time.monotonic() + 30
        while selector.get_map() and (ready := selector.select(quiet_s)) and time.monotonic() < limit_s:
            for key, _ in ready:
                data = _read(key.fileobj)
                heard[key.fileobj] += data  # type: ignore[index]
                if not data:
                    selector.unregister(key.fileobj)
        still_open = {key.fileobj for key in selector.get_map().values()}
    for connection in connections:
        connection.close()
    return [Heard(bytes(heard[connection]), connection not in still_open) for connection in connections]


def _connected(port: int, tls: ssl.SSLContext | None) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    return tls.wrap_socket(connection, server_hostname="127.0.0.1") if tls else connection


def _read(connection: Any) -> bytes:
    try:
        data = connection.recv(65536)
    except OSError:
        return b""
    assert isinstance(data, bytes)
    return data


def read_answers(data: bytes) -> list[Answer]:
    """Every answer in a connection's bytes; h11.RemoteProtocolError where they are no HTTP."""
    connection = h11.Connection(h11.CLIENT)
    connection.receive_data(data)
    found: list[Answer] = []
    while connection.trailing_data[0]:
        connection.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
        connection.send(h11.EndOfMessage())
        head: h11.Response | None = None
        body = bytearray()
        while not isinstance(event := connection.next_event(), h11.EndOfMessage | h11.ConnectionClosed | type):
            if isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
        if head is None:
            break
        found.append(Answer(head.status_code, list(head.headers.raw_items()), bytes(body)))
        if not connection.our_state is connection.their_state is h11.DONE:
            break
        connection.start_next_cycle()
    return found


def post(path: str, body: bytes, headers: bytes = b"", method: bytes = b"POST") -> bytes:
    """A request whose connection ends with its answer; `headers`: whole lines. Its body is JSON unless they say."""
    if b"content-type:" not in headers.lower():
        headers = b"Content-Type: application/json\r\n" + headers
    head = b"%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n" % (
        method,
        path.encode(),
        len(body),
    )
    return head + headers + b"\r\n" + body


def error_of(body: bytes) -> dict[str, Any]:
    """The error in a body of OpenAI's shape, or of Anthropic's."""
    error = json.loads(body)["error"]
    assert isinstance(error, dict) and set(error) in ERRORS, error
    return error
