"""What a replay found, in figures: means with intervals that come from drawing the log's sessions again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ppd.proxy.fleet.worker import Role

from .past_turns import PastLog, workers_of
from .replay import Compared

DRAWS = 1000
LARGE = 20_000  # sessions, from which on fewer draws do
LARGE_DRAWS = 200
SEED = 17
LEAST_SESSIONS = 10  # fewer give no interval: too few draws differ

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Difference:
    """Of a mean, under the rules in force and under the others; the interval holds 95 % of the draws.

    low, high: None of fewer than LEAST_SESSIONS.
    """

    before: float
    after: float
    low: float | None
    high: float | None

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def is_clear(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0.0 or self.high < 0.0)


@dataclass(frozen=True, slots=True)
class Summary:
    turns: int  # compared
    sessions: int
    workers: Mapping[str, int]  # that the log's turns went to, by role
    changed: int
    changes: Sequence[tuple[str, str, int]]  # routes before and after; the same: other workers
    ttft_s: Difference
    tpot_s: Difference
    missed: Difference  # share of turns that miss a target, as predicted
    ttft_p99_s: tuple[float, float]
    errors: Sequence[tuple[str, int, float, float]]  # of what, how many, median and median of the absolute ones
    undecided: int
    repeated: int
    refused: int
    unpredicted: int
    damaged: int


def summary(log: PastLog, compared: Compared) -> Summary:
    """compared: of one turn at least."""
    numbers = np.frombuffer(compared.sessions, dtype=f"i{compared.sessions.itemsize}")
    _, sessions = np.unique(numbers, return_inverse=True)
    ttft, tpot = (_columns(pair, "d") for pair in (compared.ttft_s, compared.tpot_s))
    missed = _columns(compared.missed, "b")
    difference = _differences(sessions)
    measured = (
        ("measured TTFT", compared.ttft_errors),
        ("measured TPOT", compared.tpot_errors),
        ("recorded prediction of TTFT", compared.recorded_errors),
    )
    changes = [(before, after, count) for (before, after), count in compared.changes.most_common()]
    return Summary(
        turns=compared.count,
        sessions=int(sessions.max()) + 1,
        workers=_by_role(log),
        changed=compared.changes.total(),
        changes=changes,
        ttft_s=difference(*ttft),
        tpot_s=difference(*tpot),
        missed=difference(*missed),
        ttft_p99_s=(float(np.percentile(ttft[0], 99)), float(np.percentile(ttft[1], 99))),
        errors=[
            (name, len(errors), float(np.median(errors)), float(np.median(np.abs(errors))))
            for name, errors in measured
            if len(errors)
        ],
        undecided=log.undecided,
        repeated=log.repeated,
        refused=compared.refused,
        unpredicted=compared.unpredicted,
        damaged=log.damage.count,
    )


def _by_role(log: PastLog) -> dict[str, int]:
    named = {leg.address: leg.worker[:1] for _, leg in workers_of(log.turns)}
    return {role.value: count for role in Role if (count := list(named.values()).count(role.value))}


def _columns(pair: Iterable[object], kind: str) -> tuple[Numbers, Numbers]:
    before, after = (np.frombuffer(column, dtype=kind).astype(np.float64) for column in pair)  # type: ignore[call-overload]
    return before, after


def _differences(sessions: NDArray[np.intp]) -> Callable[[Numbers, Numbers], Difference]:
    """Turns of a session are alike, so whole sessions are drawn."""
    count = int(sessions.max()) + 1
    sizes = np.bincount(sessions, minlength=count).astype(np.float64)
    draws = DRAWS if count < LARGE else LARGE_DRAWS

    def difference(before: Numbers, after: Numbers) -> Difference:
        if count < LEAST_SESSIONS:
            return Difference(float(before.mean()), float(after.mean()), None, None)
        random = np.random.default_rng(SEED)
        sums = np.bincount(sessions, weights=after - before, minlength=count)
        means = np.empty(draws)
        for draw in range(draws):
            drawn = random.integers(0, count, count)
            means[draw] = sums[drawn].sum() / sizes[drawn].sum()
        low, high = np.percentile(means, (2.5, 97.5))
        return Difference(float(before.mean()), float(after.mean()), float(low), float(high))

    return difference
