"""How the listener reads: in slices, whatever comes, and of what is said about one worker the last."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import Any, cast

import msgspec
import pytest
import zmq
from prometheus_client import generate_latest

from ppd.proxy.config import ProxyConfig
from ppd.proxy.discovery.heartbeat import Heartbeat
from ppd.proxy.discovery.heartbeat_listener import HeartbeatListener
from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.runtime.tasks import SLICE_S
from ppd.proxy.telemetry.metrics import Metrics
from ppd.servers.agent.announcer import Announcer
from ppd.servers.fleet.ports import free_ports
from tests.support.announcements import needs_ipv6
from tests.support.clock import FakeClock


class Frame:
    def __init__(self, data: bytes) -> None:
        self.bytes = data
        self.buffer = memoryview(data)

    def get(self, name: str) -> str:
        return {"Peer-Address": "127.0.0.1"}[name]


class FakeMessages:
    """That have come; each has the sender's identity before it."""

    def __init__(self, messages: Iterable[bytes], identities: Iterable[bytes] = ()) -> None:
        self._messages = iter(messages)
        self._identities = chain(identities, repeat(b"id"))
        self.read = 0

    def next(self, until_s: float) -> list[Frame] | None:
        message = next(self._messages, None)
        if message is None:
            return None
        self.read += 1
        return [Frame(next(self._identities)), Frame(message)]


class Bench:
    def __init__(self, clock: FakeClock, config: ProxyConfig | None = None) -> None:
        self.registry, self.metrics = Registry(), Metrics()
        self.listener = HeartbeatListener(config or ProxyConfig(), self.registry, self.metrics, clock)

    def takes(self, socket: FakeMessages, slice_s: float = 10.0) -> int:
        """How many of the messages it applied."""
        found = self.listener._read(cast(Any, socket), False, time.perf_counter() + slice_s)
        self.listener._apply(found)
        return len(list(found))

    def counted(self, result: str) -> float:
        lines = generate_latest(self.metrics.registry).decode().splitlines()
        name = f'ppd_heartbeats_total{{result="{result}"}}'
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.fixture
def bench(clock: FakeClock) -> Iterator[Bench]:
    made = Bench(clock)
    yield made
    made.listener.close()


def beat(address: str = "10.0.0.1:80", **changes: Any) -> bytes:
    return Heartbeat(**{"version": 1, "role": "D", "http_address": address, "models": ["m"], **changes}).encode()


def ping(address: str = "10.0.0.1:80") -> bytes:
    return msgspec.msgpack.encode({"type": "P", "http_address": address, "zmq_address": "10.0.0.1:1"})


@pytest.mark.parametrize("message", [beat(), beat("bad host:1"), b"", b"\x91" * 1000])
def test_a_flood_without_end_is_read_in_slices(bench: Bench, message: bytes) -> None:
    socket = FakeMessages(repeat(message))
    bench.takes(socket, SLICE_S)
    assert socket.read > 0
    assert bench.counted("taken") + bench.counted("dropped") == socket.read


class FakeEvents:
    """Of connections that are refused, as fast as they are read."""

    def __init__(self, count: int) -> None:
        self.left = count

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.left:
            raise zmq.Again
        self.left -= 1
        return [b"", b""]


def test_a_flood_of_refused_connections_is_read_in_slices(bench: Bench) -> None:
    events = FakeEvents(5_000_000)
    bench.listener._note_refusals(cast(Any, events), time.perf_counter() + SLICE_S)
    assert 0 < events.left < 5_000_000


def test_of_what_is_said_about_one_worker_the_last_holds(bench: Bench) -> None:
    messages = [beat(running=1), beat("10.0.0.2:80"), beat(running=2), beat(running=3, draining=True), ping()]
    assert bench.takes(FakeMessages(messages)) == 2
    views = {view.id: view for view in bench.registry.views()}
    assert {(view.id, view.state, view.load.running) for view in views.values()} == {
        ("10.0.0.1:80", "draining", 3),
        ("10.0.0.2:80", "up", 0),
    }
    assert bench.counted("taken") == len(messages)


@pytest.mark.parametrize("text", ["a\r\nX-Evil: 1", "a b", "a\x00b", "x" * 300])
def test_coordinates_that_would_break_a_head_are_dropped_and_counted(bench: Bench, text: str) -> None:
    messages = [beat(coordinates={"zmq_address": text}), beat(engine_version=text), beat("10.0.0.2:80")]
    assert bench.takes(FakeMessages(messages)) == 1
    assert (bench.counted("dropped"), bench.counted("taken")) == (2, 1)


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_an_agent_announces_its_worker_over_ipv6(host: str, clock: FakeClock) -> None:
    (port,) = free_ports(1)
    bench = Bench(clock, ProxyConfig(heartbeat_host=host, heartbeat_port=port))
    bench.listener.open()
    announcer = Announcer([f"[::1]:{port}"])
    reading = asyncio.create_task(bench.listener.run(*bench.listener.sockets[0]))
    try:
        await announcer.send(Heartbeat(version=1, role="D", http_address="[::1]:80", models=["m"]))
        async with asyncio.timeout(60):
            while not len(bench.registry):
                await asyncio.sleep(0.01)
    finally:
        reading.cancel()
        await asyncio.wait({reading})
        announcer.close()
        bench.listener.close()


