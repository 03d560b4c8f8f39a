from __future__ import annotations

from typing import Any

from ppd.servers.sim.core.block_pool import Namespace
from ppd.servers.sim.core.handoffs import RemotePrefill, Transfer
from ppd.servers.sim.core.sequence import Sampling, Sequence
from ppd.servers.sim.engine.pulls import Pulls

NOBODY: Any = None  # any call of a peer would fail


async def test_a_sequence_that_is_aborted_before_its_pull_begins_goes_to_no_meeting(lab: Any, clock: Any) -> None:
    d = await lab.start("D", connector="sglang")
    transfer = Transfer(key="7", remote=RemotePrefill("", "7", "127.0.0.1", 1, None))
    sequence = Sequence("s", (1, 2, 3), Sampling(max_tokens=1), Namespace("sim"), transfer=transfer)
    d.scheduler.add(sequence)
    (pull,) = d.scheduler.plan().pulls
    d.scheduler.abort(sequence)
    assert d.pool.used == 1
    await Pulls(d, NOBODY, clock).run(pull)
    assert (d.pool.used, d.scheduler.pulling) == (0, 0)
