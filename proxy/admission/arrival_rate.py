"""Arrival rates over a sliding window."""

from __future__ import annotations

import math
from collections import deque

from ..runtime.replicated import Replicated


class RateMeter:
    """Events per second over the last `window_s`. A younger meter divides by its age, but never by less than 1 s."""

    BUCKETS = 30

    def __init__(self, window_s: float, now_s: float) -> None:
        self._window_s = window_s
        self._bucket_s = window_s / self.BUCKETS
        self._started_s = now_s
        self._counts: deque[list[int]] = deque()  # bucket number and events, oldest first
        self._newest = [-1, 0]  # the last of them
        self._newest_ends_s = -math.inf
        self._total = 0

    def count(self, now_s: float, events: int = 1) -> None:
        if now_s >= self._newest_ends_s:
            self._begin_bucket(int(now_s / self._bucket_s))
        self._newest[1] += events
        self._total += events

    def rate_rps(self, now_s: float) -> float:
        self._forget(int(now_s / self._bucket_s))
        return self._total / max(1.0, min(self._window_s, now_s - self._started_s))

    def _begin_bucket(self, bucket: int) -> None:
        self._forget(bucket)
        self._newest = [bucket, 0]
        self._newest_ends_s = (bucket + 1) * self._bucket_s
        self._counts.append(self._newest)

    def _forget(self, bucket: int) -> None:
        while self._counts and self._counts[0][0] <= bucket - self.BUCKETS:
            self._total -= self._counts.popleft()[1]


class Arrivals:
    """The rates of turns, and of turns that open a conversation."""

    def __init__(self, window_s: float, now_s: float) -> None:
        self.turns = RateMeter(window_s, now_s)
        self.conversations = RateMeter(window_s, now_s)
        self.replicated: Replicated[bool] | None = None  # `changed` takes whether the turn opens a conversation

    def count(self, now_s: float, *, opens: bool) -> None:
        self.turns.count(now_s)
        if opens:
            self.conversations.count(now_s)
        if self.replicated is not None:
            self.replicated.changed(opens)

    def adopt(self, now_s: float, *, turns: int, conversations: int) -> None:
        """Counts turns that arrived at another process of this proxy; `conversations` of them open one."""
        self.turns.count(now_s, turns)
        if conversations:
            self.conversations.count(now_s, conversations)
