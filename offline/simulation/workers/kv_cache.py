"""One engine's KV memory with its prefix cache, counted in tokens.

Prompts are made of *spans*: runs of tokens with an id that stands for them and everything before them, so equal ids
mean equal prefixes. A prompt of 100,000 tokens is a handful of spans, and its lookup is as cheap. A prompt may end
inside a span that others have more of, and nothing else follows it there: where prompts part, a span ends. So a span
is evicted from its end, as vLLM evicts its blocks. Not modelled: a last block that is not full (at most 15 tokens of
16). Hits are whole blocks, as in vLLM.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """`id` stands for these tokens and all before them, and is unique."""

    id: int
    tokens: int


@dataclass(slots=True)
class Held:
    """A span whose KV is here, or the first part of it."""

    id: int
    tokens: int
    users: int = 0  # sequences that use it now; with none it waits to be found again, or evicted


def with_answer(prompt: tuple[Span, ...], reply: Sequence[Span], tokens: int) -> tuple[Span, ...]:
    """A prompt and the first `tokens` tokens of the answer behind it, which may begin inside the prompt's last span."""
    spans = list(prompt)
    for span in reply:
        if tokens <= 0:
            break
        written = min(span.tokens, tokens)
        tokens -= written
        if spans[-1].id == span.id:
            spans[-1] = Span(span.id, spans[-1].tokens + written)
        else:
            spans.append(Span(span.id, written))
    return tuple(spans)


def first_of(prompt: Sequence[Span], tokens: int) -> tuple[Span, ...]:
    """A prompt's first `tokens` tokens."""
    kept: list[Span] = []
    for span in prompt:
        if tokens <= 0:
            break
        kept.append(span if span.tokens <= tokens else Span(span.id, tokens))
        tokens -= span.tokens
    return tuple(kept)


class KvCache:
    """Tokens of KV: in use by sequences, kept for reuse, or free. Eviction is LRU, the ends of prompts first."""

    def __init__(self, capacity_tokens: int, block_size: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.block_size = block_size
        self.used_tokens = 0
        self.evicted_tokens = 0  # counts up
        self.changed: Callable[[int, int], None] | None = None  # told the id of a span, and how much of it is here now
        self.kept_tokens = 0
        self._spans: dict[int, Held] = {}
        self._unused: OrderedDict[int, Held] = OrderedDict()  # the first is evicted next

    @property
    def available_tokens(self) -> int:
        """Free, or kept and evictable."""
        return self.capacity_tokens - self.used_tokens

    @property
    def usage(self) -> float:
        """The share in use by sequences, as vLLM's `kv_cache_usage_perc`."""
        return self.used_tokens / self.capacity_tokens

    def hit_tokens(self, prompt: Sequence[Span]) -> int:
        """How much of a prompt would be a hit now; changes nothing."""
        held_tokens = 0
        for span in prompt:
            held = self._spans.get(span.id)
            if held is None:
                break
            held_tokens += min(held.tokens, span.tokens)
            if held.tokens < span.tokens:
                break
        hit = min(held_tokens, sum([span.tokens for span in prompt]) - 1)
        return hit - hit % self.block_size

    def share(self, prompt: Sequence[Span]) -> tuple[list[Held], int, int]:
        """Takes the cached prefix into use. Returns its spans, its length, and how much of it is a hit.

        A hit is whole blocks and leaves at least one token to compute. Tokens computed again need no more memory.
        """
        found: list[Held] = []
        held_tokens, is_whole = 0, True
        for span in prompt:
            held = self._spans.get(span.id)
            if held is None:
                is_whole = False
                break
            found.append(held)
            if held.tokens < span.tokens:
                held_tokens, is_whole = held_tokens + held.tokens, False
                break
            held_tokens += span.tokens
        for held in found:
            if not held.users:
                del self._unused[held.id]
                self.kept_tokens -= held.tokens
                self.used_tokens += held.tokens
            held.users += 1
        hit = held_tokens - is_whole
        return found, held_tokens, hit - hit % self.block_size

    def reserve(self, tokens: int) -> bool:
        """False, and nothing changes, if `tokens` tokens are not available."""
        if tokens > self.available_tokens:
            return False
        self.used_tokens += tokens
        self._evict(self.used_tokens + self.kept_tokens - self.capacity_tokens)
        return True

    def publish(self, spans: Sequence[Span], found: list[Held]) -> int:
        """Makes a sequence's own tokens findable, from the first span that it did not find whole. It still uses them.

        `found` grows by what is published. Returns how many of the reserved tokens now belong to spans. Where another
        sequence has published a span meanwhile, the caller's tokens remain a copy of its own.
        """
        moved = 0
        for index, span in enumerate(spans):
            known = found[index] if index < len(found) else self._spans.get(span.id)
            if known is None:
                known = Held(span.id, 0)
                self._spans[span.id] = known
            elif index >= len(found) and not known.users:
                del self._unused[known.id]
                self.kept_tokens -= known.tokens
                self.used_tokens += known.tokens
            if index >= len(found):
                known.users += 1
                found.append(known)
            if known.tokens < span.tokens:
                moved += span.tokens - known.tokens
                known.tokens = span.tokens
                if self.changed is not None:
                    self.changed(span.id, span.tokens)
        self._evict(self.used_tokens + self.kept_tokens - self.capacity_tokens)
        return moved

    def release(self, found: list[Held], own_tokens: int) -> None:
        """A sequence has ended: its own tokens are free, its spans are kept while there is room."""
        self.used_tokens -= own_tokens
        for held in reversed(found):
            held.users -= 1
            if not held.users:
                self.used_tokens -= held.tokens
                self.kept_tokens += held.tokens
                self._unused[held.id] = held
        found.clear()

    def _evict(self, tokens: int) -> None:
        while tokens > 0 and self._unused:
            held = next(iter(self._unused.values()))
            going = min(tokens, held.tokens)
            held.tokens -= going
            tokens -= going
            self.kept_tokens -= going
            self.evicted_tokens += going
            if self.changed is not None:
                self.changed(held.id, held.tokens)
            if not held.tokens:
                del self._unused[held.id]
                del self._spans[held.id]


class HeardCache:
    """What the proxy has heard of one engine's cache: its events, each some time after it happened."""

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
