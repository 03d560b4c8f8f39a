"""The media parts of a request to P, D or R, and the embeddings that it says an encoder has for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ..core.embeddings import MediaInput
from ..core.errors import BadRequest
from ..core.tokens import media_tokens
from ..templates.conversation import MEDIA_PARTS, media_of

PARAMS = "ec_transfer_params"


class EmbeddingSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one item's embedding is: an entry of an encoder's `ec_transfer_params`."""

    peer_host: str
    peer_port: int
    size_bytes: int
    item_indices: list[int]
    modality: str
    metadata: dict[str, Any] = {}


def media_inputs(body: Mapping[str, Any], *, is_named: bool = True) -> list[MediaInput]:
    """In the order of the body; BadRequest for metadata without a name.

    is_named: a part's `uuid` is its item's name. Of Messages vLLM drops it, as it makes chat parts of them; SGLang and
    TensorRT-LLM know none. The name is then made of the content alone.
    """
    parts = [part for name in ("system", "messages", "input") for part in _media_parts(body.get(name))]
    return [_input(part, part.get("uuid") if is_named else None) for part in parts]


def _input(part: Mapping[str, Any], name: Any) -> MediaInput:
    kind = part["type"]
    has_data = not kind.endswith("_embeds")
    if name is not None and not isinstance(name, str):
        raise BadRequest("uuid must be a string.", "messages")
    if not has_data and name is None:
        raise BadRequest(f"A content part of type {kind} that holds no tensor needs a uuid.", "messages")
    media = media_of(part)
    return MediaInput(name or media.digest.hex(), tuple(media_tokens(media.digest)), has_data)


def _media_parts(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, list):
        for each in value:
            yield from _media_parts(each)
    elif isinstance(value, dict):
        if value.get("type") in MEDIA_PARTS:
            yield value
        else:
            for name in ("content", "output"):
                yield from _media_parts(value.get(name))


def embeddings_given(body: Mapping[str, Any], inputs: list[MediaInput]) -> dict[str, EmbeddingSource]:
    """By name; BadRequest for any that no encoder has written, names no item, or is for a D that pulls KV."""
    given = body.get(PARAMS)
    if given is None:
        return {}
    try:
        found = msgspec.convert(given, dict[str, EmbeddingSource])
    except msgspec.ValidationError as exc:
        raise BadRequest(f"{PARAMS}: {exc}", PARAMS) from exc
    if strangers := found.keys() - {media.name for media in inputs}:
        raise BadRequest(f"{PARAMS} names {min(strangers)}, which is no item of the request.", PARAMS)
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("do_remote_prefill"):
        raise BadRequest(f"{PARAMS}: a request whose KV is pulled needs no embeddings.", PARAMS)
    return found
