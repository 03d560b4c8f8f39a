"""What the kernel holds of a connection is told as long as there is one."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import pytest

from ppd.proxy.runtime.kernel_buffers import has_sent, has_undelivered, has_unread


class FakeTransport:
    def __init__(self, own: socket.socket | None) -> None:
        self.own = own

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self.own


def transport(own: socket.socket | None) -> asyncio.BaseTransport:
    return cast("asyncio.BaseTransport", FakeTransport(own))


def test_what_the_peer_has_not_taken_is_undelivered() -> None:
    own, peer = socket.socketpair()
    with own, peer:
        told = [has_undelivered(transport(own))]
        own.send(b"x")
        told.append(has_undelivered(transport(own)))
        peer.recv(1)
        told.append(has_undelivered(transport(own)))
    assert told == [False, True, False]


@pytest.mark.parametrize("ends", [False, True], ids=["bytes", "the end"])
def test_what_has_come_and_was_not_read_is_unread(ends: bool) -> None:
    own, peer = socket.socketpair()
    with own, peer:
        told = [has_unread(transport(own))]
        peer.close() if ends else peer.send(b"x")
        told.append(has_unread(transport(own)))
        own.recv(1)
        told.append(has_unread(transport(own)))
    assert told == [False, True, ends]


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_of_a_closed_connection_nothing_is(is_forgotten: bool) -> None:
    own, peer = socket.socketpair()
    peer.close()
    own.close()
    assert not has_undelivered(transport(None if is_forgotten else own))
    assert not has_unread(transport(None if is_forgotten else own))


def test_who_has_ever_sent_a_byte_has_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
        own, _ = server.accept()
        told = [has_sent(own)]
        peer.send(b"x")
        own.recv(1)
        told.append(has_sent(own))
        own.close()
        told.append(has_sent(own))
    assert told == [False, True, False]
