"""The prototype's rule: one hash of a conversation is its slot, and its P."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ppd.offline.experiment.records import Record
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.simulate import simulate
from tests.support.stepped_engine import profile_of

pytestmark = pytest.mark.slow

SETUP = Setup(profile=profile_of(), published_routing=True)
SHORT = Workload(
    first=Profile(name="first", new_tokens=128, output_tokens=4),
    later=Profile(name="later", new_tokens=16, output_tokens=4),
)


def played(topology: str, x: float | None, setup: Setup = SETUP, conversations: int = 300) -> tuple[Record, ...]:
    run = Run(topology=topology, x=x, workload=SHORT, qps=20.0, conversations=conversations)
    return simulate(run, setup)


def first_turns(records: tuple[Record, ...]) -> list[Record]:
    return [record for record in records if record.turn == 1]


@pytest.mark.parametrize(
    ("topology", "pairs"),
    [
        ("2P_2D", {("P1", "D1"), ("P2", "D2")}),
        ("1R_2P_1D", {("", "R1"), ("P2", "D1")}),  # odd hashes only
        ("2R_1P_1D", {("", "R1"), ("", "R2"), ("P1", "D1")}),
        ("4R", {("", "R1"), ("", "R2"), ("", "R3"), ("", "R4")}),
    ],
)
def test_one_hash_picks_the_slot_and_the_p(topology: str, pairs: set[tuple[str, str]]) -> None:
    records = played(topology, None if topology == "4R" else 0.0)
    assert {(one.prefill, one.decode) for one in first_turns(records)} == pairs


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "share"), [("1R_2P_1D", 1 / 2), ("1R_1P_2D", 1 / 3), ("2R_1P_1D", 2 / 3)])
def test_each_r_and_each_d_is_a_slot(topology: str, share: float) -> None:
    first = first_turns(played(topology, 1.0, conversations=1000))
    assert sum(one.decode.startswith("R") for one in first) / len(first) == pytest.approx(share, abs=0.04)


def test_a_known_conversation_keeps_its_workers() -> None:
    records = played("1R_1P_2D", 1.0)
    homes = {one.conversation: one.decode for one in first_turns(records)}
    later = [one for one in records if one.turn == 2]
    assert all(homes[one.conversation] == one.decode for one in later)
    assert {one.route for one in later} == {"LOCAL", "REPLICA"}


def test_each_d_keeps_or_passes_on_its_later_turns_by_its_own_x() -> None:
    records = played("1P_1D_2pD", None)
    ways = {(one.decode, one.route) for one in records if one.turn == 2}
    assert ways == {("D1", "SPLIT"), ("D2", "LOCAL"), ("D3", "LOCAL")}


def test_a_conversation_that_is_not_known_again_gets_workers_anew() -> None:
    unknown = replace(SETUP, unrecognised=1.0)
    records = played("2R", None, unknown)
    homes = {one.conversation: one.decode for one in first_turns(records)}
    moved = [one for one in records if one.turn == 2 and homes[one.conversation] != one.decode]
    assert len(moved) / len(homes) == pytest.approx(1 / 2, abs=0.1)
    assert all(one.cached_tokens == 0 for one in moved)  # the whole prompt again
    later = [one for one in played("1P_2D", 1.0, unknown) if one.turn == 2]
    assert Counter(one.route for one in later) == {"SPLIT": 300}


def test_some_later_turns_are_not_known() -> None:
    records = played("2P_2D", 1.0, replace(SETUP, unrecognised=0.3))
    lost = Counter(record.route for record in records if record.turn > 1)
    assert lost["SPLIT"] / lost.total() == pytest.approx(0.3, abs=0.1)
