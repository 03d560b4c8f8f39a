"""The encoder cache of an engine, and the media of a prompt. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .tokens import MEDIA_TOKENS, is_media


@dataclass(frozen=True, slots=True)
class MediaInput:
    """An item of a request. An engine without its data needs its embedding, or the KV of its tokens."""

    name: str  # its uuid, else a hash of its content
    tokens: tuple[int, ...]
    has_data: bool = True


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    at: int  # its first token's place in the prompt
    media: MediaInput


class EmbeddingStore:
    """Embeddings by name, each as the tokens of its item; the least recently used go first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def holds(self, media: MediaInput) -> bool:
        """By its name alone, as an engine does."""
        if media.name in self._items:
            self._items.move_to_end(media.name)
        return media.name in self._items

    def tokens(self, name: str) -> tuple[int, ...] | None:
        return self._items.get(name)

    def put(self, name: str, tokens: tuple[int, ...]) -> None:
        self._items[name] = tokens
        self._items.move_to_end(name)
        while len(self._items) > self._capacity:
            self._items.popitem(last=False)

    def mistaken(self, media: MediaInput) -> bool:
        """Whether the item has the name of another one."""
        return self._items.get(media.name, media.tokens) != media.tokens


def placed(prompt: Sequence[int], inputs: Iterable[MediaInput]) -> tuple[PlacedMedia, ...]:
    """Where the items lie in a prompt, whatever order its template gave them."""
    by_tokens = {media.tokens: media for media in inputs}
    found, at = list[PlacedMedia](), 0
    while by_tokens and at < len(prompt):
        if is_media(prompt[at]):
            media = by_tokens.get(tuple(prompt[at : at + MEDIA_TOKENS]))
            if media is not None:
                found.append(PlacedMedia(at, media))
            at += MEDIA_TOKENS
        else:
            at += 1
    return tuple(found)
