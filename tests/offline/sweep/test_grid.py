from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ppd.offline.experiment.run import Run
from ppd.offline.sweep import grid_file
from ppd.offline.sweep.grid import Grid
from ppd.proxy.errors import ConfigError

GOOD = """
qps = [1, 4]
[topologies]
2P_2D = [0, "1/3", 1]
4R = []
[first]
small = { new_tokens = 128, output_tokens = 128 }
[later]
tiny = { new_tokens = 16, output_tokens = 32 }
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "g.toml"
    path.write_text(text)
    return str(path)


def names(grid: Grid) -> list[str]:
    return [run.id for run in grid.runs(0)]


def test_a_grid_is_every_combination_of_its_axes_with_a_cells_arms_side_by_side(tmp_path: Path) -> None:
    grid = grid_file.read(written(tmp_path, GOOD))
    assert names(grid) == [
        "2P_2D-x0/small_tiny/q1-s0",
        "2P_2D-x0.333/small_tiny/q1-s0",
        "2P_2D-x1/small_tiny/q1-s0",
        "2P_2D-x0/small_tiny/q4-s0",
        "2P_2D-x0.333/small_tiny/q4-s0",
        "2P_2D-x1/small_tiny/q4-s0",
        "4R/small_tiny/q1-s0",
        "4R/small_tiny/q4-s0",
    ]
    assert grid.arms[0].x[1] == 1 / 3


def test_every_setting_reaches_the_runs(tmp_path: Path) -> None:
    settings = (
        "seconds = 5\nconversations = 7\nwarm_up_s = 2\nturns = [3]\nthink_s = [1.5]\nshared_prefix_tokens = [64]\n"
        "image_every = [10]"
    )
    run = next(grid_file.read(written(tmp_path, settings + GOOD)).runs(9))
    assert (run.seconds, run.conversations, run.warm_up_s, run.seed) == (5.0, 7, 2.0, 9)
    assert (run.workload.turns, run.workload.think_s, run.workload.shared_prefix_tokens) == (3, 1.5, 64)
    assert run.workload.image_every == 10


def test_a_trace_is_found_beside_the_grid(tmp_path: Path) -> None:
    grid = grid_file.read(written(tmp_path, 'arrivals = "azure.csv"' + GOOD))
    assert next(grid.runs(0)).arrivals == str(tmp_path / "azure.csv")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("qpz = [1]" + GOOD, "qpz: no such key; known keys are topologies, first, later, qps"),
        (GOOD.replace("[1, 4]", "[1, '4']"), "qps[1]: expected `float`, got `str`"),
        (GOOD.replace("[1, 4]", "[]"), "qps: must have at least one value"),
        (GOOD.replace("[1, 4]", "[0]"), "qps[0]: expected `float` > 0.0"),
        (GOOD.replace("[1, 4]", "[inf]"), "qps: must be finite"),
        (GOOD.replace("[1, 4]", "[nan]"), "qps[0]: expected `float` > 0.0"),
        (GOOD.replace("[1, 4]", "[1, 1.0]"), "qps[1] = 1: must be named once"),
        (GOOD.replace("[1, 4]", "[1, 1.0000001]"), "two cells have the name 2P_2D-x0/small_tiny/q1"),
        (GOOD.replace("qps = [1, 4]", ""), "qps: is missing"),
        (GOOD.replace("2P_2D", "2X_2D"), "topologies: topology = '2X_2D': must be counts of P, D, pD, R and E"),
        (GOOD.replace("2P_2D", "2P_2R"), "P only beside D"),
        (
            GOOD.replace("4R = []", "4R = [0]"),
            "topologies.4R = [0.0]: must be []: a fleet without D, or with pD, has no x",
        ),
        (GOOD.replace('[0, "1/3", 1]', "[]"), "topologies.2P_2D = []: must be a list of shares"),
        (GOOD.replace("1/3", "a third"), "topologies.2P_2D = 'a third': must be a share from 0 to 1, or a fraction"),
        (GOOD.replace("1/3", "1/0"), "topologies.2P_2D = '1/0': must be a share"),
        (GOOD.replace("1/3", "3/2"), "topologies.2P_2D[1]: expected `float` <= 1.0"),
        (GOOD.replace('"1/3"', "nan"), "topologies.2P_2D: must be finite, got nan"),
        (GOOD.replace("new_tokens = 16", "new = 16"), "later.tiny: object contains unknown field `new`"),
        (GOOD.replace("new_tokens = 16", "new_tokens = 0"), "later.tiny.new_tokens: expected `int` >= 1"),
        (GOOD.replace("tiny =", '"../tiny" ='), "later.../tiny: expected `str` matching regex"),
        (
            GOOD.replace("[later]", "[later]\nsame = { new_tokens = 16, output_tokens = 32 }"),
            "later.tiny: has the tokens of later.same, and a table has one place for both",
        ),
        ("seeds = 3\nmax_seeds = 2" + GOOD, "max_seeds = 2: must be at least seeds, 3"),
        ("seeds = 2.5" + GOOD, "seeds: expected `int`, got `float`"),
        ("precision = 2" + GOOD, "precision: expected `float` <= 1.0"),
        ("shared_prefix_tokens = [0, 128]" + GOOD, "shared_prefix_tokens = 128: must be below the 128 new tokens"),
        ("turns = [0]" + GOOD, "turns[0]: expected `int` >= 1"),
        ("qps = ", "must be TOML"),
        ("first = 3", "topologies: is missing"),
        (
            GOOD.replace("[later]\ntiny = { new_tokens = 16, output_tokens = 32 }", "[later]"),
            "later: must have at least",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line_with_the_file_and_the_key(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        grid_file.read(path)
    assert caught.value.message.startswith(f"{path}: ")
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_an_unknown_name_lists_the_grids_that_ship(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"grid = 'nosuch': must be long, paper, quick, turns, or a readable TOML"):
        grid_file.read("nosuch")


def test_the_papers_grid_has_its_3060_runs() -> None:
    runs = list(grid_file.read("paper").runs(0))
    arms = {(run.topology, run.x) for run in runs}
    assert (len(runs), len(arms)) == (3060, 17)
    assert {topology for topology, x in arms if x is not None} == {
        *("1P_3D", "2P_2D", "3P_1D", "1R_1P_2D", "1R_2P_1D", "2R_1P_1D")
    }
    assert {topology for topology, x in arms if x is None} == {
        *("4R", "1P_2D_1pD", "1P_1D_2pD", "2P_1D_1pD", "1R_1P_1D_1pD")
    }
    assert {run.qps for run in runs} == {0.5, 1, 2, 4, 6, 8, 10, 12, 16, 20}


@pytest.mark.parametrize("name", list(grid_file.bundled()))
def test_a_grid_that_ships_can_be_used_and_fits_in_the_models_context(name: str) -> None:
    runs = list(grid_file.read(name).runs(0))
    assert max(run.workload.longest_context for run in runs) <= 131_072
    assert all(isinstance(run, Run) for run in runs)


@pytest.mark.parametrize("name", list(grid_file.bundled()))
def test_every_topology_with_a_choice_has_both_arms_of_a_decision(name: str) -> None:
    for arms in grid_file.read(name).arms:
        assert not arms.x or {0.0, 1.0} <= set(arms.x)


def test_the_first_difference_is_told_with_both_values() -> None:
    quick, paper = grid_file.read("quick"), grid_file.read("paper")
    assert "topologies: " in quick.difference(paper)
    assert quick.difference(quick) == ""
    assert quick.difference(msgspec.structs.replace(quick, qps=(1.0,))) == "qps: [1.0,4.0,8.0] there, [1.0] asked for"
    assert quick.difference(msgspec.structs.replace(quick, seeds=9, max_seeds=9, precision=0.5)) == ""
