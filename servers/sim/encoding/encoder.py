"""E: encodes the items of one request after the other, keeps the embeddings, and says where they are."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec

from ..core.config import SimConfig
from ..core.embeddings import EmbeddingStore, MediaInput
from ..core.errors import BadRequest
from ..core.tokens import media_numbers
from .media_parts import PARAMS, EmbeddingSource, media_inputs

_BYTES_A_TOKEN = 8192
_KINDS = {"image_url": "image", "input_audio": "audio", "audio_url": "audio", "video_url": "video"}


class EncodeMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["user"]
    content: list[dict[str, Any]]


class EncodeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that E may be sent: media parts with names, and what changes how they are processed."""

    model: str
    messages: tuple[EncodeMessage]
    stream: Literal[False]
    max_tokens: int = 1
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    priority: int = 0


class Encoder:
    """One step encodes all that is new of one request; the others wait, as in vLLM's encoder-only engine."""

    def __init__(self, config: SimConfig, store: EmbeddingStore) -> None:
        self._config = config
        self._store = store
        self._step = asyncio.Lock()
        self.running = 0  # requests, with those that wait
        self.encoded = 0  # items, so far

    def read(self, body: bytes) -> tuple[EncodeRequest, list[MediaInput]]:
        """BadRequest for anything else than an encoder's leg."""
        try:
            request = msgspec.json.decode(body, type=EncodeRequest)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise BadRequest(f"This engine only encodes: {exc}") from exc
        (message,) = request.messages
        for part in message.content:
            if part.get("type") not in _KINDS or "uuid" not in part:
                raise BadRequest("This engine only encodes parts with media and a uuid.", "messages")
        inputs = media_inputs({"messages": [{"content": message.content}]})
        if not inputs:
            raise BadRequest("This engine only encodes, and the request holds no media.", "messages")
        if len({media.name for media in inputs}) < len(set(inputs)) or any(map(self._store.mistaken, inputs)):
            raise BadRequest("Two items have one uuid.", "messages")
        return request, inputs

    async def encode(self, inputs: list[MediaInput]) -> None:
        self.running += 1
        try:
            async with self._step:
                new = {media.name: media for media in inputs if not self._store.holds(media)}
                await asyncio.sleep(len(new) * self._config.encoder_item_s * self._config.time_scale)
                self.encoded += len(new)
                for media in inputs:
                    self._store.put(media.name, media.tokens)
        finally:
            self.running -= 1

    def params(self, request: EncodeRequest, inputs: list[MediaInput], peer: tuple[str, int]) -> dict[str, Any]:
        found: dict[str, EmbeddingSource] = {}
        for at, media in enumerate(inputs):
            indices = [*(found[media.name].item_indices if media.name in found else ()), at]
            metadata = {"image_grid_thw": media_numbers(media.tokens)} if self._config.encoder_metadata else {}
            kind = _KINDS[request.messages[0].content[at]["type"]]
            size = len(media.tokens) * _BYTES_A_TOKEN
            found[media.name] = EmbeddingSource(*peer, size, indices, kind, metadata)
        return {PARAMS: msgspec.to_builtins(found)}
