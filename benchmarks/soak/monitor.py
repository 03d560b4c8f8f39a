"""Samples the proxy and the engines during a soak, and reads what they still hold after it."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import aiohttp

from ppd.proxy.fleet.booking import LEASE_S

from .fleet import ENGINE_GAUGES, SoakFleet, descriptors, rss_kib
from .records import ProcessSample

# The proxy's gauges of work in progress, found by the words in their names.
_HELD = (r"ppd_(?!.*_(total|created|bucket|count|sum)$).*(inflight|queue|outstanding|waiting|reserved)",)
_COUNTED = ("vllm:num_preemptions_total", "vllm:nixl_num_.*_total", "ppd_sim:.*_total", "vllm:request_success_total")
_ENGINES_EVERY = 3  # samples
_CLOSES_S = 10.0

_SHARED_LABELS = re.compile(r'(model_name|engine)="[^"]*",?')
LOG_DEFECTS = ("Traceback (most recent call last)", "never retrieved", "never awaited", "Unclosed", "ResourceWarning")


class Monitor:
    def __init__(self, fleet: SoakFleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._lives: dict[str, dict[str, float]] = {}  # each engine's counters since its process started
        self._ended: Counter[str] = Counter()
        self.samples: list[ProcessSample] = []

    async def run(self) -> None:
        while True:
            await self._sample()
            if len(self.samples) % _ENGINES_EVERY == 0:
                await self._count_engines()
            await asyncio.sleep(1.0)

    async def _sample(self) -> None:
        try:
            sessions = int((await self._fleet.proxy_metrics(["ppd_sessions$"])).get("ppd_sessions", 0))
        except (aiohttp.ClientError, TimeoutError):
            sessions = -1
        self.samples.append(
            ProcessSample(
                at_s=self._clock(),
                rss_kib=sum(map(rss_kib, self._fleet.proxy_pids)),
                descriptors=sum(map(descriptors, self._fleet.proxy_pids)),
                sessions=sessions,
            )
        )

    async def _count_engines(self) -> None:
        for engine in self._fleet.running:
            try:
                counts = await self._fleet.engine_metrics(engine.name, _COUNTED)
            except (aiohttp.ClientError, TimeoutError):
                continue
            before = self._lives.get(engine.name, {})
            if any(counts.get(name, 0.0) < value for name, value in before.items()):
                self._ended.update(before)  # the process was restarted
            self._lives[engine.name] = counts

    async def engine_counts(self) -> dict[str, float]:
        """Sums over all engine processes, without what a killed one counted since its last sample."""
        await self._count_engines()
        total = Counter(self._ended)
        for counts in self._lives.values():
            total.update(counts)
        return {short(name): value for name, value in sorted(total.items()) if value}

    async def settle(self) -> tuple[dict[str, float], float]:
        """Gauges that are not 0 after all leases have ended, by name; and the seconds until all were 0."""
        begun_s = self._clock()
        while held := await self._held():
            if self._clock() - begun_s > LEASE_S + _CLOSES_S:
                break
            await asyncio.sleep(0.5)
        quiet_after_s = self._clock() - begun_s
        while (count := self._fleet.client_connections) and self._clock() - begun_s < quiet_after_s + _CLOSES_S:
            await asyncio.sleep(0.5)
        return held | ({"connections whose client has closed them": float(count)} if count else {}), quiet_after_s

    async def _held(self) -> dict[str, float]:
        held = {name: value for name, value in (await self._fleet.proxy_metrics(_HELD)).items() if value}
        for engine in self._fleet.running:
            gauges = await self._fleet.engine_metrics(engine.name, ENGINE_GAUGES)
            held |= {f"{engine.name} {short(name)}": value for name, value in gauges.items() if value}
        return held


def short(name: str) -> str:
    return _SHARED_LABELS.sub("", name).replace("{}", "").replace(",}", "}")


def log_defects(path: Path) -> list[str]:
    with path.open(encoding="utf-8", errors="replace") as log:
        return sorted({line.strip()[:200] for line in log if any(word in line for word in LOG_DEFECTS)})