@pytest.mark.parametrize(
    ("host", "key", "said"),
    [
        ("127.0.0.1", "heartbeat_port", "must be a free port on 127.0.0.1 (Address already in use)"),
        (
            "192.0.2.1",
            "heartbeat_host",
            "must be a name or an address of this machine (Cannot assign requested address)",
        ),
        ("*.", "heartbeat_host", "must be a name or an address of this machine ("),
    ],
)
async def test_what_keeps_a_port_from_being_bound_is_named(host: str, key: str, said: str, clock: FakeClock) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        bench = Bench(clock, ProxyConfig(heartbeat_host=host, heartbeat_port=port, heartbeat_open=True))
        with pytest.raises(ConfigError) as caught:
            bench.listener.open()
        bench.listener.close()
    told = {"heartbeat_port": port, "heartbeat_host": repr(host)}[key]
    assert str(caught.value).startswith(f"{key} = {told}: {said}")
    assert caught.value.param == key


@pytest.mark.parametrize(
    ("connections", "messages", "tells"),
    [
        ("ababab", [beat(role="P"), beat()] * 3, True),
        ("aaaabbbb", [beat()] * 8, False),  # the agent has been started anew
        ("abcdef", [beat()] * 6, False),  # its connection is unstable
        ("ababab", [beat(), ping("10.0.0.1:80")] * 3, False),  # an engine and its agent
        ("ababab", [beat(), beat("10.0.0.2:80")] * 3, False),
        ("ababa", [beat(), beat(), beat(leaving=True), beat(), beat(leaving=True)], False),
    ],
)
def test_two_agents_with_one_address_are_told_of_once(
    bench: Bench, caplog: pytest.LogCaptureFixture, connections: str, messages: list[bytes], tells: bool
) -> None:
    bench.takes(FakeMessages(messages, [connection.encode() for connection in connections]))
    said = (
        "worker 10.0.0.1:80: two agents announce it in turn, the last from 127.0.0.1; each needs an address of its own"
    )
    assert caplog.messages == [said] * tells


V4, OTHER_V4, V6 = "127.0.0.1", "127.0.0.2", "::1"


@pytest.mark.parametrize(
    ("host", "allow", "client", "is_heard"),
    [
        ("127.0.0.1", ("127.0.0.0/8",), V4, True),
        ("127.0.0.1", ("10.0.0.0/8", "127.0.0.1"), V4, True),
        ("127.0.0.1", ("10.0.0.0/8",), V4, False),
        ("127.0.0.1", ("fd00::/8",), V4, False),
        ("127.0.0.1", ("fd00::/8", "127.0.0.1"), V4, True),
        pytest.param("::1", ("fd00::/8", "::1"), V6, True, marks=needs_ipv6),
        pytest.param("::1", ("fd00::/8", "10.0.0.0/8"), V6, False, marks=needs_ipv6),
        ("::", ("127.0.0.0/8",), OTHER_V4, True),
        ("::", ("127.0.0.1/32",), OTHER_V4, False),
        pytest.param("::", ("127.0.0.0/8",), V6, False, marks=needs_ipv6),
    ],
)
async def test_who_is_not_in_heartbeat_allow_cannot_even_begin_to_send(
    host: str, allow: tuple[str, ...], client: str, is_heard: bool, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """ZeroMQ keeps the parts of a message until the last one has come, whatever its limits."""
    (port,) = free_ports(1)
    bench = Bench(clock, ProxyConfig(heartbeat_host=host, heartbeat_port=port, heartbeat_allow=allow))
    bench.listener.open()
    reading = asyncio.create_task(bench.listener.run(*bench.listener.sockets[0]))
    await asyncio.sleep(0)  # it has begun
    try:
        async with asyncio.timeout(60):
            to = V6 if client == V6 else V4
            reader, writer = await asyncio.open_connection(to, port, local_addr=(client, 0))
            assert bool(await reader.read(1)) is is_heard  # its greeting
            writer.close()
            while not is_heard and not caplog.messages:
                await asyncio.sleep(0.01)
    finally:
        reading.cancel()
        await asyncio.wait({reading})
        bench.listener.close()
    said = "refused 1 connections for heartbeats: heartbeat_allow does not hold their addresses"
    assert caplog.messages == [said] * (not is_heard)
