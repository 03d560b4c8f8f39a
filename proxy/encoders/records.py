"""Which embeddings each engine is believed to have, by what this process sent and had encoded there. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ..fleet.view import WorkerView
from ..fleet.worker import WorkerId
from ..media.items import MediaItem

CACHE_TOKENS = 8192
"""Of an engine's encoder cache: vLLM gives it a step's tokens, of which this is the usual least."""
ENCODER_CACHE_TOKENS = 65_536  # of an E, which has nothing else to keep
UNKNOWN_TOKENS = 1024  # of an item whose size is not known
LEAST_TOKENS = 64
PIXELS_A_TOKEN = 784  # 28 x 28, as Qwen's models have it; others make more tokens of an image, or fewer
WORKERS_KEPT = 1024


def tokens_of(item: MediaItem) -> int:
    """Roughly how many its embedding has."""
    return max(LEAST_TOKENS, item.pixels // PIXELS_A_TOKEN) if item.pixels else UNKNOWN_TOKENS


class EmbeddingRecords:
    """Of each engine a cache as its own evicts: the least recently used items go first. A new incarnation has none."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._caches: OrderedDict[WorkerId, _Cache] = OrderedDict()

    def holds(self, view: WorkerView, item: MediaItem) -> bool:
        cache = self._caches.get(view.id)
        return cache is not None and cache.incarnation == view.incarnation and item.name in cache.items

    def add(self, view: WorkerView, items: Iterable[MediaItem]) -> None:
        """The engine has encoded or loaded these, or used them again."""
        cache = self._caches.get(view.id)
        if cache is None or cache.incarnation != view.incarnation:
            cache = self._caches[view.id] = _Cache(view.incarnation)
        self._caches.move_to_end(view.id)
        if len(self._caches) > WORKERS_KEPT:
            self._caches.popitem(last=False)
        for item in items:
            cache.add(item.name, tokens_of(item), self._capacity_tokens)


class _Cache:
    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.items: OrderedDict[str, int] = OrderedDict()
        self._tokens = 0

    def add(self, name: str, tokens: int, capacity_tokens: int) -> None:
        self._tokens += tokens - self.items.pop(name, 0)
        self.items[name] = tokens
        while self._tokens > capacity_tokens:
            _, evicted = self.items.popitem(last=False)
            self._tokens -= evicted
