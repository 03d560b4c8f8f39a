"""Least squares over simulated runs: the costs under which the simulator comes closest to what was measured.

Residuals are logarithms of simulated over measured means, so 10 % too much weighs as 10 % too little at any load. A
cell of n later turns weighs sqrt(n / (n + 10)). The first turn's TTFT decides nothing, so it has half the weight. Large
residuals count by their size, not their square (soft L1): the published tails have outliers of seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from typing import Any

import numpy as np
from msgspec.structs import replace as replace_struct
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ppd.proxy.laws.step_time import EngineProfile

from ..simulation.setup import Setup
from ..simulation.simulate import simulate
from .observations import Observation

FITTED = (
    "request_s",
    "request_token_s",
    "connector_s",
    "step_s",
    "decode_sequence_s",
    "first_sequence_s",
    "context_token_s",
    "prefill_token_s",
    "transfer_s",
    "send_s",
    "transfer_bytes_per_s",
)
"""The costs that are fitted. `attention_pair_s` is arithmetic, and the rest are the engine's settings."""

SLOW = ("request_s", "prefill_token_s", "context_token_s", "mean_context_token_s")
"""What is fitted of a slow worker."""

START = EngineProfile(
    step_s=7.72e-3,
    decode_sequence_s=82e-6,
    first_sequence_s=58e-6,
    context_token_s=30e-9,
    prefill_token_s=20e-6,
    request_s=15.5e-3,
    request_token_s=14e-6,
    connector_s=1.5e-3,
    transfer_s=3e-3,
    send_s=49e-3,
    transfer_bytes_per_s=30e9,
)
"""Where the search begins: chosen by hand for the published rows. A fit came before, of a law that had no
`first_sequence_s` and no `connector_s`; none of its values is left as it was."""

FIRST_TURN_WEIGHT = 0.5
HALF_WEIGHT_N = 10  # later turns at which a cell has 1/sqrt(2) of the weight of one with very many
SOFT_FROM = 0.1  # of log error: larger residuals count by their size
STEPS = (
    0.03,
    0.01,
)  # relative, for derivatives, one pass each; the first is coarse because engine steps make the cost uneven

Means = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fitted:
    setup: Setup
    cost: float  # of `least_squares` at the end
    evaluations: int


class Simulations:
    """Simulates observations in a pool of processes; a context manager."""

    def __init__(self, jobs: int) -> None:
        self._pool = ProcessPoolExecutor(jobs)

    def __enter__(self) -> Simulations:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def means(self, observations: Sequence[Observation], setup: Setup) -> Means:
        """(observations, 3): mean TTFT of first turns, of later turns, and mean TPOT of later turns, in s."""
        setups = [setup] * len(observations)
        return np.array(list(self._pool.map(_means, observations, setups, chunksize=8)))

    def by_run(self, observations: Sequence[Observation], setup: Setup) -> list[Means]:
        """The same of each run by itself: (runs, 3) for each observation."""
        single = [replace(one, runs=(run,)) for one in observations for run in one.runs]
        means, ends = self.means(single, setup), np.cumsum([len(one.runs) for one in observations])
        return np.split(means, ends[:-1])


def fit(
    observations: Sequence[Observation],
    setup: Setup,
    simulations: Simulations,
    *,
    evaluations: int,
    progress: Callable[[float], None] = lambda cost: None,
) -> Fitted:
    """Searches from the setup's own costs; what else it holds stays, but for its slow worker."""
    measured = np.array([observation.means for observation in observations])
    weights = np.array([math.sqrt(one.n / (one.n + HALF_WEIGHT_N)) for one in observations])[:, None]
    weights = weights * np.array([FIRST_TURN_WEIGHT, 1.0, 1.0])

    def residuals(place: NDArray[np.float64]) -> NDArray[np.float64]:
        means = simulations.means(observations, _scaled(setup, place))
        left: NDArray[np.float64] = (weights * np.log(means / measured)).ravel()
        progress(float(np.sum(left**2)))
        return left

    if not evaluations:
        return Fitted(setup, math.nan, 0)
    # Of one plus the logarithm of each factor: a derivative's step is relative, and would vanish at 0.
    place, count = np.ones(len(FITTED) + (len(SLOW) if setup.slow else 0)), 0
    for step in STEPS:
        found = least_squares(
            residuals,
            place,
            loss="soft_l1",
            f_scale=SOFT_FROM,
            diff_step=[step] * len(place),
            max_nfev=evaluations,
        )
        place, count = found.x, count + int(found.nfev)
    return Fitted(_rounded(_scaled(setup, place)), float(found.cost), count)


def with_costs(setup: Setup, costs: EngineProfile) -> Setup:
    return replace(setup, profile=replace_struct(setup.profile, costs=costs))


def _scaled(setup: Setup, place: NDArray[np.float64]) -> Setup:
    # Costs are varied by factors, so none changes its sign.
    factors = np.exp(place - 1).tolist()
    return _changed(setup, [partial(mul, factor) for factor in factors])


def _rounded(setup: Setup) -> Setup:
    # Four digits are more than the fit can tell, and keep the file readable.
    return _changed(setup, [_four_digits] * (len(FITTED) + len(SLOW)))


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")


def _changed(setup: Setup, changes: Sequence[Callable[[float], float]]) -> Setup:
    """`changes`: of each of FITTED, then of each of SLOW."""
    costs, slow = setup.profile.costs, setup.slow
    new: dict[str, Any] = {n: change(getattr(costs, n)) for n, change in zip(FITTED, changes, strict=False)}
    changed = with_costs(setup, replace(costs, **new))
    if slow is None:
        return changed
    more: dict[str, Any] = {
        n: change(getattr(slow, n)) for n, change in zip(SLOW, changes[len(FITTED) :], strict=False)
    }
    return replace(changed, slow=replace_struct(slow, **more))


def _means(observation: Observation, setup: Setup) -> tuple[float, float, float]:
    first: list[float | None] = []
    later: list[float | None] = []
    tpot: list[float | None] = []
    for run in observation.runs:
        for record in simulate(run, setup):
            if not record.measured:
                continue
            (later if record.turn > 1 else first).append(record.ttft_s)
            if record.turn > 1:
                tpot.append(record.tpot_s)
    return _mean(first), _mean(later), _mean(tpot)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan
