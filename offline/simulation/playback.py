"""A trace's sessions, started at a rate or by the trace's times, and the window in which their turns are measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ppd.proxy.errors import ConfigError

from ..experiment.records import Record
from ..experiment.statistics import percentile
from .sessions import BYTES_PER_TOKEN, Asked, spread
from .traced_prompts import TracedPrompts, TurnPrompt
from .workers.kv_cache import Span
from .workers.links import Work

STEADY_SHARE = 0.9  # of the final rate of turns, which the warm-up waits for
MOST_SESSIONS = 20  # times those that a window must hold: a window that is still short then is given up
USUAL_TOKEN_S = 0.01  # of an answer, to judge how long a session lasts


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker dies, and may come back with an empty cache."""

    at_s: float  # since the window began
    worker: str  # "D2"
    back_after_s: float | None = None  # None: never

    def __post_init__(self) -> None:
        for name in ("at_s", "back_after_s"):
            if (value := getattr(self, name)) is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"{name} = {value}: must be at least 0", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Playback:
    """`rate`: sessions a second, in a Poisson process; None: they start by the trace's times.

    A window begins after the warm-up and lasts until so many sessions have begun in it, and so many later turns.
    """

    rate: float | None
    seed: int = 0
    sessions: int = 300
    later_turns: int = 300
    warm_up_s: float | None = None  # None: until turns come at nearly their final rate
    grace_s: float = 120.0  # that the window's last turns have to finish
    losses: tuple[Loss, ...] = ()

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate = {self.rate}: must be above 0", param="rate")
        for name, least in (("sessions", 1), ("later_turns", 0), ("grace_s", 0), ("warm_up_s", 0)):
            if (value := getattr(self, name)) is not None and not value >= least:
                raise ConfigError(f"{name} = {value}: must be at least {least}", param=name)

    def starts(self, prompts: TracedPrompts) -> Iterator[tuple[float, int, int]]:
        """Endless: when a session starts, which conversation of the trace it is, and of which copy of the trace.

        A trace with arrival times keeps its order, as its sessions share blocks with those about them, and each seed
        begins at another place; without times the order is drawn.
        """
        known = len(prompts.conversations)
        if self.rate is None:
            yield from _by_the_trace(prompts)
        assert self.rate is not None, "a trace's times never end"
        random = np.random.default_rng([self.seed, 0x5E55])
        first, at_s, copy = int(random.integers(known)), 0.0, 0
        while True:
            order = random.permutation(known) if prompts.arrivals_s is None else np.roll(np.arange(known), -first)
            for which, gap_s in zip(order.tolist(), random.exponential(size=known).tolist(), strict=True):
                at_s += gap_s / self.rate
                yield at_s, which, copy
            copy += 1

    def warm_up(self, prompts: TracedPrompts) -> float:
        if self.warm_up_s is not None:
            return self.warm_up_s
        offsets: list[float] = []
        for turns in prompts.conversations:
            at_s = 0.0
            for before, turn in zip((None, *turns), turns, strict=False):
                answer_s = 0.0 if before is None else before.output_tokens * USUAL_TOKEN_S
                at_s += max(answer_s + turn.think_s, turn.gap_s)
                offsets.append(at_s)
        return percentile(offsets, STEADY_SHARE)


def _by_the_trace(prompts: TracedPrompts) -> Iterator[tuple[float, int, int]]:
    if prompts.arrivals_s is None:
        raise ConfigError("the trace does not say when its sessions start: a rate must be given", param="rate")
    starts = sorted((at_s, which) for which, at_s in enumerate(prompts.arrivals_s))
    first_s, last_s = starts[0][0], starts[-1][0]
    period_s = (last_s - first_s) * len(starts) / max(1, len(starts) - 1)
    if period_s <= 0:
        raise ConfigError("the trace's sessions all start at once: a rate must be given", param="rate")
    copy = 0
    while True:
        for at_s, which in starts:
            yield at_s - first_s + copy * period_s, which, copy
        copy += 1


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    record: Record
    known_tokens: int  # of its prompt, that the session's turn before had
    work: Work = field(default_factory=Work)


