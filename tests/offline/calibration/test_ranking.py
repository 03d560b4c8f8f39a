"""Ranking: shares of points won, and the order of pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ppd.offline.calibration.observations import Observation
from ppd.offline.calibration.ranking import disagreements, markdown, rank
from ppd.offline.experiment.run import Profile, Run, Workload

SHORT = Workload(
    first=Profile(name="f", new_tokens=8, output_tokens=8), later=Profile(name="l", new_tokens=8, output_tokens=8)
)


def grid(points: Sequence[dict[str, tuple[float, float]]]) -> list[Observation]:
    """points: (TTFT, TPOT) by configuration."""
    return [
        Observation(config, "f", float(qps), 9, 0.1, ttft, tpot, (Run(topology="1R", workload=SHORT, qps=1.0),))
        for qps, point in enumerate(points, start=1)
        for config, (ttft, tpot) in point.items()
    ]


def runs(*grids: list[Observation]) -> list[NDArray[np.float64]]:
    return [np.array([one.means for one in cell]) for cell in zip(*grids, strict=True)]


MEASURED = grid([{"4R": (1.0, 3.0), "1P_3D": (2.0, 2.0)}, {"4R": (1.0, 1.02), "1P_3D": (2.0, 1.0)}])
SWAPPED = grid([{"4R": (2.0, 2.0), "1P_3D": (1.0, 3.0)}, {"4R": (1.0, 1.02), "1P_3D": (2.0, 1.0)}])


def test_a_simulation_of_itself_is_right() -> None:
    for ranking in rank(MEASURED, runs(MEASURED)):
        assert (ranking.points, ranking.farthest, ranking.right) == (2, 0.0, 1.0)
    assert disagreements(MEASURED, runs(MEASURED)) == (1.0, 1.0)


def test_shares_are_means_over_simulated_grids_and_pairs_those_of_their_mean() -> None:
    ttft, tpot = rank(MEASURED, runs(MEASURED, SWAPPED, SWAPPED))
    assert ttft.measured == {"4R": 1.0}
    assert ttft.simulated == pytest.approx({"4R": 2 / 3, "1P_3D": 1 / 3})
    assert ttft.farthest == pytest.approx(1 / 3)
    assert (ttft.pairs, ttft.right) == (2, 0.5)
    assert (tpot.pairs, tpot.right) == (1, 0.0)  # of 2 %, the other pair is too close to count
    assert ttft.check().pairs_right == 0.5


def test_chance_is_what_a_simulation_does_not_repeat() -> None:
    assert rank(MEASURED, runs(MEASURED, MEASURED))[0].repeatable == 1.0
    assert rank(MEASURED, runs(MEASURED, SWAPPED))[0].repeatable == 0.5


def test_a_configuration_that_failed_at_a_point_does_not_compete_there() -> None:
    cells = grid([{"4R": (1.0, 1.0), "1P_3D": (2.0, 2.0)}, {"1P_3D": (2.0, 2.0)}])
    ttft, _ = rank(cells, runs(cells))
    assert ttft.measured == {"4R": 0.5, "1P_3D": 0.5}
    assert ttft.pairs == 1


def test_observations_with_different_numbers_of_runs_are_ranked_by_those_that_all_have() -> None:
    simulated = runs(MEASURED, SWAPPED)
    simulated[0] = simulated[0][:1]
    assert rank(MEASURED, simulated)[0].simulated == {"4R": 1.0, "1P_3D": 0.0}


def test_the_page_names_both_shares() -> None:
    simulated = runs(MEASURED, SWAPPED)
    page = markdown(rank(MEASURED, simulated), disagreements(MEASURED, simulated))
    assert "| 4R | 100%, 75% | 0%, 25% |" in page
    assert "of 2 pairs that were measured more than 5% apart" in page
