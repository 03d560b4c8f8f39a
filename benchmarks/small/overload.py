"""What does a fleet still do for its clients when several times as many turns arrive as it can answer?

    python -m benchmarks.small.overload                      # 4 R with 8 places in the batch, 5 times their capacity
    python -m benchmarks.small.overload --seqs 32 --times 3 --set max_worker_inflight=64

Simulated engines in real time, and a proxy with default settings. The capacity is what clients that wait for their
answers get (a closed loop). Then a new fleet meets Poisson arrivals of `--times` that rate, each a conversation of one
turn. Goodput is answers per second over that time; latencies are of the turns that were answered, from the request to
the first byte and to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import aiohttp
import numpy as np

from ppd.proxy.config import build
from ppd.proxy.fleet.worker import Role
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.launch import running_engine

from .proxy_here import serving

ANSWER_TOKENS = 64
DRAIN_S = 60.0  # for the last turns to be answered


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the fleet, and of which fleet."""

    engines: int
    seqs: int
    seconds: float
    times: float
    settings: Mapping[str, str]


@dataclass(slots=True)
class Outcome:
    """seconds: how long turns arrived; the others have one entry a turn."""

    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    first_byte_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    answered_in_time: int = 0  # while turns still arrived
    lag_s: float = 0.0  # how late the last turn was asked: large if this machine is too slow for the load

    @property
    def goodput_rps(self) -> float:
        return self.answered_in_time / self.seconds


@asynccontextmanager
async def fleet(load: Load) -> AsyncIterator[str]:
    async with AsyncExitStack() as stack:
        engine = SimConfig(role=Role.REPLICA, max_num_seqs=load.seqs, time_scale=1.0)
        engines = [await stack.enter_async_context(running_engine(engine)) for _ in range(load.engines)]
        workers = tuple(f"R={engine.address}" for engine in engines)
        config = build(None, {"port": 0, "heartbeat_port": 0, "workers": workers, **load.settings})
        yield await stack.enter_async_context(serving(config))


class Clients:
    """Asks for answers, and notes what comes of each turn."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, seed: int) -> None:
        self.random = Random(seed)
        self.outcome = Outcome()
        self._session = session
        self._url = f"{base_url}/v1/chat/completions"
        self._begun_s = time.perf_counter()

    async def turn(self, number: int) -> None:
        question = f"{number} {self.random.random()}: what is the tide today?"
        body = {
            "model": "sim",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": ANSWER_TOKENS,
            "stream": True,
        }
        outcome, asked_s = self.outcome, time.perf_counter()
        try:
            async with self._session.post(self._url, json=body) as response:
                await response.content.readany()
                first_s = time.perf_counter() - asked_s
                rest = await response.read()
                whole_s = time.perf_counter() - asked_s
        except aiohttp.ClientError as exc:
            outcome.statuses[type(exc).__name__] += 1
            return
        ended_well = response.status != 200 or rest.endswith(b"[DONE]\n\n")
        outcome.statuses[str(response.status) if ended_well else "broken off"] += 1
        if response.status == 200 and ended_well:
            outcome.first_byte_s.append(first_s)
            outcome.whole_s.append(whole_s)
            outcome.answered_in_time += asked_s + whole_s < self._begun_s + outcome.seconds
        else:
            outcome.refused_s.append(whole_s)

    async def closed_loop(self, seconds: float, at_once: int) -> Outcome:
        self._begin(seconds)

        async def one(number: int) -> None:
            while time.perf_counter() < self._begun_s + seconds:
                await self.turn(number)

        await asyncio.gather(*(one(number) for number in range(at_once)))
        return self.outcome

    async def open_loop(self, seconds: float, rate_rps: float) -> Outcome:
        self._begin(seconds)
        turns, due_s = set[asyncio.Task[None]](), self._begun_s
        while (due_s := due_s + self.random.expovariate(rate_rps)) < self._begun_s + seconds:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            turns.add(asyncio.create_task(self.turn(len(turns))))
        self.outcome.lag_s = time.perf_counter() - due_s
        _, late = await asyncio.wait(turns, timeout=DRAIN_S)
        self.outcome.statuses["never answered"] += len(late)
        for turn in late:
            turn.cancel()
        return self.outcome

    def _begin(self, seconds: float) -> None:
        self.outcome.seconds, self._begun_s = seconds, time.perf_counter()


async def measure(load: Load, seed: int) -> tuple[Outcome, Outcome]:
    """The fleet at its capacity, then a new one under overload."""
    async with fleet(load) as url, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        full = await Clients(session, url, seed).closed_loop(load.seconds / 2, round(1.5 * load.engines * load.seqs))
    async with fleet(load) as url, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        over = await Clients(session, url, seed).open_loop(load.seconds, load.times * full.goodput_rps)
    return full, over


def row(name: str, outcome: Outcome) -> str:
    def percentiles(values: list[float]) -> str:
        return ", ".join(f"{value:.2f}" for value in np.percentile(values, (50, 99))) if values else "-"

    ended = ", ".join(f"{count} x {status}" for status, count in sorted(outcome.statuses.items()) if count)
    cells = (
        name,
        f"{outcome.goodput_rps:.1f}",
        percentiles(outcome.first_byte_s),
        percentiles(outcome.whole_s),
        percentiles(outcome.refused_s),
        ended,
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    prog = "python -m benchmarks.small.overload"
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--seqs", type=int, default=8, help="sequences in an engine's batch")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--times", type=float, default=5.0, help="arrivals, in multiples of the capacity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the proxy")
    args = parser.parse_args()
    settings = dict(text.partition("=")[::2] for text in args.set)
    full, over = asyncio.run(measure(Load(args.engines, args.seqs, args.seconds, args.times, settings), args.seed))
    print("| load | answers/s | first byte s, p50, p99 | whole s, p50, p99 | refused s, p50, p99 | turns |")
    print("|---|---|---|---|---|---|")
    print(row("closed loop", full))
    print(row(f"{args.times:g} x", over))
    print(f"\ngoodput / capacity: {over.goodput_rps / full.goodput_rps:.2f}")
    if over.lag_s > 1.0:
        print(f"This machine is too slow for the load: the last turn was asked {over.lag_s:.1f} s late.")


if __name__ == "__main__":
    main()
