"""A log that a simulated fleet wrote, decided again by the rules that it was decided by."""

from __future__ import annotations

import pytest

from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.goodput.modes import proxy_setup
from ppd.offline.replay.replay import replay
from ppd.offline.simulation.believed import laws_of
from ppd.offline.simulation.setup import Setup
from ppd.proxy.config import Mode
from ppd.servers.fleet.topology import Topology
from tests.support.decisions import rules
from tests.support.stepped_engine import profile_of

from .receipts import log_of
from .recorded import recorded

CAPACITY = 100_000  # tokens
CHATS = Workload(
    first=Profile(name="first", new_tokens=3000, output_tokens=60),
    later=Profile(name="later", new_tokens=300, output_tokens=60),
    turns=5,
    think_s=5.0,
)
PREDICTING = (Mode.SLO, Mode.WEIGHTS, Mode.LEAST_TTFT, Mode.LMETRIC, Mode.SLACK)


@pytest.mark.parametrize("topology", ["1P_3D", "2P_2D", "4R"])
@pytest.mark.parametrize("mode", [Mode.SESSION_HASH, *PREDICTING])
def test_turns_are_decided_as_they_were(mode: Mode, topology: str) -> None:
    """But for those near a tie: receipts tell times to the millisecond, and nothing of what engines reported."""
    fleet = Topology.parse(topology)
    setup = Setup(profile=profile_of(kv_capacity_tokens=CAPACITY), heartbeat_s=0.1)
    run = Run(topology=topology, workload=CHATS, qps=1.5, x=0.0 if fleet.decodes else None, seed=3, seconds=60.0)
    turns, laws = log_of(*recorded(run, setup, proxy_setup(mode, fleet), corrects=False)).turns, laws_of(setup)
    compared = replay(turns, rules(mode, laws=laws), laws, capacity_tokens=CAPACITY)
    assert compared.count == len(turns) > 300
    assert compared.changes.total() <= 0.022 * compared.count
