"""What the log says of workers that come and go."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math

import pytest

from ppd.proxy.app.lifespan import FleetWatch, LawsWatch
from ppd.proxy.assembly import assemble
from ppd.proxy.config import Mode, ProxyConfig
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Announcement, Role, Source, Worker, WorkerId
from ppd.proxy.laws.accuracy import TURNS
from ppd.proxy.laws.corrections import Figure
from ppd.proxy.laws.worker_laws import TableTime, TurnTimes
from ppd.proxy.peers.channels import Member
from ppd.proxy.readback.handles import Handle
from ppd.proxy.settings import Settings
from tests.support.clock import LeapingTime, scenario


async def test_a_worker_that_goes_down_or_away_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = [100.0]
    proxy = assemble(Settings(ProxyConfig(mode=Mode.REPLICA, heartbeat_port=0)), now=lambda: clock[0])
    registry, watch = proxy.state.registry, FleetWatch(proxy)

    def told() -> str:
        caplog.clear()
        watch._drop_silent()
        watch._note_changes()
        return "; ".join(record.getMessage() for record in caplog.records)

    static = Worker(role=Role.REPLICA, address="a:1")
    registry.add_static(static, clock[0])
    registry.probed(static.id, static, None, clock[0])
    registry.apply(Announcement(Worker(role=Role.DECODE, address="b:1", source=Source.PING)), clock[0])
    assert sorted(told().split("; ")) == ["worker D1 b:1: up", "worker R1 a:1: up"]
    proxy.prober.failing[static.id] = "/health answered 503"
    registry.probe_failed(static.id)
    assert told() == "worker R1 a:1: down (/health answered 503)"
    clock[0] += 31.0
    assert told() == "worker D1 b:1: gone (silent for 30 s)"
    registry.remove(static.id)
    assert told() == "worker R1 a:1: gone"
    untold = Worker(role=Role.PREFILL, address="c:1", connector="p2p_nccl", source=Source.PING)
    registry.apply(Announcement(untold), clock[0])
    assert told().endswith("worker P1 c:1: takes no part in a SPLIT, as it does not tell its zmq_address")
    for task in tuple(proxy.prober._probing.values()):
        task.cancel()
    await asyncio.gather(*proxy.prober._probing.values(), return_exceptions=True)
    proxy.listener.close()
    await proxy.upstream.close()
    await proxy.prober.close()


@scenario
async def test_no_worker_is_silent_while_the_proxy_stands_still() -> None:
    now = LeapingTime.of(asyncio.get_running_loop())
    config = ProxyConfig(mode=Mode.REPLICA, heartbeat_port=0, worker_ttl_s=30.0)
    proxy = assemble(Settings(config), now=now)
    registry = proxy.state.registry
    for host in ("a", "b"):
        registry.apply(Announcement(Worker(role=Role.DECODE, address=f"{host}:1", source=Source.PING)), now())
    watching = asyncio.create_task(FleetWatch(proxy).run())
    await asyncio.sleep(5.0)
    now.leap(40.0)
    await asyncio.sleep(2.0)
    assert len(registry) == 2
    registry.apply(Announcement(Worker(role=Role.DECODE, address="a:1", source=Source.PING)), now())
    await asyncio.sleep(30.0)
    assert [view.id for view in registry.views()] == ["a:1"], "by now the other one is silent"
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    proxy.listener.close()
    await proxy.upstream.close()


async def test_an_encoder_that_encodes_for_nobody_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = [100.0]
    proxy = assemble(Settings(ProxyConfig(mode=Mode.REPLICA, heartbeat_port=0)), now=lambda: clock[0])
    registry, watch = proxy.state.registry, FleetWatch(proxy)

    def join(role: Role, address: str, engine: str) -> list[str]:
        """The warnings of the next two looks."""
        registry.apply(Announcement(Worker(role=role, address=address, engine=engine, source=Source.PING)), clock[0])
        caplog.clear()
        watch._note_changes()
        watch._note_changes()
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    said = "worker E1 e:1: is never asked, as the engines of P, D and R take no embeddings of an E"
    assert join(Role.ENCODE, "e:1", "vllm") == [], "others may come"
    assert join(Role.REPLICA, "r:1", "sglang") == [said]
    assert join(Role.REPLICA, "r:2", "vllm") == []
    registry.remove(WorkerId("r:2"))
    assert join(Role.REPLICA, "r:3", "trtllm") == [said], "again, as it had been asked in between"
    proxy.listener.close()
    await proxy.upstream.close()
    await proxy.prober.close()


async def test_a_new_engine_has_its_own_failures_and_no_others() -> None:
    """The watch looks once a second: by then the new engine may have failed."""
    clock = [100.0]
    proxy = assemble(Settings(ProxyConfig(mode=Mode.REPLICA, heartbeat_port=0)), now=lambda: clock[0])
    registry, breakers, watch = proxy.state.registry, proxy.state.health.breakers, FleetWatch(proxy)

    def fail() -> None:
        clock[0] += 0.1
        breakers.failed(worker.id, clock[0], began_s=clock[0], at_once=True)

    def join(incarnation: str) -> None:
        registry.apply(Announcement(dataclasses.replace(worker, incarnation=incarnation)), clock[0])

    worker = Worker(role=Role.REPLICA, address="b:1", source=Source.PING)
    join("first")
    fail()
    watch._note_changes()
    assert breakers.blocked(clock[0]) == {worker.id}
    clock[0] += 0.1
    join("second")
    watch._note_changes()
    assert not breakers.blocked(clock[0])
    join("third")
    fail()
    watch._note_changes()
    assert breakers.blocked(clock[0]) == {worker.id}
    registry.remove(worker.id)
    watch._note_changes()
    assert not breakers.blocked(clock[0])
    proxy.listener.close()
    await proxy.upstream.close()
    await proxy.prober.close()


@pytest.mark.parametrize("index", [0, 1])
async def test_each_process_forgets_which_pairs_moved_kv_and_what_d_kept_with_their_workers(index: int) -> None:
    """Or names of workers that never come back would pile up in those that do not watch them."""
    proxy = assemble(Settings(ProxyConfig(heartbeat_port=0)), now=lambda: 1.0, member=Member(index=index))
    registry, health, watch = proxy.state.registry, proxy.state.health, FleetWatch(proxy)
    decode = Worker(role=Role.DECODE, address="d:1", source=Source.PING)
    pair = WorkerId("p:1"), decode.id
    registry.adopt(WorkerView(worker=decode, name="D1", incarnation="i"))
    watch._note_changes()
    health.succeeded(pair)
    assert health.moved_s(pair) == 1.0
    handles = proxy.state.handles
    handles.keep(7, Handle(b"{}", 50, b"", "m", decode.id, "i", until_s=math.inf))
    registry.dismiss(decode.id)
    watch._note_changes()
    assert health.moved_s(pair) < 0.0
    assert not handles.kept
    proxy.listener.close()
    await proxy.upstream.close()
    await proxy.prober.close()


@pytest.mark.parametrize(
    ("index", "levels"), [(0, (logging.WARNING, logging.INFO)), (1, (logging.DEBUG, logging.DEBUG))]
)
async def test_a_table_that_is_stale_is_told_once(
    caplog: pytest.LogCaptureFixture, index: int, levels: tuple[int, int]
) -> None:
    caplog.set_level(logging.DEBUG)
    proxy = assemble(Settings(ProxyConfig(heartbeat_port=0)), now=lambda: 0.0, member=Member(index=index))
    watch = LawsWatch(proxy)

    def told(measured_s: float) -> list[tuple[int, str]]:
        caplog.clear()
        for _ in range(TURNS):
            proxy.state.laws.learn(TurnTimes(0, by_table=[TableTime("t", Figure.TTFT, 0.1, measured_s)]), 0.0)
            watch.look()
        return [(record.levelno, record.getMessage()) for record in caplog.records]

    seen = [told(measured_s) for measured_s in (0.11, 0.2, 0.11)]
    proxy.listener.close()
    await proxy.upstream.close()
    await proxy.prober.close()
    stale = "table t is stale: the median error of its TTFT is 55 % over the last 200 turns"
    assert seen == [[], [(levels[0], stale)], [(levels[1], "table t: its TTFT fits again")]]
