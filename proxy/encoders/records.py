"""Which embeddings each engine is believed to have, by what the proxy sent and had encoded there. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import msgspec

from ..fleet.view import WorkerView
from ..fleet.worker import WorkerId
from ..media.items import MediaItem

CACHE_TOKENS = 8192
"""Of an engine's encoder cache. vLLM 0.32 gives it a step's tokens, or those of the model's largest item if these are
more: a step has 8192 on large GPUs, 2048 on others. A worker encodes what it is wrongly believed to have.
"""
ENCODER_CACHE_TOKENS = 65_536  # of an E, which has nothing else to keep
UNKNOWN_TOKENS = 1024  # of an item whose size is not known
LEAST_TOKENS = 64
PIXELS_A_TOKEN = 784  # 28 x 28, as Qwen's models have it; others make more tokens of an image, or fewer
WORKERS_KEPT = 1024


def tokens_of(item: MediaItem) -> int:
    """Roughly how many its embedding has."""
    return max(LEAST_TOKENS, item.pixels // PIXELS_A_TOKEN) if item.pixels else UNKNOWN_TOKENS


class Embeddings(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an engine has encoded or loaded, or used again."""

    worker: WorkerId
    incarnation: str
    items: list[tuple[str, int]]  # names and tokens, the latest last


class EmbeddingRecords:
    """Of each engine a cache as its own evicts: the least recently used items go first. A new incarnation has none."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._caches: OrderedDict[WorkerId, _Cache] = OrderedDict()

    def holds(self, view: WorkerView, item: MediaItem) -> bool:
        cache = self._caches.get(view.id)
        return cache is not None and cache.incarnation == view.incarnation and item.name in cache.items

    def add(self, view: WorkerView, items: Iterable[MediaItem]) -> Embeddings:
        """The engine has encoded or loaded these, or used them again: the result tells other processes so."""
        found = Embeddings(view.id, view.incarnation, [(item.name, tokens_of(item)) for item in items])
        self.take(found)
        return found

    def take(self, found: Embeddings) -> None:
        cache = self._caches.get(found.worker)
        if cache is None or cache.incarnation != found.incarnation:
            cache = self._caches[found.worker] = _Cache(found.incarnation)
        self._caches.move_to_end(found.worker)
        if len(self._caches) > WORKERS_KEPT:
            self._caches.popitem(last=False)
        for name, tokens in found.items:
            cache.add(name, tokens, self._capacity_tokens)

    def all(self) -> Iterator[Embeddings]:
        """Of each engine, as it is when it is asked for."""
        for worker in list(self._caches):
            if (cache := self._caches.get(worker)) is not None:
                yield Embeddings(worker, cache.incarnation, list(cache.items.items()))


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
