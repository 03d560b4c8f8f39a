"""The agent beside an engine: what it says, and when."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
import zmq.auth
from aiohttp import web
from aiohttp.test_utils import TestServer

from ppd.proxy.discovery.heartbeat import decode
from ppd.proxy.fleet.engine_metrics import EngineMetrics
from ppd.proxy.fleet.worker import Announcement, Load, Role
from ppd.proxy.health.probe import EngineStatus
from ppd.servers.agent.agent import MISSES, Agent, AgentPhase, EngineWatch, Identity, completed, heartbeat_of, is_idle
from ppd.servers.agent.announcer import Announcer
from ppd.servers.cli.agent import curve_keys
from ppd.servers.fleet.process import EngineFailed, EngineProcess
from ppd.servers.vllm.launch import Launch

pytestmark = pytest.mark.e2e  # processes and sockets, for which it waits

IDENTITY = Identity(
    role=Role.DECODE,
    address="10.0.0.1:8200",
    coordinates={},
    profile="h",
    labels={"a": "b"},
    has_sidecar=True,
    launch_id="launch",
)


@pytest.mark.parametrize(
    ("phase", "draining", "leaving"),
    [(AgentPhase.SERVING, False, False), (AgentPhase.DRAINING, True, False), (AgentPhase.LEAVING, False, True)],
)
def test_a_beat_says_what_was_seen_and_where_the_agent_stands(phase: AgentPhase, draining: bool, leaving: bool) -> None:
    metrics = EngineMetrics(load=Load(2, 1, 0.5, 4096), incarnation="17")
    said = decode(heartbeat_of(IDENTITY, EngineStatus(True, ("m",), "0.33.0", metrics), phase).encode())
    assert (said.draining, said.leaving, said.worker.profile) == (draining, leaving, "h")
    assert (said.worker.labels, said.worker.has_sidecar) == ({"a": "b"}, True)
    assert said.load == Load(2, 1, 0.5, 4096)
    assert (said.worker.incarnation, said.worker.models, said.worker.role) == ("17", ("m",), Role.DECODE)


def test_an_engine_that_does_not_tell_its_start_is_known_by_its_launch() -> None:
    assert heartbeat_of(IDENTITY, EngineStatus(True), AgentPhase.SERVING).incarnation == "launch"


def test_what_a_bootstrap_server_told_is_announced_with_what_the_operator_said() -> None:
    identity = replace(IDENTITY, coordinates={"bootstrap_port": "9"})
    status = EngineStatus(True, coordinates={"engine_id": "e"})
    assert heartbeat_of(identity, status, AgentPhase.SERVING).coordinates == {"bootstrap_port": "9", "engine_id": "e"}


@pytest.mark.parametrize(
    ("before", "again", "was_away", "keeps"),
    [
        ("a", "a", True, True),
        ("a", "b", False, False),
        ("a", None, False, True),
        ("a", None, True, False),
        ("", "", False, True),
        ("", "", True, False),
    ],
)
def test_what_a_busy_engine_does_not_answer_it_has_said_before(
    before: str, again: str | None, was_away: bool, keeps: bool
) -> None:
    last = EngineStatus(True, ("m",), "1", EngineMetrics(incarnation=before), True, coordinates={"engine_id": "e"})
    now = EngineStatus(True, ("m",), "1", EngineMetrics(incarnation=again or ""), again is not None)
    found = completed(now, last, was_away=was_away)
    assert found.coordinates == ({"engine_id": "e"} if keeps else {})
    assert found.metrics.incarnation == (before if again is None else again)


@pytest.mark.parametrize(
    ("role", "connector", "load", "idle"),
    [
        (Role.DECODE, "none", Load(running=1), False),
        (Role.REPLICA, "none", Load(waiting=1), False),
        (Role.DECODE, "p2p_nccl", Load(kv_usage=0.1), True),
        (Role.PREFILL, "none", Load(kv_usage=0.1), False),  # a handoff that D has yet to pull
        (Role.REPLICA, "nixl", Load(kv_usage=0.1), False),  # it lent itself, perhaps
    ],
)
def test_an_engine_is_idle_when_nobody_needs_it_any_more(role: Role, connector: str, load: Load, idle: bool) -> None:
    assert is_idle(role, connector, load) is idle


@pytest.mark.parametrize(
    ("looks", "said"),
    [
        ([False, False, False, False], [None, None, None, None]),  # nothing to take back
        ([True, True], [AgentPhase.SERVING, AgentPhase.SERVING]),
        (
            [True, False, False, True],
            [AgentPhase.SERVING, None, None, AgentPhase.SERVING],
        ),  # a busy engine may miss a look
        ([True, False, False, False, False], [AgentPhase.SERVING, None, None, AgentPhase.LEAVING, None]),
        ([True, False, False, True, False, False], [AgentPhase.SERVING, None, None, AgentPhase.SERVING, None, None]),
        ([True, False, False, False, True], [AgentPhase.SERVING, None, None, AgentPhase.LEAVING, AgentPhase.SERVING]),
    ],
)
def test_an_engine_is_taken_back_after_looks_in_a_row_without_an_answer(
    looks: list[bool], said: list[AgentPhase | None]
) -> None:
    assert MISSES == 3
    watch, heard = EngineWatch(), []
    for is_healthy in looks:
        watch, phase = watch.after(is_healthy)
        heard.append(phase)
    assert heard == said


class Engine:
    """A fake engine whose load and health a test sets."""

    def __init__(self) -> None:
        self.health = 200
        self.running = 0
        self.app = web.Application()
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/metrics", self._metrics)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f"vllm:num_requests_running {self.running}\n")


class Ears:
    """A ROUTER that hears what agents say."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")

    async def hear(self) -> Announcement:
        frames = await asyncio.wait_for(self._socket.recv_multipart(), 60)
        return decode(frames[-1])

    async def hear_until(self, **wanted: bool) -> Announcement:
        while True:
            said = await self.hear()
            if all(getattr(said, name) == value for name, value in wanted.items()):
                return said

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def ears() -> Any:
    made = Ears()
    yield made
    made.close()


