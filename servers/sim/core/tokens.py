"""Text and token ids: one character is one token, whose id is its code point.

The chat template's markers are single ids above Unicode. A picture is 16 ids from the hash of its content. Text encodes
to the ids that it was decoded from, so D's own output is a prefix-cache hit on the next turn.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

TURN_START = 0x110000
TURN_END = 0x110001  # also the end-of-answer token
_MEDIA = 0x110100
VOCABULARY_SIZE = _MEDIA + 0x10000

_MARKER_IDS = {"<|im_start|>": TURN_START, "<|im_end|>": TURN_END}
_MARKER_TEXTS = {token: text for text, token in _MARKER_IDS.items()}
_MARKERS = re.compile(r"(<\|im_(?:start|end)\|>)")


def encode(text: str) -> list[int]:
    if "<|im_" not in text:
        return [ord(character) for character in text]
    tokens: list[int] = []
    for piece in _MARKERS.split(text):
        marker = _MARKER_IDS.get(piece)
        tokens.extend(map(ord, piece) if marker is None else (marker,))
    return tokens


def decode(tokens: Iterable[int]) -> str:
    """Media tokens and lone surrogates have no text."""
    return "".join(map(_text, tokens))


def media_tokens(content: bytes) -> list[int]:
    """The 16 ids of a picture or sound; equal contents have equal ids."""
    digest = hashlib.sha256(content).digest()
    return [_MEDIA + int.from_bytes(digest[at : at + 2]) for at in range(0, len(digest), 2)]


def _text(token: int) -> str:
    if token in _MARKER_TEXTS:
        return _MARKER_TEXTS[token]
    if token >= TURN_START or 0xD800 <= token < 0xE000:
        return ""
    return chr(token)
