"""What the event loop of a serving process does otherwise than uvloop's own."""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path

from ppd.proxy.runtime.process import new_loop
from tests.support.credentials import Authority, trusting


def test_a_socket_whose_number_the_loop_closed_does_not_close_it_again(tmp_path: Path) -> None:
    """Its worker resets it after TCP's handshake, before that of TLS."""

    async def refused() -> int:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            made = socket.create_connection(listening.getsockname())
            made.setblocking(False)
            accepted, _ = listening.accept()
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()
            tls = trusting(Authority(tmp_path))
            try:
                await loop.create_connection(asyncio.Protocol, sock=made, ssl=tls, server_hostname="localhost")
            except OSError:
                await asyncio.sleep(0)
            return made.fileno()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(refused()) == -1