@pytest.fixture
async def engine() -> AsyncIterator[tuple[Engine, str]]:
    fake = Engine()
    async with TestServer(fake.app) as server:
        yield fake, str(server.make_url("")).rstrip("/")


def agent(ears: Ears, base_url: str, process: EngineProcess | None = None, **changes: Any) -> tuple[Agent, Announcer]:
    announcer = Announcer([f"127.0.0.1:{ears.port}"])
    options: dict[str, Any] = {"base_url": base_url, "interval_s": 0.05, "drain_timeout_s": 10.0, **changes}
    return Agent(IDENTITY, announcer, process, **options), announcer


async def test_an_attached_engine_is_announced_drained_and_let_go(ears: Ears, engine: tuple[Engine, str]) -> None:
    fake, url = engine
    fake.running = 3
    made, announcer = agent(ears, url)
    stop = asyncio.Event()
    running = asyncio.create_task(made.run(stop))
    said = await ears.hear()
    assert said.load is not None
    assert (said.load.running, said.draining) == (3, False)
    stop.set()
    await ears.hear_until(draining=True)
    fake.running = 0
    await ears.hear_until(leaving=True)
    await asyncio.wait_for(running, 60)
    announcer.close()


async def test_draining_ends_at_its_limit(ears: Ears, engine: tuple[Engine, str]) -> None:
    fake, url = engine
    fake.running = 1
    made, announcer = agent(ears, url, drain_timeout_s=0.0)
    stop = asyncio.Event()
    running = asyncio.create_task(made.run(stop))
    await ears.hear()
    stop.set()
    await asyncio.wait_for(running, 60)
    assert (await ears.hear_until(leaving=True)).worker.id == IDENTITY.address
    announcer.close()


async def test_an_engine_that_dies_is_taken_back_and_announced_again_when_it_returns(
    ears: Ears, engine: tuple[Engine, str]
) -> None:
    fake, url = engine
    made, announcer = agent(ears, url)
    stop = asyncio.Event()
    running = asyncio.create_task(made.run(stop))
    await ears.hear_until(leaving=False)
    fake.health = 503
    await ears.hear_until(leaving=True)
    fake.health = 200
    assert not (await ears.hear_until(leaving=False)).draining
    stop.set()
    await asyncio.wait_for(running, 60)
    announcer.close()