@dataclass(slots=True, eq=False)
class Window:
    """Which turns are measured, and when the run may end."""

    playback: Playback
    begins_s: float
    ends_s: float | None = None
    sessions: int = 0  # begun in it
    later_turns: int = 0  # sent in it
    all_turns: int = 0
    moved_bytes: float = 0.0  # of KV between workers, for all of them
    played: list[PlayedTurn] = field(default_factory=list)  # measured and ended
    open: int = 0  # measured and not ended

    @property
    def is_whole(self) -> bool:
        return self.sessions >= self.playback.sessions and self.later_turns >= self.playback.later_turns

    def measures(self, scheduled_s: float) -> bool:
        return self.begins_s <= scheduled_s and (self.ends_s is None or scheduled_s <= self.ends_s)

    def sent(self, turn: int, now_s: float) -> None:
        self.all_turns += 1
        if not self.measures(now_s):
            return
        self.open += 1
        self.sessions += turn == 1
        self.later_turns += turn > 1
        if self.ends_s is None and (self.is_whole or self.sessions >= MOST_SESSIONS * self.playback.sessions):
            self.ends_s = now_s

    def ended(self, record: Record, known_tokens: int, work: Work) -> None:
        if record.measured:
            self.open -= 1
            self.played.append(PlayedTurn(record, known_tokens, work))

    def is_over(self, now_s: float) -> bool:
        return self.ends_s is not None and (self.open == 0 or now_s > self.ends_s + self.playback.grace_s)


class TracedSession:
    """One conversation of a trace. A copy of the trace has nothing in common with another copy."""

    def __init__(
        self, number: int, arrival_s: float, turns: tuple[TurnPrompt, ...], *, offset: int, window: Window
    ) -> None:
        """offset: added to all ids."""
        self.number = number
        self.arrival_s = arrival_s
        self.turns = len(turns)
        self._plan = turns
        self._offset = offset
        self._window = window
        self._said: tuple[object, ...] = ()  # the units of the newest prompt, whose keys and ends these are
        self._keys, self._ends = [spread(0)], [0]

    def ask(self, turn: int) -> Asked:
        made, offset = self._plan[turn - 1], self._offset
        self._say(made)
        return Asked(
            prompt=made.spans if not offset else _shifted(made.spans, offset),
            prompt_tokens=made.prompt_tokens,
            reply=made.reply if not offset else _shifted(made.reply, offset),
            output_tokens=made.output_tokens,
            known_tokens=made.known_tokens,
            keys=tuple(self._keys),
            ends=tuple(self._ends),
            reply_key=spread(made.reply_unit + offset),
            head=made.head,
        )

    def pauses_s(self, turn: int) -> tuple[float, float]:
        return self._plan[turn - 1].think_s, self._plan[turn - 1].gap_s

    def measures(self, scheduled_s: float) -> bool:
        return self._window.measures(scheduled_s)

    def wants(self, turn: int) -> str:
        return ""

    def _say(self, made: TurnPrompt) -> None:
        known = len(self._said)
        if made.units[:known] != self._said:  # the history was cut or edited
            known = 0
            self._keys, self._ends = [spread(0)], [0]
        for unit in made.units[known:]:
            self._keys.append(spread(unit.id + self._offset))
            self._ends.append(self._ends[-1] + unit.tokens * BYTES_PER_TOKEN)
        self._said = made.units


def traced_sessions(playback: Playback, prompts: TracedPrompts, window: Window) -> Iterator[TracedSession]:
    for number, (at_s, which, copy) in enumerate(playback.starts(prompts)):
        turns = prompts.conversations[which]
        yield TracedSession(number, at_s, turns, offset=copy * (prompts.ids + 1), window=window)


def _shifted(spans: tuple[Span, ...], offset: int) -> tuple[Span, ...]:
    return tuple([Span(span.id + offset, span.tokens) for span in spans])
