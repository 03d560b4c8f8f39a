"""The simulator in virtual time against the simulated engine over HTTP: one timing law, one policy, one workload."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest

from ppd.offline.experiment.records import Record
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.load.measure import measure
from ppd.offline.load.target import Target
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.simulate import simulate
from ppd.proxy.laws.step_time import EngineProfile
from ppd.servers.fleet.topology import Topology
from tests.support.proxy import ADMIN_KEY
from tests.support.stepped_engine import profile_of

# Four times as slow as the engine that it resembles: what sockets and two cores add is small beside it.
SLOW = EngineProfile(
    step_s=32e-3,
    decode_sequence_s=0.5e-3,
    context_token_s=100e-9,
    prefill_token_s=200e-6,
    request_s=80e-3,
    request_token_s=60e-6,
    transfer_s=60e-3,
    transfer_bytes_per_s=1e9,
)
PROFILE = profile_of(costs=SLOW, kv_capacity_tokens=16_384 * 16)
WORKLOAD = Workload(
    first=Profile(name="first", new_tokens=300, output_tokens=12),
    later=Profile(name="later", new_tokens=120, output_tokens=16),
    turns=3,
)
TOLERANCE = 0.2  # on two cores, what a SPLIT's requests add is a tenth of a first token; the rest is chance


def usual_times(records: tuple[Record, ...], later: bool) -> tuple[float, float]:
    """TTFT and TPOT, in s, that first or later turns have as a rule."""
    chosen = [record for record in records if (record.turn > 1) == later]
    assert not any(record.error for record in chosen), [record.error for record in chosen if record.error]
    ttfts = [record.ttft_s for record in chosen if record.ttft_s is not None]
    tpots = [record.tpot_s for record in chosen if record.tpot_s is not None]
    return midmean(ttfts), midmean(tpots)


def midmean(values: list[float]) -> float:
    """The mean of the middle half. A hiccup of the machine is not the engines' doing, so the rest does not count.

    A median would jump by a whole step of the engine where a request comes just too late for one.
    """
    ordered, quarter = sorted(values), len(values) // 4
    return fmean(ordered[quarter : len(ordered) - quarter])


@pytest.mark.alone
@pytest.mark.parametrize(("topology", "x"), [("1P_1D", 0.0), ("1P_1D", 1.0), ("2P_2D", 0.5), ("1R", None)])
async def test_ttft_and_tpot_agree(start_fleet: Callable[..., Any], topology: str, x: float | None) -> None:
    run = Run(topology=topology, x=x, workload=WORKLOAD, qps=1.5, seconds=8.0, conversations=12)
    simulated = simulate(run, Setup(profile=PROFILE))
    roles = Topology.parse(topology)
    names = " ".join(
        f"{role}{number + 1}"
        for role, count in (("P", roles.prefills), ("D", roles.decodes), ("R", roles.replicas))
        for number in range(count)
    )
    async with start_fleet(names, engine={"profile": SLOW, "time_scale": 1.0}) as fleet:
        target = Target(url=fleet.base_url, model="sim", admin_key=ADMIN_KEY, forces_routes=True)
        measured = await measure(run, target)
    assert [(one.conversation, one.turn, one.route) for one in measured] == [
        (one.conversation, one.turn, one.route) for one in simulated
    ]
    assert [one.prompt_tokens for one in measured] == [one.prompt_tokens for one in simulated]
    for later in (False, True):
        assert usual_times(measured, later) == pytest.approx(usual_times(simulated, later), rel=TOLERANCE)
