"""What a test leaves open at its end is no other test's warning."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.tidy_loop import TidyLoop, unheard


async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def take_as_the_port_closes(port: socket.socket) -> None:
    server = await asyncio.start_server(serve, sock=port)
    with socket.create_connection(port.getsockname()):
        for _ in range(2):  # turns of the loop: then it is taken, and no more
            await asyncio.sleep(0)
        server.close()
        await asyncio.sleep(0)


async def take_as_the_loop_ends(port: socket.socket) -> None:
    await asyncio.start_server(serve, sock=port)
    os.close(socket.create_connection(port.getsockname()).detach())


@pytest.mark.parametrize("take", [take_as_the_port_closes, take_as_the_loop_ends])
def test_a_connection_that_is_taken_at_the_last_moment_is_closed(
    take: Callable[[socket.socket], Coroutine[Any, Any, None]],
) -> None:
    with unheard() as said, socket.create_server(("127.0.0.1", 0)) as port:
        with asyncio.Runner(loop_factory=TidyLoop) as runner:
            runner.run(take(port))
    assert said == []
