"""What the proxy has heard of one engine's cache: its events, each some time after it happened."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from .kv_cache import Span


class HeardCache:
    def __init__(self, now: Callable[[], float], delay_s: float) -> None:
        self._now = now
        self._delay_s = delay_s
        self._under_way: deque[tuple[float, int, int]] = deque()  # when it is heard, the span, its tokens
        self._heard: dict[int, int] = {}

    def happened(self, span: int, tokens: int) -> None:
        """Of a span so many tokens are in the cache from now on."""
        self._under_way.append((self._now() + self._delay_s, span, tokens))

    def held(self, prompt: Sequence[Span], most: int) -> int | None:
        """How much of a prompt's first `most` tokens the engine holds; None where no event has named their end."""
        self._catch_up()
        heard, total, unbroken = self._heard, 0, 0
        for span in prompt:
            tokens = heard.get(span.id)
            if unbroken == total:
                unbroken += min(span.tokens, tokens or 0)
            total += span.tokens
            if total >= most:
                return None if tokens is None else min(unbroken, most)
        return min(unbroken, most)

    def _catch_up(self) -> None:
        now_s, under_way = self._now(), self._under_way
        while under_way and under_way[0][0] <= now_s:
            _, span, tokens = under_way.popleft()
            self._heard[span] = tokens
