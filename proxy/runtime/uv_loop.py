"""uvloop's event loop, with a defect of its mended."""

from __future__ import annotations

import socket
from typing import Any

import uvloop


class UvLoop(uvloop.Loop):
    """Does not leave a closed descriptor's number to a socket, which would close it a second time.

    By then the number is another connection's, which would be lost, or get what is meant for a third.
    """

    async def create_connection(self, *args: Any, sock: socket.socket | None = None, **more: Any) -> Any:
        try:
            return await super().create_connection(*args, sock=sock, **more)
        except BaseException:
            if sock is not None:  # uvloop has closed the descriptor, or will
                sock.detach()
            raise
