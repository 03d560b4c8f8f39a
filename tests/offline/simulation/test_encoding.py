"""Fleets with encoders in virtual time: who encodes, and who waits for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from msgspec import structs

from ppd.offline.experiment.plan import plan
from ppd.offline.experiment.records import Record
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.simulation.clients import ClientPool, Clients
from ppd.offline.simulation.routing import PolicyRouting, ProxySetup
from ppd.offline.simulation.sessions import planned_sessions
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.simulate import simulate
from ppd.offline.simulation.timeline import Timeline
from ppd.offline.simulation.workers.encoder import SimulatedEncoder
from ppd.offline.simulation.workers.fleet import SimulatedFleet
from ppd.proxy.config import EncoderUse, Mode
from ppd.proxy.encoders.choosing import EncoderRules
from ppd.proxy.errors import ConfigError
from ppd.proxy.policy import Rules
from ppd.servers.fleet.topology import Topology
from tests.support.stepped_engine import profile_of

SETUP = Setup(profile=profile_of(), encoder_item_s=0.15)
TENTH = Workload(
    first=Profile(name="first", new_tokens=512, output_tokens=64),
    later=Profile(name="later", new_tokens=64, output_tokens=32),
    image_every=10,
)


def run_of(topology: str, workload: Workload = TENTH, seconds: float = 60.0) -> Run:
    x = 0.5 if Topology.parse(topology).has_choice else None
    return Run(topology=topology, workload=workload, qps=8.0, x=x, seconds=seconds)


def played(topology: str, workload: Workload, rules: EncoderRules) -> tuple[SimulatedFleet, list[Record]]:
    """As `simulate` does it, with the fleet as it is afterwards."""
    run, timeline = run_of(topology, workload, seconds=10.0), Timeline()
    fleet = SimulatedFleet(timeline, Topology.parse(topology), SETUP)
    routing = PolicyRouting(timeline, fleet, ProxySetup(encoder=rules), SETUP)
    clients = Clients(timeline, fleet, routing, ClientPool(timeline, None))
    clients.play(planned_sessions(plan(run), count(1), is_retokenised=lambda: False, forced=True))
    timeline.run(until=lambda: clients.open_sessions == 0)
    return fleet, clients.records


@pytest.mark.slow
@pytest.mark.parametrize("fleet", ["2R", "1P_2D", "1P_1D_1R"])
def test_with_an_encoder_streams_of_text_no_longer_stand_still_for_images(fleet: str) -> None:
    without, with_one = simulate(run_of(fleet), SETUP), simulate(run_of(f"1E_{fleet}"), SETUP)
    assert [one.images for one in without] == [one.images for one in with_one]
    assert sum(one.images for one in without) == len(without) // 10
    assert p99_tpot_of_text(with_one) < 0.7 * p99_tpot_of_text(without)
    assert median_ttft(with_one) <= 1.05 * median_ttft(without)


THIRD, EVERY = structs.replace(TENTH, image_every=3), structs.replace(TENTH, turns=1, image_every=1)


@pytest.mark.slow
@pytest.mark.parametrize("workload", [TENTH, THIRD, EVERY], ids=["tenth", "third", "every"])
@pytest.mark.parametrize("slowness", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("fleet", ["2R", "1P_2D"])
def test_where_times_are_predicted_no_median_first_token_comes_later_with_an_encoder(
    fleet: str, slowness: float, workload: Workload
) -> None:
    """By seconds: an E may be slower or quicker than the others."""
    setup, proxy = replace(SETUP, encoder_slowness=slowness), ProxySetup(rules=Rules(mode=Mode.SLO))
    without, with_one = (
        simulate(structs.replace(run_of(topology, workload), qps=4.0), setup, proxy=proxy)
        for topology in (fleet, f"1E_{fleet}")
    )
    assert median_ttft(with_one) <= 1.05 * median_ttft(without)


@pytest.mark.slow
def test_where_times_are_predicted_a_quick_encoder_gets_more_than_one_that_takes_as_long() -> None:
    """By requests both would get as many images."""
    proxy, run = ProxySetup(rules=Rules(mode=Mode.SLO)), structs.replace(run_of("1E_2R", THIRD), qps=6.0)
    quick, equal = (simulate(run, replace(SETUP, encoder_slowness=slowness), proxy=proxy) for slowness in (0.5, 1.0))
    with_images = [tuple(one for one in records if one.images) for records in (quick, equal)]
    assert median_ttft(with_images[0]) < 0.8 * median_ttft(with_images[1])


def p99_tpot_of_text(records: tuple[Record, ...]) -> float:
    return float(np.quantile([one.tpot_s for one in records if not one.images and one.tpot_s], 0.99))


def median_ttft(records: tuple[Record, ...]) -> float:
    return float(np.median([one.ttft_s for one in records if one.ttft_s]))


@pytest.mark.slow
def test_without_images_an_encoder_changes_nothing() -> None:
    text = Workload(first=TENTH.first, later=TENTH.later)
    alone, beside = simulate(run_of("2R", text), SETUP), simulate(run_of("1E_2R", text), SETUP)
    assert alone == beside


@pytest.mark.parametrize("fleet", ["1E_1P_1D", "2E_2R"])
@pytest.mark.parametrize(("use", "share"), [(EncoderUse.ALWAYS, 1.0), (EncoderUse.NEVER, 0.0)])
def test_the_proxys_rules_say_who_encodes(fleet: str, use: EncoderUse, share: float) -> None:
    found, records = played(fleet, TENTH, EncoderRules(use))
    images = sum(one.images for one in records)
    assert images > 3
    assert sum(one.encoded for one in found.encoders) == images * share
    assert all(one.running == 0 for one in found.encoders)


def test_images_of_earlier_turns_are_not_encoded_again() -> None:
    """Their tokens are in the KV cache of the worker that goes on."""
    once = Workload(first=TENTH.first, later=TENTH.later, turns=5, image_every=5)
    found, records = played("1E_1R", once, EncoderRules())
    images = [one.images for one in records]
    assert sum(images) == len(images) // 5
    assert found.encoders[0].encoded <= sum(images)


def test_an_encoder_takes_one_request_after_the_other_and_encodes_what_is_new() -> None:
    timeline, done = Timeline(), dict[str, float]()
    encoder = SimulatedEncoder(timeline, "E1", 0.5)
    for name, items in (("first", ["a", "b"]), ("second", ["b", "c"]), ("third", ["a"])):
        encoder.encode(items, lambda name=name: done.update({name: timeline.now_s}))  # type: ignore[misc]
    assert encoder.running == 3
    timeline.run(until=lambda: False)
    assert (done, encoder.running, encoder.encoded) == ({"first": 1.0, "second": 1.5, "third": 1.5}, 0, 3)


def test_a_cost_below_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="encoder_item_s = -1"):
        replace(SETUP, encoder_item_s=-1)
