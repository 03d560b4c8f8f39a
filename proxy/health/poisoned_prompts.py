"""Queries of death: which prompts may be what ends workers, and for how long each is refused.

A prompt is a suspect once a worker has ended its connection before the first byte of an answer, and no longer once a
worker has answered it. At a second worker it is refused for a while. A death takes innocent turns too: of the prompts
that one death made suspects for the second time only one can be to blame, so they share the time. Those that are
innocent are soon answered; the one to blame is alone in the next death, and has all of the time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ..errors import LegError, PoisonedPrompt
from ..failures import Cause, Phase
from ..fleet.view import WorkerView
from ..runtime.replicated import Replicated
from ..sessions.prefix_chain import PrefixEnd

REASON = "poisoned_prompt"
WORKERS = 2  # that end a prompt's connection before it is refused
MEMORY_S = 600.0  # since a suspect's last loss
SUSPECTS_KEPT = 10_000  # the oldest are forgotten first
SAME_DEATH_S = 1.0  # a worker's connections that end within this time end together

Life = str
"""A worker in one of its incarnations."""


@dataclass(slots=True)
class _Death:
    """A worker that ended connections."""

    at_s: float
    prompts: int = 0  # that had lost another worker before


@dataclass(slots=True)
class _Suspect:
    losses: dict[Life, float] = field(default_factory=dict)  # when each worker ended a connection of the prompt
    death: _Death | None = None  # the newest, from the second on


class PoisonedPrompts:
    """All suspects. Times are seconds on the caller's monotonic clock, which all processes of one proxy share."""

    def __init__(self, poison_s: float, on_refused: Callable[[str], None]) -> None:
        """on_refused(reason): for metrics."""
        self._on_refused = on_refused
        self._poison_s = poison_s
        self._memory_s = max(MEMORY_S, poison_s)
        # The longest unchanged first. Empty where all workers live: then nobody needs to hash a prompt.
        self.suspects: OrderedDict[PrefixEnd, _Suspect] = OrderedDict()
        self._deaths: OrderedDict[Life, _Death] = OrderedDict()  # the newest of each worker
        self.replicated: Replicated[PrefixEnd, Mapping[Life, float]] | None = None  # changed: as `losses`

    def lost(self, prompt: PrefixEnd, life: Life, now_s: float) -> bool:
        """A worker has ended the prompt's connection. True if it is the second one, or a later one."""
        self._note(prompt, life, now_s)
        if self.replicated is not None:
            self.replicated.changed(prompt, self.losses(prompt))
        return len(self.suspects[prompt].losses) >= WORKERS

    def answered(self, prompt: PrefixEnd) -> None:
        """A worker has begun to answer it, and lives."""
        if self.suspects.pop(prompt, None) is not None and self.replicated is not None:
            self.replicated.changed(prompt, {})

    def check(self, prompt: PrefixEnd, now_s: float) -> None:
        """Raises PoisonedPrompt where the prompt is refused."""
        left_s = self.refused_for_s(prompt, now_s)
        if left_s > 0:
            self._on_refused(REASON)
            raise PoisonedPrompt(
                "workers ended the connection at this prompt: it is refused until Retry-After is over",
                reason=REASON,
                retry_after_s=left_s,
            )

    def refused_for_s(self, prompt: PrefixEnd, now_s: float) -> float:
        """For how much longer the prompt is refused; 0: it is not."""
        self._forget_old(now_s)
        suspect = self.suspects.get(prompt)
        if suspect is None or suspect.death is None:
            return 0.0
        return max(0.0, suspect.death.at_s + self._poison_s / suspect.death.prompts - now_s)

    # -- what other processes send

    def losses(self, prompt: PrefixEnd) -> Mapping[Life, float]:
        """By worker, when it ended a connection of this prompt; empty for one that is no suspect."""
        suspect = self.suspects.get(prompt)
        return {} if suspect is None else suspect.losses

    def all_losses(self) -> Iterator[tuple[PrefixEnd, Mapping[Life, float]]]:
        for prompt, suspect in self.suspects.items():
            yield prompt, suspect.losses

    def adopt(self, prompt: PrefixEnd, losses: Mapping[Life, float]) -> None:
        """Adds what another process knows of a suspect; none: it was answered there."""
        if not losses:
            self.suspects.pop(prompt, None)
        for life, at_s in sorted(losses.items(), key=lambda loss: loss[1]):
            self._note(prompt, life, at_s)

    # -- inside

    def _note(self, prompt: PrefixEnd, life: Life, at_s: float) -> None:
        suspect = self.suspects.setdefault(prompt, _Suspect())
        if at_s <= suspect.losses.get(life, -math.inf):
            return  # known
        suspect.losses[life] = at_s
        self.suspects.move_to_end(prompt)
        death = self._death(life, at_s)
        if len(suspect.losses) >= WORKERS and suspect.death is not death:
            suspect.death = death
            death.prompts += 1
        self._forget_old(at_s)

    def _death(self, life: Life, at_s: float) -> _Death:
        known = self._deaths.get(life)
        if known is None or abs(at_s - known.at_s) > SAME_DEATH_S:
            known = self._deaths[life] = _Death(at_s)
            self._deaths.move_to_end(life)
            if len(self._deaths) > SUSPECTS_KEPT:
                self._deaths.popitem(last=False)
        return known

    def _forget_old(self, now_s: float) -> None:
        while self.suspects:
            oldest = next(iter(self.suspects.values()))
            is_due = max(oldest.losses.values()) + self._memory_s <= now_s
            if not is_due and len(self.suspects) <= SUSPECTS_KEPT:
                return
            self.suspects.popitem(last=False)


def is_loss(exc: LegError) -> bool:
    """Whether the worker ended the connection of a request that it may have worked on, before its first byte."""
    return exc.phase in (Phase.SENT, Phase.HEADERS) and exc.cause in (Cause.RESET, Cause.WORKER_GONE)


def life_of(view: WorkerView) -> Life:
    return f"{view.id} {view.incarnation}"
