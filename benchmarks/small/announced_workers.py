"""Does the proxy answer promptly with thousands of announced workers, and while somebody floods its heartbeat port?

    python -m benchmarks.small.announced_workers                       # 10,000 workers, then 250,000 messages in 5 s
    python -m benchmarks.small.announced_workers --workers 1000 --seconds 10

One simulated engine listens on every address of 127.0.0.0/8, so each announced worker is one that answers: half are R,
a quarter each P and D. Each sends a heartbeat every 10 s. Meanwhile `GET /health` and short turns are timed, one after
the other: with a single worker, while all are announced, with all of them, and beside a flood of messages of which
each announces another worker.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import aiohttp
import zmq

from ppd.proxy.discovery.heartbeat import Heartbeat
from ppd.proxy.fleet.worker import Role
from ppd.servers.fleet.ports import free_ports
from ppd.servers.fleet.process import EngineProcess
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.launch import running_engine
from ppd.servers.vllm.launch import Launch

HEARTBEAT_S = 10.0
FLOOD_S = 5.0
ROLES = (Role.REPLICA, Role.PREFILL, Role.REPLICA, Role.DECODE)
_ROW = "{:<28} {:>7} {:>9.1f} {:>9.1f} {:>9.1f}   {:>7} {:>9.1f} {:>9.1f} {:>9.1f} {:>7}"


@dataclass(slots=True)
class Times:
    """Of one phase, in milliseconds."""

    health_ms: list[float] = field(default_factory=list)
    turns_ms: list[float] = field(default_factory=list)
    failed: int = 0

    def row(self, name: str) -> str:
        figures: list[object] = []
        for times_ms in (self.health_ms, self.turns_ms):
            ordered = sorted(times_ms) or [0.0]
            figures += [len(times_ms), ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]]
        return _ROW.format(name, *figures, self.failed)


@dataclass(frozen=True, slots=True)
class Place:
    proxy_port: int
    heartbeat_port: int
    engine_port: int

    def beat(self, number: int, role: Role | None = None) -> bytes:
        """number: below 2^24, of the address in 127.0.0.0/8."""
        address = f"127.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:{self.engine_port}"
        role = role or ROLES[number % len(ROLES)]
        return Heartbeat(version=1, role=role, http_address=address, models=["sim"], engine="sim").encode()


class Announcer:
    """Sends heartbeats from a thread, at a steady pace, until it is stopped."""

    def __init__(self, place: Place, messages: Iterator[bytes], rate: float) -> None:
        self.sent = 0
        self._place, self._messages, self._rate = place, messages, rate
        self._stop = Event()
        self._thread = Thread(target=self._run)

    def __enter__(self) -> Announcer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"tcp://127.0.0.1:{self._place.heartbeat_port}")
            began_s = time.monotonic()
            for message in self._messages:
                while not self._stop.is_set():
                    try:
                        socket.send(message, zmq.DONTWAIT)
                        break
                    except zmq.Again:  # the proxy lets it wait
                        self._stop.wait(0.001)
                if self._stop.is_set():
                    return
                self.sent += 1
                self._stop.wait(max(0.0, began_s + self.sent / self._rate - time.monotonic()))


async def timed(place: Place, session: aiohttp.ClientSession, seconds: float) -> Times:
    times, url = Times(), f"http://127.0.0.1:{place.proxy_port}"
    until_s = time.monotonic() + seconds
    number = 0
    while time.monotonic() < until_s:
        number += 1
        began_s = time.perf_counter()
        async with session.get(f"{url}/health") as answer:
            times.failed += answer.status != 200
        times.health_ms.append((time.perf_counter() - began_s) * 1e3)
        body = {"model": "sim", "messages": [{"role": "user", "content": f"hi {number}"}], "max_tokens": 2}
        began_s = time.perf_counter()
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            times.failed += answer.status != 200
            await answer.read()
        times.turns_ms.append((time.perf_counter() - began_s) * 1e3)
    return times


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[Place, aiohttp.ClientSession]]:
    place = Place(*free_ports(3))
    argv: tuple[str, ...] = (
        sys.executable,
        "-m",
        "ppd.servers",
        "serve",
        "--port",
        str(place.proxy_port),
        "--mode",
        "replica",
    )
    argv += ("--heartbeat-port", str(place.heartbeat_port), "--workers", f"R=127.255.255.254:{place.engine_port}")
    async with AsyncExitStack() as stack:
        config = SimConfig(role=Role.REPLICA, host="0.0.0.0", port=place.engine_port, time_scale=0.01)
        await stack.enter_async_context(running_engine(config))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        proxy = EngineProcess(Launch(argv, {}), folder / "proxy.log", name="proxy")
        await stack.enter_async_context(proxy)
        await proxy.wait_healthy(f"http://127.0.0.1:{place.proxy_port}", timeout_s=60.0)
        await asyncio.sleep(2.0)  # for the first probe of the engine
        yield place, session


def again(messages: list[bytes]) -> Iterator[bytes]:
    while True:
        yield from messages


async def known(place: Place, session: aiohttp.ClientSession) -> int:
    async with session.get(f"http://127.0.0.1:{place.proxy_port}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("ppd_workers{")))


async def measure(folder: Path, workers: int, seconds: float, flood: int) -> None:
    async with running(folder) as (place, session):
        print((await timed(place, session, seconds)).row("one worker"), flush=True)
        with Announcer(place, again([place.beat(number) for number in range(workers)]), workers / HEARTBEAT_S):
            print((await timed(place, session, HEARTBEAT_S)).row("while they are announced"), flush=True)
            print((await timed(place, session, seconds)).row(f"{await known(place, session)} workers"), flush=True)
            strange = (place.beat(number, Role.PREFILL) for number in range(2**23, 2**23 + flood))
            with Announcer(place, strange, flood / FLOOD_S) as flooding:
                times = await timed(place, session, FLOOD_S)
            print(times.row(f"{flooding.sent} of {flood} sent"), flush=True)
            print(f"workers known afterwards: {await known(place, session)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    parser.add_argument("--flood", type=int, default=250_000, help="messages in 5 s")
    given = parser.parse_args()
    print(f"{'':<28} {'/health: count, p50, p99, max in ms':>37}   {'turns: the same, and failed':>37}")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), given.workers, given.seconds, given.flood))


if __name__ == "__main__":
    main()
