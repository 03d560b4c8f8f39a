"""How many gateways may be connected, and which one makes room."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

import pytest

from ppd.proxy.gateway.wire.grpc import GrpcConnection
from ppd.proxy.gateway.wire.open_connections import LOOKED_AT, OpenConnections
from tests.support.fake_connections import FakeTransport


@dataclass(eq=False)
class Connection:
    is_idle: bool = True
    is_evicted: bool = False

    def go_away(self) -> None: ...

    def close(self) -> None: ...

    def evict(self) -> None:
        self.is_evicted = True


def counted(connections: OpenConnections) -> dict[str, float]:
    return {sample.name: sample.value for metric in connections.gauges() for sample in metric.samples}


@pytest.mark.parametrize(
    ("idle", "evicted"),
    [
        ((True, True), [0]),
        ((False, True), [1]),
        ((False, False), []),  # the new one has no place
    ],
)
def test_one_without_a_call_makes_room(idle: tuple[bool, ...], evicted: list[int]) -> None:
    connections, old = OpenConnections(len(idle)), [Connection(is_idle) for is_idle in idle]
    assert all(map(connections.add, old))
    new = Connection()
    assert connections.add(new) is bool(evicted)
    assert [number for number, one in enumerate(old) if one.is_evicted] == evicted
    assert (new in list(connections)) is bool(evicted)
    assert counted(connections) == {
        "ppd_picker_connections": len(idle),
        "ppd_picker_connections_refused_total": 1 - len(evicted),
        "ppd_picker_connections_evicted_total": len(evicted),
    }


def test_those_that_are_busy_do_not_hide_the_idle_ones_behind_them() -> None:
    connections = OpenConnections(LOOKED_AT + 1)
    for is_idle in (*[False] * LOOKED_AT, True):
        connections.add(Connection(is_idle))
    assert [connections.add(Connection()) for _ in range(2)] == [False, True]


def test_one_that_is_gone_has_no_place_any_more() -> None:
    connections, one = OpenConnections(1), Connection(is_idle=False)
    assert connections.add(one)
    connections.discard(one)
    assert connections.add(Connection())


class Transport(FakeTransport):
    def __init__(self, unread_bytes: int) -> None:
        super().__init__()
        self.unread_bytes = unread_bytes
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize("unread_bytes", [0, 1])
def test_a_gateways_connection_ends_for_another_and_at_once_if_it_does_not_read(unread_bytes: int) -> None:
    connections, first, second = OpenConnections(1), Transport(unread_bytes), Transport(0)
    for transport in (first, second):
        GrpcConnection({}, connections).connection_made(cast("asyncio.Transport", transport))
    assert (first.is_closing(), first.is_aborted) == (unread_bytes == 0, unread_bytes > 0)
    assert not (second.is_closing() or second.is_aborted)


def test_a_gateways_connection_without_a_place_is_closed_before_a_word() -> None:
    connections, transport = OpenConnections(1), Transport(0)
    connections.add(Connection(is_idle=False))
    GrpcConnection({}, connections).connection_made(cast("asyncio.Transport", transport))
    assert (transport.is_aborted, transport.written) == (True, b"")
