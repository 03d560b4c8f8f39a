"""What failures lead to: circuit breakers, and the budget that limits retries.

A breaker is closed (used), open (avoided until its time is up), or half open: one leg may be a probe. Its success
closes the breaker, its failure opens it for twice as long. A key is whatever can fail by itself: a worker, or a pair.

The retry budget: when many turns fail, retrying each would double the load on what is left of the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..runtime.replicated import Replicated

OPEN_LIMIT_S = 120.0  # the time open doubles up to this
PROBE_LIMIT_S = 30.0  # after this, a probe without a result no longer keeps others from probing
MEMORY_S = 1800.0  # since the last failure; legs asked before an opening may fail until then

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class Circuit:
    """The state of one breaker; times in seconds on the caller's clock."""

    failures: int = 0  # in a row, while closed
    openings: int = 0  # in a row; 0: closed
    failed_s: float = -math.inf  # the last failure that counted
    opened_s: float = -math.inf  # the last opening
    until_s: float = -math.inf  # open until then, half open afterwards
    probe_s: float | None = None  # when the probe under way was asked
    overloaded_until_s: float = -math.inf
    overloaded_s: float = -math.inf  # when the worker said so last

    def is_open(self, now_s: float) -> bool:
        return self.openings > 0 and now_s < self.until_s

    def is_half_open(self, now_s: float) -> bool:
        return self.openings > 0 and now_s >= self.until_s

    def is_probed(self, now_s: float) -> bool:
        return self.probe_s is not None and now_s < self.probe_s + PROBE_LIMIT_S

    def is_blocked(self, now_s: float) -> bool:
        return now_s < self.overloaded_until_s or self.is_open(now_s) or (self.openings > 0 and self.is_probed(now_s))

    def forgotten_s(self) -> float:
        """When the breaker can be forgotten."""
        return max(self.overloaded_until_s, self.failed_s + MEMORY_S)

    def next_change_s(self, now_s: float) -> float:
        """When an answer above changes next without any call."""
        times_s = [self.until_s, self.overloaded_until_s, self.forgotten_s()]
        if self.probe_s is not None:
            times_s.append(self.probe_s + PROBE_LIMIT_S)
        return min((time_s for time_s in times_s if time_s > now_s), default=math.inf)


