"""Requests and tokens a minute, per key: a bucket each, which holds one minute's allowance and fills all the time.

A bucket is kept as the time at which it will be full, so an idle one need not be kept at all. A request is taken while
both buckets hold at least one unit, and takes all of its tokens even if that leaves a debt. So a request of any size,
also one beyond a whole minute's allowance, gets its turn when the debt is paid, and smaller ones of the same key can't
keep it out for ever; over any time t a key uses at most its allowance for t + 60 s, and the last request's size. The
time to come back is exact: nothing but the key's own requests can make it longer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from ..errors import RateLimited
from ..runtime.replicated import Replicated
from .keys import Client

MINUTE_S = 60.0
_ROUNDING_S = 1e-6  # who comes back at the very time that was named must not be late by a rounding error


class Limit(StrEnum):
    """Named as in the key file; also the reason of a refusal."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"


class RateLimits:
    """What each key has left. Keys are known by name, so a client keeps its debts when the key file changes."""

    def __init__(self) -> None:
        self.refused = Counter[Limit](dict.fromkeys(Limit, 0))
        self._full_s: dict[tuple[str, Limit], float] = {}  # when a bucket is full again; one that is, is left out
        self._swept_s = -math.inf
        self.replicated: Replicated[str, Limit, float] | None = None  # changed: as `charge`

    def __len__(self) -> int:
        """Buckets that are kept."""
        return len(self._full_s)

    def take(self, client: Client, estimated_tokens: int, now_s: float) -> None:
        """Counts one request of so many tokens; RateLimited, and nothing counted, where the key must wait."""
        if not client.requests_per_minute and not client.tokens_per_minute:
            return
        if self.replicated is not None:
            self.replicated.catch_up()
        self._sweep(now_s)
        waits_s = {limit: self._wait_s(client, limit, now_s) for limit in Limit}
        longest = max(Limit, key=waits_s.__getitem__)
        if waits_s[longest] > _ROUNDING_S:
            self.refused[longest] += 1
            raise RateLimited(
                f"key {client.name!r} has used its {_allowance(client, longest)} {longest}; "
                f"come back in {waits_s[longest]:.3f} s",
                reason=longest,
                retry_after_s=waits_s[longest],
            )
        self._charge(client, Limit.REQUESTS, 1, now_s)
        self._charge(client, Limit.TOKENS, estimated_tokens, now_s)

    def settle(self, client: Client, estimated_tokens: int, actual_tokens: int, now_s: float) -> None:
        """Once for every request that was taken: what it really used. The request itself stays counted."""
        if client.tokens_per_minute:
            self._charge(client, Limit.TOKENS, actual_tokens - estimated_tokens, now_s)

    def _wait_s(self, client: Client, limit: Limit, now_s: float) -> float:
        """Until the bucket holds one unit; not above 0 where it does."""
        allowance = _allowance(client, limit)
        if not allowance:
            return 0.0
        one_s = MINUTE_S / allowance
        return self._full_s.get((client.name, limit), now_s) - now_s - (MINUTE_S - one_s)

    def _charge(self, client: Client, limit: Limit, units: int, now_s: float) -> None:
        """Negative units go back into the bucket, which is never more than full."""
        allowance = _allowance(client, limit)
        if allowance and units:
            seconds = units * MINUTE_S / allowance
            self.charge(client.name, limit, seconds, now_s)
            if self.replicated is not None:
                self.replicated.changed(client.name, limit, seconds)

    def charge(self, name: str, limit: Limit, seconds: float, now_s: float) -> None:
        """Takes so many seconds of refilling out of a key's bucket; another process of this proxy has served it."""
        key = (name, limit)
        self._full_s[key] = max(now_s, self._full_s.get(key, now_s)) + seconds

    def debts(self) -> Iterable[tuple[str, Limit, float]]:
        """Of each bucket that is not full: its key's name, its kind, and when it will be."""
        return [(name, limit, full_s) for (name, limit), full_s in self._full_s.items()]

    def owe(self, name: str, limit: Limit, full_s: float) -> None:
        """What another process knows; the later time stands."""
        self._full_s[name, limit] = max(full_s, self._full_s.get((name, limit), -math.inf))

    def _sweep(self, now_s: float) -> None:
        """Forgets full buckets, once a minute."""
        if now_s - self._swept_s >= MINUTE_S:
            self._swept_s = now_s
            self._full_s = {key: full_s for key, full_s in self._full_s.items() if full_s > now_s}


def _allowance(client: Client, limit: Limit) -> int:
    return client.requests_per_minute if limit is Limit.REQUESTS else client.tokens_per_minute
