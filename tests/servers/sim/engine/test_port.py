"""The engine's port, closed at the worst moment."""

from __future__ import annotations

import asyncio
import gc
import socket

import pytest
from aiohttp import web

from ppd.servers.sim.engine.port import Listener


def clients_of(port: int, count: int) -> list[socket.socket]:
    made = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for client in made:
        client.setblocking(False)
    return made


@pytest.mark.e2e  # looks through all objects that there are
@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize("way", ["sever", "end"])
async def test_a_client_that_is_just_being_accepted_is_dropped_too(way: str, rounds: int) -> None:
    """asyncio makes a connection's protocol some rounds of the loop after it was accepted."""
    listener = Listener(web.Application(), "127.0.0.1", 0, keep_alive_s=60, shutdown_s=0.05)
    await listener.open()
    clients = clients_of(listener.port, 3)
    try:
        for _ in range(rounds):
            await asyncio.sleep(0)
        if way == "sever":
            listener.sever()
            async with asyncio.timeout(60):
                for client in clients:
                    with pytest.raises((ConnectionResetError, EOFError)):
                        if not await asyncio.get_running_loop().sock_recv(client, 1):
                            raise EOFError
        await listener.end()
    finally:
        for client in clients:
            client.close()
    await asyncio.sleep(0)
    open_ones = [one for one in gc.get_objects() if isinstance(one, asyncio.Transport) and not one.is_closing()]
    assert listener.port not in [one.get_extra_info("sockname")[1] for one in open_ones]
