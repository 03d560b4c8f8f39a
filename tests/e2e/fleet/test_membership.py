"""Workers that join, leave, drain and change their role while the proxy runs, over real ZeroMQ sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
import zmq.auth
from prometheus_client import generate_latest

from ppd.proxy.config import Mode
from ppd.proxy.discovery.heartbeat import Heartbeat
from ppd.servers.agent.announcer import Announcer
from ppd.servers.fleet.ports import free_ports
from tests.support.announcements import Sender, heartbeat, ping


async def test_workers_join_drain_and_leave_by_heartbeat(start_fleet: Any, port: int, sender: Sender) -> None:
    async with start_fleet("", heartbeat_port=port) as fleet:
        await sender.beat("10.0.0.1:80")
        await fleet.until(lambda: fleet.states() == {"D1": "up"})
        await sender.beat("10.0.0.1:80", draining=True)
        await fleet.until(lambda: fleet.states() == {"D1": "draining"})
        await sender.beat("10.0.0.1:80", leaving=True)
        await fleet.until(lambda: fleet.states() == {})
        assert await fleet.metric('ppd_heartbeats_total{result="taken"}') == 3


async def test_a_silent_worker_is_dropped(start_fleet: Any, port: int, sender: Sender) -> None:
    async with start_fleet("", heartbeat_port=port, worker_ttl_s=0.2) as fleet:
        await sender.beat("10.0.0.1:80")
        await fleet.until(lambda: fleet.states() == {"D1": "up"})
        await fleet.until(lambda: fleet.states() == {})
        assert (await fleet.conversation().say("hi")).status == 503


async def test_a_worker_changes_its_role_without_a_restart(start_fleet: Any, port: int, sender: Sender) -> None:
    async with start_fleet("", heartbeat_port=port) as fleet:
        await sender.beat("10.0.0.1:80", role="D")
        await fleet.until(lambda: fleet.states() == {"D1": "up"})
        await sender.beat("10.0.0.1:80", role="P")
        await fleet.until(lambda: fleet.states() == {"P1": "up"})
        assert await fleet.metric('ppd_workers{role="D",state="up"}') == 0


async def test_pings_of_vllm_register_engines(start_fleet: Any, port: int, sender: Sender) -> None:
    async with start_fleet("", heartbeat_port=port) as fleet:
        await sender.send(ping("10.0.0.1:80"))
        await fleet.until(lambda: fleet.states() == {"P1": "up"})
        (view,) = fleet.proxy.state.registry.views()
        assert view.worker.connector == "p2p_nccl"


async def test_hostile_messages_are_counted_and_change_nothing(start_fleet: Any, port: int, sender: Sender) -> None:
    async with start_fleet("", heartbeat_port=port) as fleet:
        for payload in (b"", b"\xff", b"x" * 1000, msgspec.msgpack.encode({"version": 9}), msgspec.msgpack.encode([])):
            await sender.send(payload)
        await sender.beat("evil host:80")
        await sender.beat("10.0.0.1:80")
        await fleet.until(lambda: fleet.states() == {"D1": "up"})
        assert await fleet.metric('ppd_heartbeats_total{result="dropped"}') == 6


async def test_only_allowed_addresses_may_register(start_fleet: Any, port: int, sender: Sender) -> None:
    async with start_fleet("", heartbeat_port=port, heartbeat_allow=("127.0.0.0/8",)) as fleet:
        await sender.beat("10.0.0.1:80")
        await sender.beat("not-an-address:80")
        await sender.beat("127.0.0.9:80")
        await fleet.until(lambda: fleet.states() == {"D1": "up"})
        assert await fleet.metric('ppd_heartbeats_total{result="dropped"}') == 2


@dataclass
class Doors:
    """Ways to the proxy's heartbeat ports, by who stands there: the worker's own agent first."""

    agent: Sender
    other_agent: Sender
    stranger: Sender  # a key that the proxy does not know
    keyless: Sender  # on the encrypted port
    plain: Sender

    async def knock(self, door: str, payload: bytes, fleet: Any) -> None:
        """Sends, and waits until the proxy has had it or refused the sender."""
        sender: Sender = getattr(self, door)
        before = heartbeats(fleet)
        refused = asyncio.create_task(sender.refused())
        with contextlib.suppress(zmq.Again):  # there is no way for it any more
            await sender.send(payload, zmq.DONTWAIT)
        await fleet.until(lambda: refused.done() or heartbeats(fleet) > before)
        refused.cancel()


@pytest.fixture
def doors(tmp_path: Path, port: int) -> Iterator[tuple[Doors, dict[str, Any]]]:
    """The doors, and the settings of the proxy behind them."""
    known = tmp_path / "known"
    known.mkdir()
    for folder, name in ((tmp_path, "proxy"), (tmp_path, "stranger"), (known, "agent"), (known, "other")):
        zmq.auth.create_certificates(folder, name)
    server, _ = zmq.auth.load_certificate(tmp_path / "proxy.key")

    def keys(path: Path) -> dict[str, bytes]:
        public, secret = zmq.auth.load_certificate(path)
        assert secret is not None
        return {"curve_publickey": public, "curve_secretkey": secret, "curve_serverkey": server}

    (curve,) = free_ports(1)
    made = Doors(
        agent=Sender(curve, **keys(known / "agent.key_secret")),
        other_agent=Sender(curve, **keys(known / "other.key_secret")),
        stranger=Sender(curve, **keys(tmp_path / "stranger.key_secret")),
        keyless=Sender(curve),
        plain=Sender(port),
    )
    yield (
        made,
        {
            "heartbeat_port": port,
            "curve_port": curve,
            "curve_server_key_file": str(tmp_path / "proxy.key_secret"),
            "curve_clients_dir": str(known),
        },
    )
    for sender in (made.agent, made.other_agent, made.stranger, made.keyless, made.plain):
        sender.close()


def heartbeats(fleet: Any) -> float:
    """How many messages the proxy has read, whatever it made of them."""
    text = generate_latest(fleet.proxy.state.metrics.registry).decode()
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith("ppd_heartbeats_total{"))


# With curve_port set pings are taken only from allowed ranges.
ALLOWED = ("127.0.0.0/8", "10.0.0.0/24")

ATTEMPTS: dict[str, Callable[[str], bytes]] = {
    "re-role": lambda address: heartbeat(address, role="P"),
    "drain": lambda address: heartbeat(address, draining=True),
    "remove": lambda address: heartbeat(address, leaving=True),
    "ping": ping,
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
@pytest.mark.parametrize("door", ["other_agent", "stranger", "keyless", "plain"])
async def test_nobody_but_its_agent_changes_a_worker(
    start_fleet: Any, doors: tuple[Doors, dict[str, Any]], door: str, attempt: str
) -> None:
    ways, settings = doors
    async with start_fleet("R1", heartbeat_allow=ALLOWED, **settings) as fleet:
        configured = fleet.engines["R1"].address
        await ways.knock("agent", heartbeat("10.0.0.1:80"), fleet)
        await ways.knock("agent", heartbeat(configured), fleet)
        before = {view.id: (view.state, view.worker) for view in fleet.proxy.state.registry.views()}
        assert len(before) == 2
        for address in ("10.0.0.1:80", configured):
            await ways.knock(door, ATTEMPTS[attempt](address), fleet)
        assert {view.id: (view.state, view.worker) for view in fleet.proxy.state.registry.views()} == before


@pytest.mark.parametrize("allow", [(), ALLOWED])
@pytest.mark.parametrize("message", [heartbeat, ping])
@pytest.mark.parametrize(
    ("door", "registered"), [("agent", True), ("other_agent", True), ("stranger", False), ("keyless", False)]
)
async def test_with_curve_only_known_agents_register(
    start_fleet: Any,
    doors: tuple[Doors, dict[str, Any]],
    door: str,
    registered: bool,
    message: Callable[[str], bytes],
    allow: tuple[str, ...],
) -> None:
    ways, settings = doors
    async with start_fleet("", heartbeat_allow=allow, **settings) as fleet:
        await ways.knock(door, message("10.0.0.1:80"), fleet)
        assert len(fleet.states()) == registered


@pytest.mark.parametrize(
    ("message", "allow", "registered"),
    [(heartbeat, (), False), (heartbeat, ALLOWED, False), (ping, (), False), (ping, ALLOWED, True)],
)
async def test_with_curve_the_plain_port_takes_only_pings_from_allowed_addresses(
    start_fleet: Any,
    doors: tuple[Doors, dict[str, Any]],
    message: Callable[[str], bytes],
    allow: tuple[str, ...],
    registered: bool,
) -> None:
    ways, settings = doors
    async with start_fleet("", heartbeat_allow=allow, **settings) as fleet:
        await ways.knock("plain", message("10.0.0.1:80"), fleet)
        assert len(fleet.states()) == registered
        assert await fleet.metric('ppd_heartbeats_total{result="dropped"}') == (not registered)


async def test_a_ping_takes_back_nothing_that_the_agent_said(
    start_fleet: Any, doors: tuple[Doors, dict[str, Any]]
) -> None:
    ways, settings = doors
    async with start_fleet("R1", heartbeat_allow=ALLOWED, **settings) as fleet:
        configured = fleet.engines["R1"].address
        for address in ("10.0.0.1:80", configured):
            await ways.knock("agent", heartbeat(address, draining=True), fleet)
            await ways.knock("plain", ping(address), fleet)
        assert fleet.states() == {"R1": "draining", "D1": "draining"}


async def test_a_worker_that_its_agent_took_back_is_open_to_another(
    start_fleet: Any, doors: tuple[Doors, dict[str, Any]]
) -> None:
    ways, settings = doors
    async with start_fleet("", **settings) as fleet:
        await ways.knock("agent", heartbeat("10.0.0.1:80"), fleet)
        await ways.knock("agent", heartbeat("10.0.0.1:80", leaving=True), fleet)
        await ways.knock("other_agent", heartbeat("10.0.0.1:80", role="P"), fleet)
        assert fleet.states() == {"P1": "up"}


async def test_an_agent_whose_key_is_refused_is_not_held_up(start_fleet: Any, tmp_path: Path) -> None:
    (tmp_path / "known").mkdir()
    for name in ("proxy", "stranger"):
        zmq.auth.create_certificates(tmp_path, name)
    server, _ = zmq.auth.load_certificate(tmp_path / "proxy.key")
    public, secret = zmq.auth.load_certificate(tmp_path / "stranger.key_secret")
    assert secret is not None
    (curve,) = free_ports(1)
    async with start_fleet(
        "",
        curve_port=curve,
        curve_server_key_file=str(tmp_path / "proxy.key_secret"),
        curve_clients_dir=str(tmp_path / "known"),
    ) as fleet:
        announcer = Announcer([f"127.0.0.1:{curve}"], (public, secret, server))
        beat = Heartbeat(version=1, role="D", http_address="10.0.0.1:80", models=["sim"])
        async with asyncio.timeout(60):
            for _ in range(40):
                await announcer.send(beat)
                await asyncio.sleep(0.01)
        assert fleet.states() == {}
        announcer.close()


async def test_workers_of_the_config_come_and_go_with_the_file(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", mode=Mode.ALWAYS_SPLIT) as fleet:
        chat = fleet.conversation()
        assert (await chat.say("one")).route == "SPLIT"
        p = fleet.engines["P1"].address
        assert (await fleet.admin("DELETE", f"/workers/{p}"))[0] == 200
        assert (await chat.say("two")).reason == "no_prefill_worker"
        await fleet.add("P2")
        assert (await chat.say("three")).route == "SPLIT"


async def test_a_draining_worker_finishes_its_own_and_gets_no_new_turns(start_fleet: Any) -> None:
    async with start_fleet("P1 D1 D2", engine={"time_scale": 1.0}) as fleet:
        body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "ignore_eos": True}
        running = asyncio.create_task(fleet.post("/v1/chat/completions", body))
        await fleet.until(
            lambda: any(e.counters.generation_tokens > 1 for n, e in fleet.engines.items() if n[0] == "D")
        )
        busy = next(n for n, e in fleet.engines.items() if n[0] == "D" and e.counters.generation_tokens > 1)
        address = fleet.engines[busy].address
        assert (await fleet.admin("PATCH", f"/workers/{address}", {"draining": True}))[0] == 200
        other = await fleet.conversation().say("hello", max_tokens=2)
        finished = await running
        assert finished.status == 200
        assert finished.body["usage"]["completion_tokens"] == 60
        assert other.headers["X-PPD-Decode"] != finished.headers["X-PPD-Decode"]


async def test_a_static_worker_that_dies_goes_down_and_comes_back(start_fleet: Any) -> None:
    async with start_fleet("P1 D1") as fleet:
        fleet.engines["P1"].is_dead = True
        await fleet.until(lambda: fleet.state("P1") == "down")
        assert (await fleet.conversation().say("hi")).reason == "no_prefill_worker"
        fleet.engines["P1"].is_dead = False
        await fleet.until(lambda: fleet.state("P1") == "up")
        assert (await fleet.conversation().say("ho")).route == "SPLIT"


async def test_a_worker_that_joins_finds_connections_opened_to_it(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", mode=Mode.ALWAYS_SPLIT, spare_connections=3) as fleet:
        pools = fleet.proxy.upstream._pools

        def at_hand() -> dict[str, int]:
            return {place[0]: len(pool._idle) for place, pool in pools.items()}

        await fleet.until(lambda: at_hand() == {engine.address: 3 for engine in fleet.engines.values()})
        spare = {connection for pool in pools.values() for connection in pool._idle}
        assert (await fleet.conversation().say("hello")).route == "SPLIT"
        assert {connection for pool in pools.values() for connection in pool._idle} == spare, "its turn opens none"
