"""Where sessions go: the figures of the modes that ask which session it is, or which worker it should have.

Sessions begin on 4R one after the other. Each has one turn here, as later ones stay where it was. Its prompt is 2,000
tokens long, or that of one in ten 60,000, and its answer takes 20 to 60 s. Engines report their load every 5 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from random import Random
from typing import Final, Literal

import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from ppd.offline.report.figures.style import style
from ppd.proxy.config import Mode
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.worker import Load, WorkerId
from ppd.proxy.laws.profile_file import find
from ppd.proxy.policy import Route, Rules, Turn, decide

from . import scenes
from .pictures import COLOURS, legend, png

PLACING: Final = (Mode.REPLICA.value, Mode.SESSION_HASH.value, Mode.FREE_KV.value)
SESSIONS = 2000
GAP_S, REPORTS_S = 1.0, 5.0
SHORT, LONG, LONG_SHARE = 2000, 60_000, 0.1
ANSWERS_S = 20.0, 60.0
Look = tuple[str, Literal["-", "--", "-."]]
"""Colour and line."""

LOOKS: Final[tuple[Look, ...]] = (("blue", "-"), ("red", "--"), ("green", "-."))
LINES: Final = dict(zip(PLACING, LOOKS, strict=True))


class Running(msgspec.Struct, order=True):
    """A turn that runs; first those that end first."""

    ends_s: float
    session: str
    worker: WorkerId
    tokens: int
    booking: LegBooking


class Replicas:
    """Four of them, which one proxy gives sessions to."""

    def __init__(self, mode: Mode, seed: int) -> None:
        self.ids = [worker.id for worker in scenes.workers(0, 0, 4)]
        self.turns, self.kv_tokens = dict.fromkeys(self.ids, 0), dict.fromkeys(self.ids, 0)  # that run
        self._registry, self._rules = scenes.registry_of(scenes.workers(0, 0, 4)), Rules(mode=mode)
        self._random, self._running, self._reported_s = Random(seed), list[Running](), -REPORTS_S

    def begin(self, now_s: float) -> None:
        """One more session."""
        self._end(now_s)
        if now_s - self._reported_s >= REPORTS_S:
            self._report(now_s)
        prompt = LONG if self._random.random() < LONG_SHARE else SHORT
        turn = Turn(
            model=scenes.MODEL,
            session_id=f"{self._random.getrandbits(64):016x}",
            number=1,
            prompt_tokens=prompt,
            held_tokens=0,
            output_tokens=scenes.OUTPUT_TOKENS,
        )
        decision = decide(turn, self._registry.fleet(scenes.MODEL), self._rules, qps=1.0 / GAP_S, now_s=now_s)
        worker, tokens = decision.decode.id, prompt + scenes.OUTPUT_TOKENS
        booking = LegBooking(self._registry, worker, None, decision.estimates(turn))
        booking.reserve(now_s)
        booking.computed(now_s)
        ends_s = now_s + self._random.uniform(*ANSWERS_S)
        heappush(self._running, Running(ends_s, turn.session_id, worker, tokens, booking))
        self.turns[worker] += 1
        self.kv_tokens[worker] += tokens

    def _end(self, now_s: float) -> None:
        while self._running and self._running[0].ends_s <= now_s:
            ended = heappop(self._running)
            self.turns[ended.worker] -= 1
            self.kv_tokens[ended.worker] -= ended.tokens
            ended.booking.release(ended.ends_s)

    def _report(self, now_s: float) -> None:
        self._reported_s, capacity = now_s, find(scenes.PROFILE).kv_capacity_tokens
        for worker in self.ids:
            load = Load(self.turns[worker], 0, min(1.0, self.kv_tokens[worker] / capacity), capacity)
            self._registry.loaded(worker, load, now_s)


def placed(mode: Mode, sessions: int, seed: int = 1) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """As each session has begun: by worker the turns that run, and their KV in tokens."""
    fleet = Replicas(mode, seed)
    for number in range(sessions):
        fleet.begin(number * GAP_S)
        yield tuple(fleet.turns.values()), tuple(fleet.kv_tokens.values())


def unevenness(mode: Mode, sessions: int) -> NDArray[np.float64]:
    """Of turns and of KV, (2, sessions after the first ones): the most that a worker has, over the mean of all."""
    found = np.array(list(placed(mode, sessions)), dtype=float)[int(ANSWERS_S[1] / GAP_S) :]
    return np.asarray((found.max(axis=2) / found.mean(axis=2)).T)


def placement_figure(name: str) -> bytes:
    by_mode = {other: unevenness(Mode(other), SESSIONS) for other in PLACING}
    with style():
        figure = Figure(figsize=(7.5, 2.9), layout="constrained")
        grid = figure.subplots(1, 2, sharey=True)
        for row, (axes, what) in enumerate(zip(grid, ("turns that run", "their KV"), strict=True)):
            for other, values in by_mode.items():
                _draw(axes, values[row], LINES[other], is_own=other == name)
            axes.set_title(what)
            axes.set_xlim(1, 4)
        grid[0].set_ylabel("at most so, % of the time")
        figure.supxlabel("on the R that has most, over the mean of the four", fontsize=10)
        entries = [_line(LINES[other], label=other, is_own=other == name) for other in PLACING]
        legend(figure, entries)
        return png(figure)


def _draw(axes: Axes, values: NDArray[np.float64], look: Look, *, is_own: bool) -> None:
    line = _line(look, is_own=is_own)
    line.set_data(np.sort(values), 100 * np.arange(1, len(values) + 1) / len(values))
    axes.add_line(line)
    axes.set_ylim(0, 101)


def _line(look: Look, *, is_own: bool, label: str = "") -> Line2D:
    colour, stroke = look
    return Line2D([], [], color=COLOURS[colour], linestyle=stroke, linewidth=2.6 if is_own else 1.1, label=label)


def local_share(x: float, own_x: float | None, sessions: int, seed: int = 1) -> float:
    """Of the sessions, in mode `fraction`. own_x: of the D that holds them; None: it has none."""
    rules, random = Rules(mode=Mode.FRACTION, x=x), Random(seed)
    fleet, turn = scenes.fleet_in(scenes.IDLE, own_x), scenes.turn_in(scenes.IDLE, 2000, 100)
    local = 0
    for _ in range(sessions):
        one = msgspec.structs.replace(turn, session_id=f"{random.getrandbits(64):016x}")
        local += scenes.decided(one, fleet, rules, scenes.IDLE).route is Route.LOCAL
    return local / sessions


def fraction_figure() -> bytes:
    keys, own_x = [step / 10 for step in range(11)], 0.25
    with style():
        figure = Figure(figsize=(4.2, 2.9), layout="constrained")
        axes = figure.subplots()
        for own, colour, marker, label in (
            (None, "blue", "o", "a D without an x of its own"),
            (own_x, "red", "s", f"a D with ,x={own_x:g}"),
        ):
            shares = [100 * local_share(x, own, SESSIONS) for x in keys]
            axes.plot(keys, shares, color=COLOURS[colour], marker=marker, markersize=4, label=label)
        axes.set_xlabel("the key x")
        axes.set_ylabel("of its sessions LOCAL, %")
        axes.legend(frameon=False)
        return png(figure)
