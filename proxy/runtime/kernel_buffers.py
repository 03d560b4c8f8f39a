"""What the kernel still holds of a connection: bytes that its peer's machine has not taken, or that nobody has read."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import select
import socket
import sys
import termios

from .. import plane

_BYTES_RECEIVED = slice(128, 136)  # in Linux's struct tcp_info


def has_undelivered(transport: asyncio.BaseTransport) -> bool:
    """Whether the peer's machine has not acknowledged all bytes that the kernel was given; False once it is closed."""
    if plane.IS_BUILT and isinstance(transport, plane.SocketTransport):
        return transport.has_undelivered()
    accepted = transport.get_extra_info("socket")
    with contextlib.suppress(OSError, ValueError):
        if accepted is not None:  # as uvloop says of one that has just been closed
            return int.from_bytes(fcntl.ioctl(accepted.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder) > 0
    return False


def has_unread(transport: asyncio.BaseTransport) -> bool:
    """Whether bytes lie there that nobody has read, or the end, or an error; False once it is closed."""
    if plane.IS_BUILT and isinstance(transport, plane.SocketTransport):
        return transport.has_unread()
    accepted = transport.get_extra_info("socket")
    with contextlib.suppress(OSError, ValueError):
        if accepted is not None:
            found = select.poll()
            found.register(accepted.fileno(), select.POLLIN)
            return bool(found.poll(0))
    return False


def has_unread_bytes(transport: asyncio.BaseTransport) -> bool:
    """The same of bytes alone."""
    accepted = transport.get_extra_info("socket")
    with contextlib.suppress(OSError, ValueError):
        if accepted is not None:
            return int.from_bytes(fcntl.ioctl(accepted.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder) > 0
    return False


def has_sent(peers: socket.socket) -> bool:
    """Whether the peer has ever sent a byte, read or not; False where the system does not tell."""
    with contextlib.suppress(OSError, AttributeError):
        info = peers.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.stop)
        return any(info[_BYTES_RECEIVED])
    return False
