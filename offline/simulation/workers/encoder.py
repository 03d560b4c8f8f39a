"""Images in virtual time: where they lie in a prompt, what engines have of them, and the encoders (E).

An engine encodes an item in the step that begins to compute its tokens, and all others of the step wait; unless it has
the embedding, by itself or from an E. An E encodes what is new of one request after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ppd.proxy.media.items import MediaItem
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.core.embeddings import EmbeddingStore, MediaInput

from ..timeline import Timeline

_USUAL = SimConfig()
ENCODER_ITEM_S = _USUAL.encoder_item_s


class PlacedItem(NamedTuple):
    at: int  # its first token's place in the prompt
    item: MediaItem


class Embeddings:
    """What one engine has encoded, or was sent; as many items as a simulated engine keeps."""

    def __init__(self) -> None:
        self._store = EmbeddingStore(_USUAL.encoder_cache_items)

    def missing(self, names: Iterable[str]) -> set[str]:
        return {name for name in names if not self._store.holds(MediaInput(name, ()))}

    def add(self, names: Iterable[str]) -> None:
        for name in names:
            self._store.put(name, ())


class SimulatedEncoder:
    """Named as the proxy names it."""

    def __init__(self, timeline: Timeline, name: str, item_s: float) -> None:
        self.name = name
        self.embeddings = Embeddings()
        self.encoded = 0  # items, so far
        self._timeline = timeline
        self._item_s = item_s
        self._requests = deque[tuple[list[str], Callable[[], None]]]()  # the first one is under way

    @property
    def running(self) -> int:
        """Requests, with those that wait."""
        return len(self._requests)

    def encode(self, names: Iterable[str], done: Callable[[], None]) -> None:
        self._requests.append(([*names], done))
        if len(self._requests) == 1:
            self._begin()

    def _begin(self) -> None:
        new = self.embeddings.missing(self._requests[0][0])
        self.encoded += len(new)
        self._timeline.after(len(new) * self._item_s, self._end)

    def _end(self) -> None:
        names, done = self._requests.popleft()
        self.embeddings.add(names)
        if self._requests:
            self._begin()
        done()
