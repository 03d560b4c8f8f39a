"""The conversations of a run: when they arrive, how long their turns are, which way each turn goes.

Everything is drawn from the run's seed. Runs that differ only in `x` or topology get the same arrivals, lengths and
pauses, so that two arms are compared on the same draws.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ppd.proxy.errors import ConfigError
from ppd.proxy.policy import Route
from ppd.servers.fleet.topology import Topology

from .run import Run, Workload

_ARRIVALS, _PAUSES, _ROUTES = range(3)  # independent streams of random numbers


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    new_tokens: int  # user's tokens that this turn adds to the prompt
    output_tokens: int
    think_s: float  # from the end of the answer before it
    route: Route | None  # that the load generator forces; None: the proxy decides, by the x of the session's D
    images: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    number: int  # in order of arrival, from 0
    arrival_s: float  # since the run began; its first turn is due then
    measured: bool  # False: it began in the warm-up
    shared_prefix_tokens: int
    turns: tuple[PlannedTurn, ...]


def plan(run: Run, trace: Sequence[float] | None = None) -> list[Conversation]:
    """In order of arrival. `trace`: arrival times in s, for a run that follows a trace."""
    return [_conversation(run, number, at_s) for number, at_s in enumerate(_arrivals(run, trace))]


def _arrivals(run: Run, trace: Sequence[float] | None) -> list[float]:
    if trace is not None and len(trace) < 2:
        raise ConfigError(f"arrivals = {run.arrivals!r}: must hold at least two arrivals", param="arrivals")
    times: list[float] = []
    measured, at_s = 0, 0.0
    for gap_s in _gaps(run, trace):
        at_s += gap_s
        if at_s >= run.warm_up_s + run.seconds and measured >= max(run.conversations, 1):
            break
        times.append(at_s)
        measured += at_s >= run.warm_up_s
    return times


def _gaps(run: Run, trace: Sequence[float] | None) -> Iterator[float]:
    """Endless gaps between arrivals, in s, of mean 1/qps; a trace's gaps are scaled and repeated."""
    if trace is None:
        random = _random(run, _ARRIVALS)
        while True:
            yield from random.exponential(1 / run.qps, size=256).tolist()
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity are refused below
        gaps = np.diff(np.asarray(trace, dtype=float))
    if gaps.min() < 0 or not 0 < gaps.sum() < np.inf:
        raise ConfigError(f"arrivals = {run.arrivals!r}: must rise over time", param="arrivals")
    gaps *= 1 / (run.qps * gaps.mean())
    start = int(_random(run, _ARRIVALS).integers(len(gaps)))  # another part of the trace for each seed
    while True:
        yield from np.roll(gaps, -start).tolist()


def _conversation(run: Run, number: int, at_s: float) -> Conversation:
    workload, topology = run.workload, Topology.parse(run.topology)
    pauses, draws = _random(run, _PAUSES, number), _random(run, _ROUTES, number)
    on_replica = draws.random() < topology.replica_share
    turns = []
    for index in range(workload.turns):
        profile = workload.later if index else workload.first
        local = draws.random() < (run.x or 0.0)
        route: Route | None = Route.REPLICA if on_replica else Route.LOCAL if index and local else Route.SPLIT
        if topology.local_decodes and index and not on_replica:
            route = None
        think_s = float(pauses.exponential(workload.think_s)) if index and workload.think_s else 0.0
        images = _images(workload, number * workload.turns + index + 1)
        turns.append(PlannedTurn(profile.new_tokens, profile.output_tokens, think_s, route, images))
    return Conversation(number, at_s, at_s >= run.warm_up_s, workload.shared_prefix_tokens, tuple(turns))


def _images(workload: Workload, request: int) -> int:
    """request: from 1, counted over all conversations."""
    return 1 if workload.image_every and request % workload.image_every == 0 else 0


def _random(run: Run, stream: int, number: int = 0) -> np.random.Generator:
    # Independent for each use and conversation; x, topology and lengths are left out on purpose.
    cell = zlib.crc32(f"{run.workload.name} {run.qps:g}".encode())
    return np.random.default_rng([run.seed, cell, stream, number])
