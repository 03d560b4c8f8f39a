"""vLLM's own publisher, without an engine, before the subscriber: replay, a broken connection, and a new process."""

from __future__ import annotations

import os
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.network.fault_link import FaultLink
from ppd.proxy.fleet.worker import EventSource
from ppd.proxy.kv_events.event_batch import session_name
from ppd.servers.fleet.ports import free_ports
from ppd.servers.sim.core.block_pool import BlockStored, Namespace
from ppd.servers.sim.engine.kv_event_encoding import encode_batch
from ppd.servers.vllm.cpu_install import Environment
from ppd.servers.vllm.launch import Launch
from tests.support.announcements import HISTORY, D, subscribing
from tests.vllm.nursery.launches import Born, written

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEPT = 4  # batches
PROGRAM = """
import sys, time, msgspec, zmq
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

_, port, replay_port, kept = sys.argv
decoder, publisher = msgspec.msgpack.Decoder(KVEventBatch), None

def opened():
    for _ in range(100):  # the ports of one that was shut down are free a little later
        try:
            return ZmqEventPublisher(0, f"tcp://*:{port}", f"tcp://*:{replay_port}", int(kept), topic="kv@D")
        except zmq.ZMQError:
            time.sleep(0.05)

for line in sys.stdin:
    order, *batches = line.split()
    if order == "restart":
        if publisher is not None:
            publisher.shutdown()
        publisher = opened()
    for batch in batches:
        publisher.publish(decoder.decode(bytes.fromhex(batch)))
    while publisher._event_queue.qsize() or len(publisher._buffer) < min(int(kept), len(batches)):
        time.sleep(0.005)
    print("done", flush=True)
"""


class VllmPublisher:
    """A process with vLLM's publisher of KV events."""

    def __init__(self, process: Process, port: int, replay_port: int) -> None:
        self.port = port
        self.replay_endpoint = f"tcp://127.0.0.1:{replay_port}"
        self._process = process

    async def restart(self) -> None:
        """As a new engine: its batches are numbered from 0 again."""
        await self._order("restart")

    async def publish(self, *numbers: int, life: int = 0) -> None:
        """A batch for each of these blocks of one session's prompt."""
        payloads = (encode_batch((block(number, life),), time_s=number, block_size=1).hex() for number in numbers)
        await self._order(f"publish {' '.join(payloads)}")

    async def _order(self, line: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n".encode())
        while (said := await self._process.stdout.readline()) != b"done\n":
            assert said, "the publisher has ended"


def block(number: int, life: int) -> BlockStored:
    first = 1000 * life
    return BlockStored(
        first + number, first + number - 1 if number else None, (0,), Namespace("m"), session_name(HISTORY)
    )


@asynccontextmanager
async def publishing(launch: Launch, port: int, replay_port: int) -> AsyncIterator[VllmPublisher]:
    process = await create_subprocess_exec(*launch.argv, env=os.environ | launch.env, stdin=PIPE, stdout=PIPE)
    try:
        publisher = VllmPublisher(process, port, replay_port)
        await publisher.restart()
        yield publisher
    finally:
        process.kill()
        await process.communicate()


async def test_replay_a_broken_connection_and_a_new_publisher(
    environment: Environment, born: Born, tmp_path: Path
) -> None:
    port, replay_port = free_ports(2)
    launch = born(written(tmp_path, environment.python, PROGRAM, str(port), str(replay_port), str(KEPT)))
    async with (
        publishing(launch, port, replay_port) as publisher,
        FaultLink("127.0.0.1", publisher.port) as link,
        subscribing() as lab,
    ):
        await publisher.publish(0, 1, 2)
        lab.add(EventSource(f"tcp://{link.address}", publisher.replay_endpoint))
        await lab.until_held(3)  # published before anyone listened
        await publisher.publish(3)
        await lab.until_held(4)
        link.reset()
        await publisher.publish(4, 5)  # to nobody, if the subscriber is not back yet
        await lab.until_held(6)
        assert lab.value("ppd_kv_event_gaps_total", result="closed") >= 1
        assert lab.value("ppd_kv_event_gaps_total", result="open") == 0

        await publisher.restart()
        await publisher.publish(0, life=1)
        await lab.until_held(1)
        await publisher.publish(1, 2, life=1)
        await lab.until_held(3)
        assert lab.value("ppd_kv_event_gaps_total", result="open") == 0

        # It keeps four batches, so the prompt's beginning can't be had any more.
        await publisher.publish(3, 4, 5, life=1)
        lab.registry.remove(D.id)
        await lab.until_held(None)
        orphans = lab.value("ppd_kv_events_total", kind="unknown_parent", role="D")
        lab.add(EventSource(f"tcp://{link.address}", publisher.replay_endpoint))
        await lab.until(lambda: lab.value("ppd_kv_events_total", kind="unknown_parent", role="D") >= orphans + KEPT)
        assert lab.held() is None
        await publisher.publish(0, 1, life=1)
        await lab.until_held(2)
