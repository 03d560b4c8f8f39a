"""Circuit breakers: who is passed over after failures in a row, for how long, and who may look whether it is over.

A breaker is closed (all is well, or not bad enough), open (passed over until its time is up), or half open: one leg
may be a probe. Its success closes the breaker, its failure opens it for twice as long. Keys are whatever fails by
itself: a worker, or a pair of workers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..runtime.replicated import Replicated

OPEN_LIMIT_S = 120.0  # back-off ends doubling here
PROBE_LIMIT_S = 30.0  # a probe that has not reported by then no longer keeps others from probing
MEMORY_S = 1800.0  # since the last failure; until then legs asked before an opening may still fail

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class Circuit:
    """One breaker; seconds are on the caller's clock."""

    failures: int = 0  # in a row, while closed
    openings: int = 0  # in a row; 0: closed
    failed_s: float = -math.inf  # the last time that counted
    opened_s: float = -math.inf  # the last time
    until_s: float = -math.inf  # open until then, half open afterwards
    probe_s: float | None = None  # when the probe under way was asked
    overloaded_until_s: float = -math.inf

    def is_open(self, now_s: float) -> bool:
        return self.openings > 0 and now_s < self.until_s

    def is_half_open(self, now_s: float) -> bool:
        return self.openings > 0 and now_s >= self.until_s

    def is_probed(self, now_s: float) -> bool:
        return self.probe_s is not None and now_s < self.probe_s + PROBE_LIMIT_S

    def is_blocked(self, now_s: float) -> bool:
        return now_s < self.overloaded_until_s or self.is_open(now_s) or (self.openings > 0 and self.is_probed(now_s))

    def forgotten_s(self) -> float:
        """When nothing is lost by forgetting it."""
        return max(self.overloaded_until_s, self.failed_s + MEMORY_S)

    def next_change_s(self, now_s: float) -> float:
        """When time alone changes an answer next."""
        times_s = [self.until_s, self.overloaded_until_s, self.forgotten_s()]
        if self.probe_s is not None:
            times_s.append(self.probe_s + PROBE_LIMIT_S)
        return min((time_s for time_s in times_s if time_s > now_s), default=math.inf)


class Breakers(Generic[Key]):
    """The breakers of all keys of one kind. `now_s` never falls from call to call."""

    def __init__(self, failures: int, open_s: float) -> None:
        """failures: in a row, that open one; open_s: for how long the first time."""
        self._failures = failures
        self._open_s = open_s
        self._circuits: dict[Key, Circuit] = {}
        self._blocked: frozenset[Key] = frozenset()
        self._stands_until_s = math.inf  # for as long `_blocked` is right
        self.replicated: Replicated[Key, Circuit | None] | None = None

    def blocked(self, now_s: float) -> frozenset[Key]:
        """Keys to pass over: open, half open with a probe under way, or overloaded."""
        if now_s >= self._stands_until_s:
            self._look_again(now_s)
        return self._blocked

    def states(self, now_s: float) -> Mapping[Key, str]:
        """`open` or `half_open`; keys that are closed are left out."""
        if not self._circuits:  # which is nearly always
            return {}
        return {
            key: "open" if circuit.is_open(now_s) else "half_open"
            for key, circuit in self._circuits.items()
            if circuit.openings > 0
        }

    def began(self, key: Key, now_s: float) -> None:
        """A leg is asked of it; while half open, the first one is the probe."""
        circuit = self._circuits.get(key)
        if circuit is not None and circuit.is_half_open(now_s) and not circuit.is_probed(now_s):
            circuit.probe_s = now_s
            self._changed(key)

    def succeeded(self, key: Key, now_s: float) -> bool:
        """Whether this closed it. While it is open a success says nothing: that leg was asked before."""
        circuit = self._circuits.get(key)
        if circuit is None or circuit.is_open(now_s):
            return False
        circuit.failures = 0
        if circuit.openings == 0:
            return False
        circuit.openings = 0
        circuit.probe_s = None
        self._changed(key)
        return True

    def failed(self, key: Key, now_s: float, *, began_s: float, at_once: bool = False) -> bool:
        """Whether this opened it, for the first time or again.

        began_s: when the leg was asked; legs from before the last opening say nothing new. at_once: one is enough.
        """
        circuit = self._circuits.setdefault(key, Circuit())
        if circuit.is_open(now_s) or began_s < circuit.opened_s:
            return False
        circuit.failed_s = now_s
        if circuit.openings == 0:
            circuit.failures += 1
            if circuit.failures < self._failures and not at_once:
                self._changed(key)
                return False
        circuit.until_s = now_s + min(OPEN_LIMIT_S, self._open_s * 2.0 ** min(circuit.openings, 64))
        circuit.opened_s = now_s
        circuit.openings += 1
        circuit.failures = 0
        circuit.probe_s = None
        self._changed(key)
        return True

    def abandoned(self, key: Key) -> None:
        """The client left: if this was the probe it proved nothing, and the next leg may be one."""
        circuit = self._circuits.get(key)
        if circuit is not None and circuit.probe_s is not None:
            circuit.probe_s = None
            self._changed(key)

    def overloaded(self, key: Key, until_s: float) -> None:
        """It asked to be left alone (429, 503): passed over until then, which is no failure and no proof of health."""
        circuit = self._circuits.setdefault(key, Circuit())
        circuit.overloaded_until_s = max(circuit.overloaded_until_s, until_s)
        circuit.probe_s = None
        self._changed(key)

    def forget(self, key: Hashable) -> None:
        """The worker is gone for good, and every pair that it was part of."""
        gone = [known for known in self._circuits if known == key or (isinstance(known, tuple) and key in known)]
        for known in gone:
            del self._circuits[known]
            self._changed(known)

    def circuits(self) -> Mapping[Key, Circuit]:
        return self._circuits

    def adopt(self, key: Key, circuit: Circuit | None) -> None:
        """As another process has left it; None: forgotten."""
        if circuit is None:
            self._circuits.pop(key, None)
        else:
            self._circuits[key] = circuit
        self._stands_until_s = -math.inf

    def _changed(self, key: Key) -> None:
        self._stands_until_s = -math.inf
        if self.replicated is not None:
            self.replicated.changed(key, self._circuits.get(key))

    def _look_again(self, now_s: float) -> None:
        for key in [key for key, circuit in self._circuits.items() if now_s >= circuit.forgotten_s()]:
            del self._circuits[key]
        self._blocked = frozenset(key for key, circuit in self._circuits.items() if circuit.is_blocked(now_s))
        self._stands_until_s = min(
            (circuit.next_change_s(now_s) for circuit in self._circuits.values()), default=math.inf
        )
