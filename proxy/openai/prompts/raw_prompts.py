"""Prompts of `/v1/completions`: text or token ids, hashed in blocks, several of them, or embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...sessions.prefix_chain import BlockHash, Chain
from ..units import LIST_LIMIT, check_lists, prompt_bytes, too_many_prompts
from .content import MEDIA_BYTES
from .shapes import ANY, CANONICAL, PROMPT, read

if TYPE_CHECKING:
    import msgspec

    from ...sessions.hasher import Hasher


def raw_prompt(hasher: Hasher, seed: int, raw: msgspec.Raw) -> tuple[Chain, int]:
    """The chain of `prompt`, and how many prompts it holds: several are one unit, known only as a whole."""
    check_lists(raw)
    prompt = read(PROMPT, raw, "prompt")
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    if isinstance(prompt, list) and several and len(prompt) > LIST_LIMIT:
        raise too_many_prompts()
    prompts: list[object] = [*prompt] if isinstance(prompt, list) and several else [prompt]
    data = [prompt_bytes(one) for one in prompts]
    if len(data) == 1:
        kind, text = data[0]
        blocks = BlockHash(hasher, hasher.key(b"P", f"{seed:x}", kind))
        blocks.add(text)
        tail = text[blocks.ends[-1] :]
        keys, ends, is_text = tuple(blocks.keys), tuple(blocks.ends), kind == "text"
        return Chain(keys, ends, hasher, text, tail, is_text=is_text, is_blocks=True), 1
    each = [hasher.key(b"P", kind, f"{len(text):x}", text) for kind, text in data]
    whole = hasher.key(b"P", f"{seed:x}", *(f"{key:x}" for key in each))
    texts = (data[0][1],) if data[0][0] == "text" else ()
    return Chain((whole,), (sum(len(text) for _, text in data),), hasher, texts=texts), len(data)


def embeddings(hasher: Hasher, seed: int, raw: msgspec.Raw) -> Chain:
    key = hasher.key(b"E", f"{seed:x}", CANONICAL.encode(read(ANY, raw, "prompt_embeds")))
    return Chain((key,), (MEDIA_BYTES,), hasher, texts=(None,))
