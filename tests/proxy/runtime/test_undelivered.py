"""What the kernel holds of a connection is told as long as there is one."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import pytest

from ppd.proxy.runtime.undelivered import has_undelivered


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


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_of_a_closed_connection_nothing_is(is_forgotten: bool) -> None:
    own, peer = socket.socketpair()
    peer.close()
    own.close()
    assert not has_undelivered(transport(None if is_forgotten else own))
