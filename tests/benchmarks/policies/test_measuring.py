"""One mode in one cell, in small windows of a made-up trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.policies.cells import Cell
from benchmarks.policies.measuring import Connector, MeasureJob, Method, Question, Search, computed, measure
from benchmarks.policies.traces import load
from benchmarks.policies.variants import USUAL, VARIANTS, varied
from ppd.offline.experiment.records import Record
from ppd.offline.goodput.modes import OF_PAIRS, nearest_table, proxy_setup
from ppd.offline.simulation.playback import PlayedTurn
from ppd.proxy.config import Mode
from ppd.proxy.errors import ConfigError
from ppd.proxy.laws.profile_file import Transfers
from ppd.servers.fleet.topology import Topology

pytestmark = pytest.mark.slow

LOOSE, STRICT = Question(0.025, 0.9, 2), Question(0.025, 0.98, 1)
METHOD = Method(data=Path("/nowhere"), questions=(LOOSE, STRICT), sessions=10, later_turns=10, precision=0.3)
CELL = Cell("m512-8k", "1P_1D")


@pytest.mark.slow
def test_a_search_answers_each_question_by_seed_and_finds_the_same_from_anywhere() -> None:
    plain = measure(MeasureJob(cell=CELL, mode="always_local", method=METHOD))
    near = measure(MeasureJob(cell=CELL, mode="always_local", method=METHOD, near=plain.goodput))
    assert {name: len(rates) for name, rates in plain.goodput.items()} == {LOOSE.name: 2, STRICT.name: 1}
    assert near.goodput == plain.goodput
    assert near.windows < plain.windows
    assert all(rate > 0.1 for rates in plain.goodput.values() for rate in rates)


def test_questions_share_what_is_certain() -> None:
    search = Search(CELL, "always_local", METHOD)
    assert not search.passes(LOOSE, 0, 6.0)
    assert not search.passes(STRICT, 0, 6.0)  # what 90 % of turns do not reach, 98 % do not
    assert search.windows == 1


@pytest.mark.parametrize(("mode", "windows"), [("always_local", 1), ("slo", 2)])
def test_who_decides_by_the_tpot_that_is_asked_for_is_told_it(mode: str, windows: int) -> None:
    slow = Question(0.05, 0.9, 1)
    search = Search(CELL, mode, replace(METHOD, questions=(slow, LOOSE)))
    assert search.passes(LOOSE, 0, 0.1)
    assert search.passes(slow, 0, 0.1)  # what is quick enough for 25 ms is so for 50
    assert search.windows == windows


def test_figures_at_a_rate() -> None:
    found = measure(MeasureJob(cell=CELL, mode="always_split", method=METHOD, at_rate=0.1)).at_rate
    assert found is not None
    assert (found.rate, found.seeds, found.unfinished) == (0.1, 3, 0)
    assert min(found.first_share, found.later_share) > 0.9
    # 8,000 tokens first and thrice 512 with the answer before: what D lacks is moved, and P finds its own prompt.
    assert found.moved_bytes_a_turn > 100 * 131_072
    assert found.prefill_ratio > 1.0
    assert found.ttft_first[0] is not None


def test_tokens_needed_are_those_behind_the_whole_blocks_of_the_turn_before() -> None:
    record = Record(0, 2, True, 0.0, 0.0, 0.1, 0.2, 1000, 480, 10, "LOCAL", "", "D1", 200)
    assert computed([PlayedTurn(record, 807)]) == {
        "recomputed_share": pytest.approx(320 / 800),
        "prefill_ratio": pytest.approx(520 / 200),
    }


def test_with_a_pull_the_sender_is_free_and_a_handoff_takes_as_long() -> None:
    costs = {
        connector: replace(METHOD, connector=connector).setting(CELL, "table", rate=1.0, seed=0).setup.profile
        for connector in Connector
    }
    pull, profile = costs[Connector.PULL], costs[Connector.PROFILE]
    assert (pull.transfers, pull.costs.send_s) == (Transfers.MISSING, 0.0)
    assert pull.costs.transfer_s == pytest.approx(profile.costs.transfer_s + profile.costs.send_s)


@pytest.mark.parametrize("mode", [*sorted(OF_PAIRS - {Mode.ALWAYS_LOCAL}), Mode.SESSION_HASH, Mode.FREE_KV])
def test_on_replicas_alone_all_rules_for_pairs_are_one_and_those_that_place_are_not(mode: Mode) -> None:
    windows = [Search(Cell("m512-8k", "2R"), name, METHOD).window(0, 4.0).played for name in ("replica", mode.value)]
    assert (windows[0] == windows[1]) is (mode in OF_PAIRS)


@pytest.mark.parametrize(
    ("fleet", "table"), [("1P_3D", "1P_3D"), ("2P_6D", "1P_3D"), ("8P_8D", "2P_2D"), ("7P_1D", "3P_1D")]
)
def test_the_table_is_that_of_the_fleet_most_like_this_one(fleet: str, table: str) -> None:
    assert nearest_table(Topology.parse(fleet)) == table
    assert proxy_setup("table", Topology.parse(fleet)).rules.scored is not None


def test_variants_change_what_they_name() -> None:
    usual = METHOD.setting(CELL, "table", rate=1.0, seed=0)
    for name in VARIANTS:
        assert (varied(name, usual) == usual) is (name == USUAL)
    assert varied("link-10", usual).setup.profile.costs.transfer_bytes_per_s == 10e9


@pytest.mark.parametrize("wrong", ["trace", "variant", "mode"])
def test_a_name_that_is_unknown_is_an_error_that_lists_the_known(wrong: str) -> None:
    with pytest.raises(ConfigError, match=rf"{wrong} = 'none': must be"):
        if wrong == "trace":
            load("none", Path("/nowhere"))
        elif wrong == "mode":
            proxy_setup("none", Topology.parse("4R"))
        else:
            varied("none", METHOD.setting(CELL, "table", rate=1.0, seed=0))
