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
from typing import Any

import numpy as np
from msgspec.structs import replace as replace_struct
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ppd.servers.engine_profile.step_time import EngineProfile

from ..simulation.setup import Setup
from ..simulation.simulate import simulate
from .observations import Observation

FITTED = (
    "request_s",
    "request_token_s",
    "step_s",
    "decode_sequence_s",
    "context_token_s",
    "prefill_token_s",
    "transfer_s",
    "send_s",
    "transfer_bytes_per_s",
)
"""The costs that are fitted. `attention_pair_s` is arithmetic, and the rest are the engine's settings."""

START = EngineProfile(
    step_s=7.8e-3,
    decode_sequence_s=0.12e-3,
    context_token_s=27e-9,
    prefill_token_s=20e-6,
    request_s=20e-3,
    request_token_s=10e-6,
    transfer_s=2e-3,
    send_s=40e-3,
    transfer_bytes_per_s=16e9,
)
"""Where the search begins: of the size that an 8B model on a GPU of that class has."""

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
    costs: EngineProfile
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


def fit(
    observations: Sequence[Observation],
    setup: Setup,
    simulations: Simulations,
    *,
    evaluations: int,
    progress: Callable[[float], None] = lambda cost: None,
) -> Fitted:
    """Searches from the setup's own costs; everything else of `setup` stays."""
    measured = np.array([observation.means for observation in observations])
    weights = np.array([math.sqrt(one.n / (one.n + HALF_WEIGHT_N)) for one in observations])[:, None]
    weights = weights * np.array([FIRST_TURN_WEIGHT, 1.0, 1.0])
    start = setup.profile.costs

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        means = simulations.means(observations, with_costs(setup, _scaled(start, logs)))
        left: NDArray[np.float64] = (weights * np.log(means / measured)).ravel()
        progress(float(np.sum(left**2)))
        return left

    logs, count = np.zeros(len(FITTED)), 0
    for step in STEPS:
        found = least_squares(
            residuals,
            logs,
            loss="soft_l1",
            f_scale=SOFT_FROM,
            diff_step=[step] * len(FITTED),
            max_nfev=evaluations,
        )
        logs, count = found.x, count + int(found.nfev)
    return Fitted(_rounded(_scaled(start, logs)), float(found.cost), count)


def with_costs(setup: Setup, costs: EngineProfile) -> Setup:
    return replace(setup, profile=replace_struct(setup.profile, costs=costs))


def _scaled(start: EngineProfile, logs: NDArray[np.float64]) -> EngineProfile:
    # Costs are varied by factors, so none changes its sign.
    factors = zip(FITTED, np.exp(logs).tolist(), strict=True)
    scaled: dict[str, Any] = {name: getattr(start, name) * factor for name, factor in factors}
    return replace(start, **scaled)


def _rounded(costs: EngineProfile) -> EngineProfile:
    # Four digits are more than the fit can tell, and keep the file readable.
    rounded: dict[str, Any] = {name: float(f"{getattr(costs, name):.4g}") for name in FITTED}
    return replace(costs, **rounded)


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
