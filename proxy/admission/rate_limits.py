"""Requests and tokens a minute for each key, as token buckets that hold one minute's allowance and always refill.

A bucket is kept as the time at which it will be full, so an idle one need not be kept at all. A request is taken while
both buckets hold at least one unit, and takes all of its tokens even if that leaves a debt; so does a list of prompts,
which is as many requests. So a request of any size,
even above a whole minute's allowance, is served once the debt is paid, and smaller ones of the same key cannot keep it
out for ever. Over any time t a key uses at most its allowance for t + 60 s, plus the size of its last request. The
Retry-After is exact: only the key's own requests can make it longer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum

from ..errors import RateLimited
from ..runtime.replicated import Replicated
from .keys import Client

MINUTE_S = 60.0
_ROUNDING_S = 1e-6  # so a client that comes back exactly when told is not refused for a rounding error


class Limit(StrEnum):
    """Named as in the key file; also the reason of a refusal."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"


class RateLimits:
    """What each key has left. Keys are known by name, so a client keeps its debts when the key file changes."""

    def __init__(self) -> None:
        self.refused = Counter[Limit](dict.fromkeys(Limit, 0))
        self._full_s: dict[tuple[str, Limit], float] = {}  # when each bucket will be full; full ones are left out
        self._swept_s = -math.inf
        self.replicated: Replicated[str, Limit, float] | None = None  # `changed` takes what `charge` takes

    def __len__(self) -> int:
        return len(self._full_s)

    def take(self, client: Client, estimated_tokens: int, now_s: float, *, requests: int = 1) -> None:
        """Counts a request of so many tokens; RateLimited, with nothing counted, if the key must wait.

        requests: as how many it counts, being a list.
        """
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
                f"retry in {waits_s[longest]:.3f} s",
                reason=longest,
                retry_after_s=waits_s[longest],
                headers=self.headers(client, now_s),
            )
        self._charge(client, Limit.REQUESTS, requests, now_s)
        self._charge(client, Limit.TOKENS, estimated_tokens, now_s)

    def settle(self, client: Client, estimated_tokens: int, actual_tokens: int, now_s: float) -> None:
        """To be called once for every request that was taken, with what it really used."""
        if client.tokens_per_minute:
            self._charge(client, Limit.TOKENS, actual_tokens - estimated_tokens, now_s)

    def _wait_s(self, client: Client, limit: Limit, now_s: float) -> float:
        allowance = _allowance(client, limit)
        if not allowance:
            return 0.0
        one_s = MINUTE_S / allowance
        return self._full_s.get((client.name, limit), now_s) - now_s - (MINUTE_S - one_s)

    def _charge(self, client: Client, limit: Limit, units: int, now_s: float) -> None:
        allowance = _allowance(client, limit)
        if allowance and units:
            seconds = units * MINUTE_S / allowance  # negative units go back into the bucket
            self.charge(client.name, limit, seconds, now_s)
            if self.replicated is not None:
                self.replicated.changed(client.name, limit, seconds)

    def charge(self, name: str, limit: Limit, seconds: float, now_s: float) -> None:
        """Takes so many seconds of refill out of a key's bucket, for a request served here or by another process."""
        key = (name, limit)
        self._full_s[key] = max(now_s, self._full_s.get(key, now_s)) + seconds

    def headers(self, client: Client, now_s: float) -> dict[str, str]:
        """What the key has left, as OpenAI's API says it; of limits that the key does not have, nothing."""
        shown = dict[str, str]()
        if not client.is_limited:
            return shown
        for limit in Limit:
            allowance = _allowance(client, limit)
            if allowance:
                full_in_s = max(0.0, self._full_s.get((client.name, limit), now_s) - now_s)
                left = max(0, math.floor(allowance * (1 - full_in_s / MINUTE_S) + _ROUNDING_S))
                name = "Requests" if limit is Limit.REQUESTS else "Tokens"
                shown[f"X-RateLimit-Limit-{name}"] = str(allowance)
                shown[f"X-RateLimit-Remaining-{name}"] = str(left)
                shown[f"X-RateLimit-Reset-{name}"] = _duration(full_in_s)
        return shown

    def debts(self) -> Iterable[tuple[str, Limit, float]]:
        return [(name, limit, full_s) for (name, limit), full_s in self._full_s.items()]

    def owe(self, name: str, limit: Limit, full_s: float) -> None:
        """Adopts what another process knows; the later time counts."""
        self._full_s[name, limit] = max(full_s, self._full_s.get((name, limit), -math.inf))

    def _sweep(self, now_s: float) -> None:
        if now_s - self._swept_s >= MINUTE_S:
            self._swept_s = now_s
            self._full_s = {key: full_s for key, full_s in self._full_s.items() if full_s > now_s}


def with_limits(headers: Mapping[str, str], limits: Mapping[str, str]) -> dict[str, str]:
    """The headers of an answer, with a key's limits in place of any that a worker has named."""
    others = {name: value for name, value in headers.items() if not name.lower().startswith("x-ratelimit-")}
    return others | dict(limits)


def _duration(seconds: float) -> str:
    """As OpenAI writes times: 17ms, 1.234s, 6m0s; never less than it is."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"


def _allowance(client: Client, limit: Limit) -> int:
    return client.requests_per_minute if limit is Limit.REQUESTS else client.tokens_per_minute
