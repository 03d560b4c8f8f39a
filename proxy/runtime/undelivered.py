"""What the kernel still holds of a connection, as its peer's machine has not taken it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios


def has_undelivered(transport: asyncio.BaseTransport) -> bool:
    """Whether the peer's machine has not acknowledged all bytes that the kernel was given; False once it is closed."""
    socket = transport.get_extra_info("socket")
    with contextlib.suppress(OSError, ValueError):
        if socket is not None:  # as uvloop says of one that has just been closed
            return int.from_bytes(fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder) > 0
    return False