async def test_a_launched_engine_that_ends_by_itself_is_said_to_leave_with_the_tail_of_its_log(
    ears: Ears, engine: tuple[Engine, str], tmp_path: Path
) -> None:
    _, url = engine
    code = "import signal; print('out of memory', flush=True); signal.pause()"
    process = EngineProcess(Launch((sys.executable, "-c", code)), tmp_path / "engine.log")
    made, announcer = agent(ears, url, process)
    running = asyncio.create_task(made.run(asyncio.Event()))
    await ears.hear_until(leaving=False)
    while "out of memory" not in process.log_tail():
        await ears.hear()
    await process.kill()
    await ears.hear_until(leaving=True)
    with pytest.raises(EngineFailed, match="ended with 137") as caught:
        await asyncio.wait_for(running, 60)
    assert "out of memory" in str(caught.value)
    announcer.close()


async def test_an_engine_whose_log_cannot_be_written_is_an_error_and_nothing_else(
    ears: Ears, engine: tuple[Engine, str], tmp_path: Path
) -> None:
    made, announcer = agent(ears, engine[1], EngineProcess(Launch((sys.executable, "-c", "")), tmp_path))
    with pytest.raises(EngineFailed, match=r"^engine's log .* cannot be written: Is a directory$"):
        await made.run(asyncio.Event())
    announcer.close()


async def test_what_answers_like_an_engine_but_lists_no_models_is_told_once_a_minute(
    ears: Ears, engine: tuple[Engine, str], caplog: pytest.LogCaptureFixture
) -> None:
    _, url = engine
    made, announcer = agent(ears, url)
    stop = asyncio.Event()
    running = asyncio.create_task(made.run(stop))
    for _ in range(3):
        await ears.hear()
    stop.set()
    await asyncio.wait_for(running, 60)
    announcer.close()
    assert [text for text in caplog.messages if "no models" in text] == [
        f"engine {url} lists no models: it must be an engine's port, and --api-key its key"
    ]


def quiet_port() -> int:
    """A free port below those that connections get: one tried again and again there could meet itself and hold it."""
    for port in range(21_000, 30_000):
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no free port")


async def test_a_proxy_that_was_away_hears_the_last_message_only() -> None:
    context = zmq.asyncio.Context()
    port = quiet_port()
    announcer = Announcer([f"127.0.0.1:{port}"])
    for running in range(50):
        status = EngineStatus(True, metrics=EngineMetrics(load=Load(running=running)))
        await announcer.send(heartbeat_of(IDENTITY, status, AgentPhase.SERVING))
    with context.socket(zmq.ROUTER) as router:
        router.bind(f"tcp://127.0.0.1:{port}")
        frames = await asyncio.wait_for(router.recv_multipart(), 60)
        assert decode(frames[-1]).load == Load(running=49)
    announcer.close()
    context.destroy(linger=0)


async def test_every_proxy_hears_of_the_engine(engine: tuple[Engine, str]) -> None:
    _, url = engine
    both = [Ears(), Ears()]
    announcer = Announcer([f"127.0.0.1:{one.port}" for one in both])
    stop = asyncio.Event()
    made = Agent(IDENTITY, announcer, None, base_url=url, interval_s=0.05, drain_timeout_s=10.0)
    running = asyncio.create_task(made.run(stop))
    for one in both:
        assert (await one.hear()).worker.address == IDENTITY.address
    stop.set()
    await asyncio.wait_for(running, 60)
    announcer.close()
    for one in both:
        one.close()


async def test_an_agent_with_keys_reaches_a_proxy_that_wants_them(tmp_path: Path) -> None:
    server_public, server_secret = zmq.auth.create_certificates(tmp_path, "proxy")
    _, agent_secret = zmq.auth.create_certificates(tmp_path, "agent")
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.curve_publickey, router.curve_secretkey = zmq.auth.load_certificate(server_secret)
    router.curve_server = True
    port = router.bind_to_random_port("tcp://127.0.0.1")
    announcer = Announcer([f"127.0.0.1:{port}"], curve_keys(Path(agent_secret), Path(server_public)))
    await announcer.send(heartbeat_of(IDENTITY, EngineStatus(True), AgentPhase.SERVING))
    frames = await asyncio.wait_for(router.recv_multipart(), 60)
    assert decode(frames[-1]).worker.address == IDENTITY.address
    announcer.close()
    context.destroy(linger=0)