class Breakers(Generic[Key]):
    """The breakers of all keys. `now_s` must never decrease from call to call."""

    def __init__(self, failures: int, open_s: float) -> None:
        """failures: how many in a row open a breaker; open_s: how long it is open the first time."""
        self._failures = failures
        self._open_s = open_s
        self.circuits: dict[Key, Circuit] = {}  # of what failed lately; of all others they are closed
        self._blocked: frozenset[Key] = frozenset()
        self._stands_until_s = math.inf  # until then `_blocked` is right
        self.replicated: Replicated[Key, Circuit | None] | None = None

    def blocked(self, now_s: float) -> frozenset[Key]:
        """Keys to avoid: open, half open with a probe under way, or overloaded."""
        if now_s >= self._stands_until_s:
            self._look_again(now_s)
        return self._blocked

    def busy(self, now_s: float) -> Mapping[Key, float]:
        """The overloaded, and until when each is to be left alone."""
        return {
            key: circuit.overloaded_until_s
            for key, circuit in self.circuits.items()
            if now_s < circuit.overloaded_until_s
        }

    def states(self, now_s: float) -> Mapping[Key, str]:
        """`open` or `half_open`; keys that are closed are left out."""
        if not self.circuits:  # which is nearly always
            return {}
        return {
            key: "open" if circuit.is_open(now_s) else "half_open"
            for key, circuit in self.circuits.items()
            if circuit.openings > 0
        }

    def began(self, key: Key, now_s: float) -> None:
        """A leg is asked of the key; while half open, the first leg is the probe."""
        circuit = self.circuits.get(key)
        if circuit is not None and circuit.is_half_open(now_s) and not circuit.is_probed(now_s):
            circuit.probe_s = now_s
            self._changed(key)

    def postponed(self, key: Key, began_s: float, now_s: float) -> None:
        """The leg that `began_s` is asked only now: if it is the probe, it has as long as any other from now on."""
        circuit = self.circuits.get(key)
        if circuit is not None and circuit.probe_s == began_s:
            circuit.probe_s = now_s
            self._changed(key)

    def succeeded(self, key: Key, now_s: float) -> bool:
        """Whether this closed the breaker. While it is open a success proves nothing: its leg was asked before."""
        circuit = self.circuits.get(key)
        if circuit is None or circuit.is_open(now_s):
            return False
        was_open = circuit.openings > 0
        if was_open or circuit.failures:
            circuit.failures = circuit.openings = 0
            circuit.probe_s = None
            self._changed(key)  # also of a row that ends while closed, or another process would go on counting it
        return was_open

    def failed(self, key: Key, now_s: float, *, began_s: float, at_once: bool = False) -> bool:
        """Whether this opened the breaker, for the first time or again.

        began_s: when the leg was asked; legs from before the last opening do not count. at_once: one failure is enough.
        """
        circuit = self.circuits.setdefault(key, Circuit())
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

    def abandoned(self, key: Key, began_s: float) -> None:
        """The leg ended without a result, say as its client left: if it was the probe, the next leg may be one.

        began_s: as told to `began`, by which the probe is known from legs that came in beside it.
        """
        circuit = self.circuits.get(key)
        if circuit is not None and circuit.probe_s == began_s:
            circuit.probe_s = None
            self._changed(key)

    def overloaded(self, key: Key, until_s: float, now_s: float) -> None:
        """The worker answered 429 or 503: avoided until then. That counts neither as a failure nor as a success.

        Nor does it end a probe, which may be another leg's: whoever asked says so by `abandoned`.
        """
        circuit = self.circuits.setdefault(key, Circuit())
        circuit.overloaded_until_s, circuit.overloaded_s = max(circuit.overloaded_until_s, until_s), now_s
        self._changed(key)

    def forget(self, key: Hashable, since_s: float = math.inf) -> None:
        """Forgets what a worker, and every pair that it was part of, did before `since_s`."""
        for known, circuit in list(self.circuits.items()):
            if circuit.failed_s >= since_s or not (known == key or (isinstance(known, tuple) and key in known)):
                continue
            if circuit.overloaded_s >= since_s:
                said = circuit.overloaded_until_s, circuit.overloaded_s
                self.circuits[known] = Circuit(overloaded_until_s=said[0], overloaded_s=said[1])
            else:
                del self.circuits[known]
            self._changed(known)

    def adopt(self, key: Key, circuit: Circuit | None) -> None:
        """Takes the state from another process; None: forgotten."""
        if circuit is None:
            self.circuits.pop(key, None)
        else:
            self.circuits[key] = circuit
        self._stands_until_s = -math.inf

    def _changed(self, key: Key) -> None:
        self._stands_until_s = -math.inf
        if self.replicated is not None:
            self.replicated.changed(key, self.circuits.get(key))

    def _look_again(self, now_s: float) -> None:
        for key in [key for key, circuit in self.circuits.items() if now_s >= circuit.forgotten_s()]:
            del self.circuits[key]
        self._blocked = frozenset(key for key, circuit in self.circuits.items() if circuit.is_blocked(now_s))
        self._stands_until_s = min(
            (circuit.next_change_s(now_s) for circuit in self.circuits.values()), default=math.inf
        )


PARTS = 1000  # of a token, so that shares add up exactly; as in gRPC's retry throttling


class RetryBudget:
    """Each turn deposits `share` of a token, rounded to a thousandth; a retry takes a whole one.

    So retries are at most `share` of all turns, and `burst` more after a quiet time. It follows Finagle's RetryBudget
    (https://finagle.github.io/blog/2016/02/08/retry-budgets): a share of the traffic bounds retries even where
    everything fails.
    """

    def __init__(self, share: float, burst: int) -> None:
        self._share = round(share * PARTS)
        self._burst = burst * PARTS
        self._parts = self._burst

    @property
    def tokens(self) -> float:
        return self._parts / PARTS

    def deposit(self) -> None:
        """Once for each turn that arrives."""
        self._parts = min(self._burst, self._parts + self._share)

    def take(self) -> bool:
        """Whether one more retry may be made; if so, takes its token."""
        if self._parts < PARTS:
            return False
        self._parts -= PARTS
        return True
