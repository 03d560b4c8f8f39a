"""A taken port is one clear line, before anything starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role
from ppd.servers.fleet.ports import (
    PORTS_A_FLEET,
    check_free,
    check_workers_free,
    free_offset,
    free_ports,
    is_free,
    worker_ports,
)

ONE_P = {Role.PREFILL: 1}


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_taken_port_is_named_with_the_flag_that_takes_another(taken: int, host: str) -> None:
    with pytest.raises(ConfigError, match=rf"heartbeat_port = {taken}: .*on {host} .*in use.*--heartbeat-port"):
        check_free(taken, "heartbeat_port", host)
    assert not is_free(taken)


def test_a_host_that_is_not_of_this_machine_is_not_said_to_be_in_use() -> None:
    with pytest.raises(ConfigError, match="Cannot assign requested address"):
        check_free(0, "port", "192.0.2.1")


def test_a_port_is_free_again_as_soon_as_its_program_is_gone() -> None:
    """Also while the kernel still remembers that program's connections."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].close()
    assert is_free(port)
    client.close()


@pytest.mark.parametrize("ordinal", range(2), ids=["engine", "side-channel"])
def test_a_fleet_beside_another_moves_all_its_workers_ports(ordinal: int) -> None:
    with free_offset(ONE_P) as offset:
        check_workers_free(ONE_P, offset)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", worker_ports(ONE_P)[ordinal] + offset))
        other.listen()
        with pytest.raises(ConfigError, match=f"port_offset = {offset}: .*in use"):
            check_workers_free(ONE_P, offset)
        with free_offset(ONE_P) as next_offset:
            assert next_offset >= offset + PORTS_A_FLEET


def test_fleets_that_start_at_once_share_no_port() -> None:
    """No engine listens yet. Two offsets further a P has the port of the first fleet's D."""
    workers = {Role.PREFILL: 1, Role.DECODE: 1}
    with ExitStack() as fleets:
        offsets = [fleets.enter_context(free_offset(workers)) for _ in range(4)]
        ports = [port + offset for offset in offsets for port in worker_ports(workers)]
        assert len(set(ports)) == len(ports)
        assert all(map(is_free, ports)), "their engines may listen there"
    with free_offset(workers) as again:
        assert again == offsets[0]


def test_nothing_else_is_given_a_port_before_its_program_listens() -> None:
    """Not by the system, which gives a program that asks for any port, or a connection, one of its own range."""
    given = [port for _ in range(3) for port in free_ports(50)]
    assert len(set(given)) == 150
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        assert max(given) < other.getsockname()[1]
    assert all(map(is_free, given))


def test_a_taken_port_is_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    low = next(port for port in free_ports(50) if all(is_free(port + place) for place in range(4)))
    monkeypatch.setattr("ppd.servers.fleet.ports._ANYWHERE", range(low, low + 4))
    monkeypatch.setattr("ppd.servers.fleet.ports._given", {low + 1})
    with socket.socket() as other:
        other.bind(("127.0.0.1", low))
        other.listen()
        assert set(free_ports(2)) == {low + 2, low + 3}
        with pytest.raises(ConfigError, match=f"no 1 free ports between {low} and {low + 3}"):
            free_ports(1)
