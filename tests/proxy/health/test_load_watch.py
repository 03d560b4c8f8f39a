"""Who is asked for its load between probes, and what becomes of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ppd.proxy.config import ProxyConfig
from ppd.proxy.fleet.places import START, UNKNOWN
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import Announcement, Load, Role, Source, Worker
from ppd.proxy.health.load_watch import LoadWatch
from ppd.proxy.upstream.client import Upstream

METRICS = "vllm:num_requests_running 8\nvllm:num_requests_waiting 40\nvllm:kv_cache_usage_perc 0.5\n"
REPORTED = Load(8, 40, 0.5, 4096)

Answer = Callable[[], web.Response]


class Bench:
    def __init__(self, port: int, upstream: Upstream, role: Role, engine: str) -> None:
        self.registry = Registry()
        address = f"127.0.0.1:{port}"
        self.worker = Worker(role=role, address=address, engine=engine, incarnation="1", source=Source.AGENT)
        self.registry.apply(Announcement(self.worker, REPORTED), 0.0)
        self.watch = LoadWatch(ProxyConfig(), self.registry, upstream, lambda: 0.0)

    @property
    def places(self) -> int:
        view = self.registry.view(self.worker.id)
        assert view is not None
        return view.places

    async def look_around(self) -> None:
        self.watch.look_around()
        self.watch.look_around()  # who is being asked is not asked again
        await asyncio.gather(*self.watch._asking.values())


@asynccontextmanager
async def bench(
    answer: Answer, role: Role = Role.REPLICA, engine: str = "vllm"
) -> AsyncIterator[tuple[Bench, list[str]]]:
    asked: list[str] = []

    async def metrics(request: web.Request) -> web.Response:
        asked.append(request.path)
        return answer()

    app = web.Application()
    app.router.add_get("/{path:.*}", metrics)
    async with TestServer(app) as server:
        upstream = Upstream(keepalive_s=4.0)
        try:
            yield Bench(server.port or 0, upstream, role, engine), asked
        finally:
            await upstream.close()


@pytest.mark.parametrize(
    ("role", "legs", "asks"),
    [(Role.REPLICA, START, 1), (Role.DECODE, START, 1), (Role.REPLICA, START - 1, 0), (Role.PREFILL, 100, 0)],
)
async def test_only_a_worker_without_a_free_place_is_asked(role: Role, legs: int, asks: int) -> None:
    async with bench(lambda: web.Response(text=METRICS), role) as (it, asked):
        for _ in range(legs):
            it.registry.reserve(it.worker.id)
        await it.look_around()
        assert asked == ["/metrics"] * asks
        assert it.places == (10 if asks else START if role is not Role.PREFILL else 0)


@pytest.mark.parametrize(("engine", "path"), [("sglang", "/metrics"), ("trtllm", "/prometheus/metrics")])
async def test_each_kind_of_engine_is_asked_where_it_has_its_metrics(engine: str, path: str) -> None:
    async with bench(lambda: web.Response(text=METRICS), engine=engine) as (it, asked):
        for _ in range(START):
            it.registry.reserve(it.worker.id)
        await it.look_around()
        assert asked == [path]


@pytest.mark.parametrize("answer", [lambda: web.Response(status=500), lambda: web.Response(body=b"\xff\x00{")])
async def test_an_answer_that_is_no_report_changes_nothing(answer: Answer) -> None:
    async with bench(answer) as (it, asked):
        for _ in range(START):
            it.registry.reserve(it.worker.id)
        await it.look_around()
        assert (len(asked), it.places) == (1, START)


async def test_a_worker_that_cannot_be_reached_changes_nothing() -> None:
    async with bench(lambda: web.Response(text=METRICS)) as (it, _):
        gone = Worker(role=Role.REPLICA, address="127.0.0.1:9", incarnation="1", source=Source.AGENT)
        it.registry.apply(Announcement(gone, REPORTED), 0.0)
        for _ in range(START):
            it.registry.reserve(gone.id)
        await it.look_around()
        assert not it.watch._asking


async def test_a_worker_that_has_never_reported_its_load_is_not_asked() -> None:
    async with bench(lambda: web.Response(text=METRICS)) as (it, asked):
        it.registry.remove(it.worker.id)
        it.registry.apply(Announcement(it.worker), 0.0)
        for _ in range(ProxyConfig().max_worker_inflight):
            it.registry.reserve(it.worker.id)
        await it.look_around()
        assert (asked, it.places) == ([], UNKNOWN)
