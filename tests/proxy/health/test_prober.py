"""Probes of workers without an agent: up and down, and when nobody waits for one any longer."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import BaseTestServer, TestServer

from ppd.proxy.config import ProxyConfig
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import NO_EVENTS, UNHEARD, Announcement, EventSource, Role, Source, Worker
from ppd.proxy.health.prober import BEGUN_AT_ONCE, MISSES, Prober
from ppd.proxy.runtime.tls import worker_tls
from ppd.proxy.upstream.client import Upstream
from tests.support.clock import Rounds

EVENTS = "/kv_event_sources"


class FakeUpstream:
    def __init__(self) -> None:
        self.hung_up: list[str] = []
        self.kept_but_handoffs: list[str] = []
        self.alive: list[str] = []
        self.answered = 0
        self.is_waiting = True

    def waits_for(self, worker: str) -> bool:
        return self.is_waiting

    def hang_up(self, worker: str, *, only_handoffs: bool) -> None:
        (self.kept_but_handoffs if only_handoffs else self.hung_up).append(worker)

    def answers(self, worker: str) -> int:
        return self.answered

    def heard(self, worker: str, asked_s: float) -> None:
        self.alive.append(worker)


class Bench:
    """A prober, and one engine whose health a test sets. `round` is one probe of each worker, to its end."""

    def __init__(self, server: BaseTestServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.health: list[int] = []  # of the next probes; 200 when used up
        self.keys: list[str] = []
        self.asked: list[str] = []  # paths
        self.answers: dict[str, str | int] = {"/v1/models": '{"data": [{"id": "m"}]}', EVENTS: 404}
        self.registry = Registry()
        self.upstream = FakeUpstream()
        self.worker = Worker(role=Role.REPLICA, address=f"127.0.0.1:{server.port}", source=Source.STATIC)
        self.session = session
        self.prober = self.prober_with(worker_api_key="inner")
        self.registry.add_static(self.worker, 0.0)

    def prober_with(self, **changes: Any) -> Prober:
        config, upstream = ProxyConfig(**changes), cast(Upstream, self.upstream)
        return Prober(config, self.registry, upstream, lambda: 5.0, lambda: self.session, worker_tls(config))

    def source(self, port: int) -> EventSource:
        return EventSource(f"tcp://127.0.0.1:{port}")

    @property
    def is_up(self) -> bool:
        view = self.registry.view(self.worker.id)
        return view is not None and view.up

    async def round(self) -> None:
        await self.prober._look_around()
        await asyncio.gather(*self.prober._probing.values())
        await asyncio.sleep(0)

    async def rounds(self, *health: int) -> None:
        self.health += health
        for _ in health:
            await self.round()


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    async def answer(request: web.Request) -> web.Response:
        it.keys.append(request.headers.get("Authorization", ""))
        it.asked.append(request.path)
        if request.path == "/health":
            return web.Response(status=it.health.pop(0) if it.health else 200)
        given = it.answers.get(request.path, "")
        return web.Response(status=given) if isinstance(given, int) else web.Response(text=given)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        it = Bench(server, session)
        yield it


async def test_a_worker_is_up_after_its_first_answer_and_down_after_misses_in_a_row() -> None:
    async with bench() as it:
        assert not it.is_up
        await it.rounds(200)
        assert it.is_up
        view = it.registry.view(it.worker.id)
        assert view is not None
        assert (view.worker.models, view.since_s) == (("m",), 5.0)
        for _ in range(2):
            await it.rounds(*[503] * (MISSES - 1))
            assert it.is_up, "one that is slow to answer may be the only one of its kind"
            await it.rounds(200)
        await it.rounds(*[503] * MISSES)
        assert not it.is_up
        await it.rounds(503)
        assert not it.is_up
        await it.rounds(200)
        assert it.is_up
        assert set(it.keys) == {"Bearer inner"}


async def test_a_worker_whose_process_is_gone_is_down_at_once() -> None:
    async with bench() as it:
        await it.rounds(200)
        assert it.is_up
        await it.server.close()
        await it.round()
        assert not it.is_up
        assert it.upstream.hung_up == []


async def test_a_worker_that_answers_turns_is_up_whatever_its_probes_say() -> None:
    async with bench() as it:
        await it.rounds(200)
        for _ in range(3):
            await it.rounds(*[503] * (MISSES - 1))
            it.registry.answered(it.worker.id)
        await it.rounds(503)
        assert (it.is_up, it.upstream.hung_up) == (True, [])
        await it.rounds(*[503] * (MISSES - 1))
        assert (it.is_up, it.upstream.hung_up) == (False, [it.worker.id]), "it has fallen silent"
        it.registry.answered(it.worker.id)
        await it.rounds(503)
        assert it.is_up


async def test_behind_a_closed_port_streams_go_on_but_no_turn_is_sent() -> None:
    async with bench() as it:
        await it.rounds(200)
        await it.server.close()
        for _ in range(MISSES):
            it.registry.answered(it.worker.id)
            await it.round()
            assert not it.is_up
        for _ in range(MISSES):
            await it.round()
        assert (it.upstream.hung_up, it.upstream.kept_but_handoffs) == ([], [it.worker.id])


async def test_a_worker_that_a_stranger_may_have_announced_is_probed_without_the_key() -> None:
    async with bench() as it:
        it.registry.remove(it.worker.id)
        pinging = replace(it.worker, source=Source.PING, is_trusted=False)
        it.registry.apply(Announcement(pinging), 0.0)
        await it.round()
        assert set(it.keys) == {""}


async def test_who_missed_a_probe_is_looked_at_more_often() -> None:
    async with bench() as it:
        await it.rounds(200)
        assert not it.prober._anyone_in_doubt()
        await it.rounds(503)
        assert it.prober._anyone_in_doubt()
        await it.rounds(200)
        assert not it.prober._anyone_in_doubt()


async def test_who_does_not_answer_so_many_times_in_a_row_is_hung_up_on_once() -> None:
    async with bench() as it:
        await it.rounds(200, *[503] * (MISSES - 1), 200, *[503] * (MISSES - 1))
        assert it.upstream.hung_up == []
        await it.rounds(503, 503, 503, 503, 503)
        assert it.upstream.hung_up == [it.worker.id]
        await it.rounds(200, *[503] * MISSES)
        assert it.upstream.hung_up == [it.worker.id] * 2


async def test_a_worker_that_was_removed_and_added_again_starts_anew() -> None:
    async with bench() as it:
        await it.rounds(*[503] * (MISSES + 1))
        it.registry.remove(it.worker.id)
        await it.round()
        it.registry.add_static(it.worker, 0.0)
        await it.rounds(*[503] * MISSES)
        assert it.upstream.hung_up == [it.worker.id] * 2
        assert not it.prober._probing


async def test_a_silent_agents_worker_is_hung_up_on_only_if_it_is_dead_too() -> None:
    async with bench() as it:
        await it.rounds(200)
        view = it.registry.view(it.worker.id)
        assert view is not None
        for health, is_dead in (([503] * (MISSES - 1), False), ([503] * MISSES, True)):
            it.health = list(health)
            it.prober.doubt(view)
            it.prober.doubt(view)
            await asyncio.gather(*it.prober._probing.values())
            await asyncio.sleep(0)
            assert bool(it.upstream.hung_up) is is_dead
            assert it.upstream.alive == [it.worker.id]
        assert it.upstream.hung_up == [it.worker.id]
        it.health = [503] * MISSES
        it.prober.doubt(view)
        await asyncio.sleep(0)
        it.upstream.answered += 1
        await asyncio.gather(*it.prober._probing.values())
        assert it.upstream.hung_up == it.upstream.kept_but_handoffs == [it.worker.id], "it answers turns"


async def test_a_silent_worker_without_any_turn_is_not_probed() -> None:
    """Thousands that were announced may fall silent at once."""
    async with bench() as it:
        view = it.registry.view(it.worker.id)
        assert view is not None
        it.upstream.is_waiting = False
        it.prober.doubt(view)
        assert not it.prober._probing
        it.prober.doubt(msgspec.structs.replace(view, inflight=1))  # a SPLIT whose P still computes, say
        await asyncio.gather(*it.prober._probing.values())
        assert it.upstream.alive == [it.worker.id]
        it.upstream.is_waiting = True
        it.prober.doubt(view)
        await asyncio.gather(*it.prober._probing.values())
        assert it.upstream.alive == 2 * [it.worker.id]


class Nobody:
    """A session that reaches nobody."""

    def __init__(self) -> None:
        self.rounds = Rounds()

    def get(self, *_: object, **__: object) -> Any:
        self.rounds.note()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody")


async def test_a_large_fleet_is_not_probed_in_one_step_of_the_loop() -> None:
    async with bench() as it:
        session, count = Nobody(), 3 * BEGUN_AT_ONCE
        it.prober = Prober(
            ProxyConfig(),
            it.registry,
            cast(Upstream, it.upstream),
            lambda: 5.0,
            lambda: cast(Any, session),
            worker_tls(ProxyConfig()),
        )
        for number in range(1, count):
            it.registry.add_static(replace(it.worker, address=f"127.0.0.2:{number}"), 0.0)
        async with session.rounds.counted():
            await it.round()
        asked = session.rounds.done
        assert asked.total() == count
        assert max(asked.values()) <= BEGUN_AT_ONCE


async def test_an_engine_that_hangs_keeps_nobody_else_waiting() -> None:
    async with bench() as it:
        writers: list[asyncio.StreamWriter] = []
        hanging = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
        try:
            port = hanging.sockets[0].getsockname()[1]
            it.registry.add_static(Worker(role=Role.DECODE, address=f"127.0.0.1:{port}"), 0.0)
            running = asyncio.create_task(it.prober.run())
            async with asyncio.timeout(60):
                while not it.is_up:
                    await asyncio.sleep(0.001)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        finally:
            hanging.close()
            for writer in writers:
                writer.close()
                await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def publishes(port: int) -> str:
    return json.dumps({"0": {"publisher": "zmq", "endpoint": f"tcp://*:{port}"}})


async def test_an_engine_is_asked_once_where_it_publishes_and_anew_when_another_may_answer() -> None:
    async with bench() as it:
        for answer, incarnation, health, known in (
            (publishes(5557), "1.0", 200, 5557),
            (publishes(5558), "1.0", 200, 5557),  # the same process
            (503, "1.0", 503, 5557),
            (503, "1.0", 200, 5557),  # it does not say now
            (publishes(5559), "1.0", 200, 5559),
            (publishes(5560), "2.0", 200, 5559),  # it has another incarnation, as this very probe finds
            (publishes(5560), "2.0", 200, 5560),
            (404, "3.0", 200, 5560),
            (404, "3.0", 200, None),
        ):
            it.answers |= {EVENTS: answer, "/metrics": f"process_start_time_seconds {incarnation}\n"}
            await it.rounds(health)
            view = it.registry.view(it.worker.id)
            assert view is not None
            assert view.worker.kv_events == (NO_EVENTS if known is None else it.source(known))
        before = it.asked.count(EVENTS)
        await it.rounds(200, 200)
        assert it.asked.count(EVENTS) == before


@pytest.mark.parametrize(
    ("changes", "config", "asks"),
    [
        ({}, {}, True),
        ({"kv_events": EventSource("tcp://127.0.0.1:5557")}, {}, False),
        ({"kv_events": UNHEARD}, {}, False),
        ({}, {"kv_events_bind": "tcp://127.0.0.1:5557"}, False),  # engines are to connect
    ],
)
async def test_an_engine_is_not_asked_what_the_config_says(
    changes: dict[str, Any], config: dict[str, Any], asks: bool
) -> None:
    async with bench() as it:
        it.prober = it.prober_with(**config)
        it.registry.add_static(replace(it.worker, **changes), 0.0)
        await it.round()
        assert (EVENTS in it.asked) is asks


async def test_what_an_engine_says_does_not_outlive_what_the_config_says() -> None:
    async with bench() as it:
        it.answers[EVENTS] = publishes(5557)
        await it.round()
        it.registry.add_static(replace(it.worker, kv_events=UNHEARD), 0.0)
        await it.round()
        (view,) = it.registry.views()
        assert view.worker.kv_events == UNHEARD


async def test_a_bootstrap_server_is_asked_at_each_probe_for_its_engines_id() -> None:
    async with bench() as it:
        port = str(it.server.port)
        p = replace(it.worker, role=Role.PREFILL, connector="mooncake", coordinates={"bootstrap_port": port})
        it.registry.add_static(p, 0.0)

        async def told() -> dict[str, str]:
            await it.round()
            view = it.registry.view(p.id)
            assert view is not None and view.up
            return view.worker.coordinates

        assert await told() == {"bootstrap_port": port}, "it has no such path yet"
        it.answers["/query"] = '{"0": {"engine_id": "e0"}}'
        assert await told() == {"bootstrap_port": port, "engine_id": "e0"}
        it.answers["/query"] = '{"0": {"engine_id": "e1"}}'
        assert await told() == {"bootstrap_port": port, "engine_id": "e1"}, "it has started again"
        it.answers["/query"] = '{"0": {"engine_id": "e2"}}'
        (view,) = it.registry.views()
        it.prober.ask_again(view)
        it.prober.ask_again(view)
        await asyncio.gather(*it.prober._probing.values())
        (view,) = it.registry.views()
        assert view.worker.coordinates["engine_id"] == "e2", "between two rounds, as after a leg that failed"
        it.answers["/query"] = 503
        assert await told() == {"bootstrap_port": port, "engine_id": "e2"}, "a leg that fails by it asks again"
        await it.rounds(*[503] * MISSES)
        assert await told() == {"bootstrap_port": port}, "it may have begun anew"
        asked = [key for path, key in zip(it.asked, it.keys, strict=True) if path == "/query"]
        assert set(asked) == {""}, "no key is sent there"


async def test_a_context_server_is_asked_for_its_endpoint_and_where_its_metrics_are() -> None:
    async with bench() as it:
        p = replace(it.worker, role=Role.PREFILL, connector="trtllm_gen_first", engine="trtllm")
        it.registry.add_static(p, 0.0)
        it.answers["/server_info"] = '{"disaggregated_params": {"ctx_info_endpoint": ["tcp://h:1"], "ctx_dp_rank": 0}}'
        it.answers["/prometheus/metrics"] = "trtllm_num_requests_running 3"
        await it.round()
        view = it.registry.view(p.id)
        assert view is not None
        assert view.worker.coordinates == {"ctx_info_endpoint": "tcp://h:1", "ctx_dp_rank": "0"}
        assert view.load.running == 3
        assert "/metrics" not in it.asked, "reading it would take its statistics away"
