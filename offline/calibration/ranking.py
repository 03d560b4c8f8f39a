"""Whether a simulation ranks configurations as they were measured. Pure.

A grid is ranked point by point: one workload at one load, where every configuration was measured once. A measured point
is one short run, so chance decides part of the ranking. Two things allow for it: a winner's share is the mean over
simulated grids of one run a cell, and `repeatable` says how much of the order of pairs a simulation of itself gives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ppd.proxy.laws.profile_file import RankCheck

from .fit import Means
from .observations import Observation

FIGURES: Final = {"TTFT": 1, "TPOT": 2}  # of later turns: the columns of `Means`
CLEAR: Final = 0.05  # difference of a pair's measured figures from which on their order counts

Point = tuple[str, float]  # workload, conversations a second
Places = Mapping[Point, Sequence[int]]  # of a point's observations


@dataclass(frozen=True, slots=True)
class Ranking:
    """Of one figure. Shares are of the points."""

    figure: str
    points: int
    measured: Mapping[str, float]  # won, by configuration
    simulated: Mapping[str, float]
    pairs: int  # of configurations at a point, whose measured figures differ by more than CLEAR
    right: float  # share of them that the mean of the simulated runs orders as they were measured
    repeatable: float  # the same of one simulated run, ordered by the mean of the others

    @property
    def farthest(self) -> float:
        """The largest difference of a configuration's two shares."""
        return max(abs(self.measured.get(c, 0.0) - self.simulated.get(c, 0.0)) for c in self.configs)

    def check(self) -> RankCheck:
        return RankCheck(
            figure=self.figure,
            points=self.points,
            farthest_share=round(self.farthest, 4),
            pairs=self.pairs,
            pairs_right=round(self.right, 4),
        )

    @property
    def configs(self) -> list[str]:
        return list(dict.fromkeys([*self.measured, *self.simulated]))


def rank(observations: Sequence[Observation], simulated: Sequence[Means]) -> list[Ranking]:
    """simulated: the runs of each observation, as `Simulations.by_run` gives them; as many as all of them have."""
    places = _points(observations)
    measured = np.array([one.means for one in observations])
    by_run = _even(simulated)
    grids = [by_run[:, run] for run in range(by_run.shape[1])]
    names = [one.config for one in observations]
    found = []
    for figure, column in FIGURES.items():
        shares = [_won(places, names, grid[:, column]) for grid in grids]
        pairs, right = _order(places, measured[:, column], by_run[:, :, column].mean(axis=1))
        found.append(
            Ranking(
                figure=figure,
                points=len(places),
                measured=_won(places, names, measured[:, column]),
                simulated={name: sum(each.get(name, 0.0) for each in shares) / len(shares) for name in _all(names)},
                pairs=pairs,
                right=right,
                repeatable=_repeatable(places, by_run[:, :, column]),
            )
        )
    return found


def _even(simulated: Sequence[Means]) -> NDArray[np.float64]:
    """(observations, runs, 3)"""
    least = min(map(len, simulated))
    return np.array([runs[:least] for runs in simulated])


def disagreements(observations: Sequence[Observation], simulated: Sequence[Means]) -> tuple[float, float]:
    """The share of points whose best configuration for TTFT is not the best for TPOT: measured, and simulated."""
    places, by_run = _points(observations), _even(simulated)
    shares = [_disagreement(places, by_run[:, run]) for run in range(by_run.shape[1])]
    return _disagreement(places, np.array([one.means for one in observations])), sum(shares) / len(shares)


def _disagreement(places: Places, means: Means) -> float:
    best = [{min(at, key=means[:, column].__getitem__) for column in FIGURES.values()} for at in places.values()]
    return sum(len(each) > 1 for each in best) / len(best)


def markdown(rankings: Sequence[Ranking], disagreements: tuple[float, float]) -> str:
    """disagreements: measured, and the mean of the simulated grids."""
    rows = [
        "| configuration | " + " | ".join(f"{one.figure}: measured, simulated" for one in rankings) + " |",
        "|---|" + "---|" * len(rankings),
    ]
    for config in dict.fromkeys(config for one in rankings for config in one.configs):
        shares = (f"{one.measured.get(config, 0.0):.0%}, {one.simulated.get(config, 0.0):.0%}" for one in rankings)
        rows.append(f"| {config} | {' | '.join(shares)} |")
    for one in rankings:
        rows.append(
            f"\n{one.figure}: of {one.pairs:,} pairs that were measured more than {CLEAR:.0%} apart, {one.right:.1%} "
            f"are in the measured order. Single simulated runs are ordered by the others in {one.repeatable:.1%}. The "
            f"largest difference of two shares is {100 * one.farthest:.0f} points."
        )
    there, here = disagreements
    rows.append(
        f"\nThe best configuration for TTFT is not the best for TPOT at {there:.0%} of {rankings[0].points} points as "
        f"measured, at {here:.0%} as simulated."
    )
    return "\n".join(rows)


def _points(observations: Sequence[Observation]) -> Places:
    places: dict[Point, list[int]] = defaultdict(list)
    for place, one in enumerate(observations):
        places[one.runs[0].workload.name, one.qps].append(place)
    return places


def _all(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _won(places: Places, names: Sequence[str], values: NDArray[np.float64]) -> dict[str, float]:
    won = Counter(names[min(at, key=lambda place: values[place])] for at in places.values())
    return {name: count / len(places) for name, count in won.items()}


def _order(places: Places, measured: NDArray[np.float64], simulated: NDArray[np.float64]) -> tuple[int, float]:
    clear = right = 0
    for at in places.values():
        for one, other in combinations(at, 2):
            low, high = (one, other) if measured[one] < measured[other] else (other, one)
            if measured[high] > (1 + CLEAR) * measured[low]:
                clear += 1
                right += bool(simulated[low] < simulated[high])
    return clear, right / clear if clear else 1.0


def _repeatable(places: Places, values: NDArray[np.float64]) -> float:
    runs = values.shape[1]
    if runs < 2:
        return 1.0
    shares = []
    for run in range(runs):
        others = np.delete(values, run, axis=1).mean(axis=1)
        shares.append(_order(places, values[:, run], others)[1])
    return float(sum(shares) / runs)
