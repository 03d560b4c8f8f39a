"""The simulated engine's KV events are, byte for byte, what vLLM's own classes make of the same events."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ppd.servers.sim.core.block_pool import AllBlocksCleared, BlockRemoved, BlockStored, Namespace
from ppd.servers.sim.engine.kv_event_encoding import encode_batch
from ppd.servers.vllm.cpu_install import Environment
from tests.vllm.nursery.launches import Born, written

AGAIN = """
import sys, msgspec
from vllm.distributed.kv_events import KVEventBatch
batch = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=KVEventBatch)
print([type(event).__name__ for event in batch.events], msgspec.msgpack.encode(batch).hex())
"""
HERE, SALTED = Namespace("m"), Namespace("m", lora="l", cache_salt="s")


def test_vllm_reads_and_writes_the_same_bytes(environment: Environment, born: Born, tmp_path: Path) -> None:
    events = (
        BlockStored(2**64 - 1, None, (1, 2**31), SALTED, "s-1"),
        BlockStored(8, 2**64 - 1, (3, 4), SALTED, "s-1"),
        BlockStored(9, 8, (5, 6), HERE),
        BlockRemoved(5),
        AllBlocksCleared(),
    )
    payload = encode_batch(events, time_s=2.5, block_size=2)
    launch = born(written(tmp_path, environment.python, AGAIN, payload.hex()))
    env = os.environ | launch.env
    ran = subprocess.run(launch.argv, env=env, capture_output=True, text=True, timeout=300, check=True)
    kinds = ["BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared"]
    assert ran.stdout.splitlines()[-1] == f"{kinds} {payload.hex()}"
