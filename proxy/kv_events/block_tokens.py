"""Blocks by their tokens, in the words of an event and of a prompt.

A block's hash covers more than its tokens: the adapter, the salt of its prompt, pictures, embeddings. Events list that
as `extra_keys`, one entry a block. Adapter and salt are the *scope* of a prompt. A block with anything else in it, or
whose event does not say, as before vLLM 0.12, is known by its hash alone, and so are all after it.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import Any

import msgspec

TOKEN_BYTES = 4

_IDS = msgspec.msgpack.Decoder(list[int])
_KEYS: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[Any])
_NAME = msgspec.msgpack.Decoder(str | None)
_NIL = b"\xc0"
_TAGS = ("lora", "cache_salt")  # entries that the engine itself hashes, and may send one day


class BlockTokens(msgspec.Struct, frozen=True, gc=False):
    ids: bytes = b""  # as `packed`; of the event's first blocks, up to one whose tokens are not known
    scope: str = ""  # see `scope_of`; of the prompt's first blocks alone
    adapter: str = ""


class UnreadTokens(msgspec.Struct, frozen=True, gc=False):
    """As an event has them: engines name the blocks of a prompt again whenever it is used, and few of them are new."""

    ids: msgspec.Raw
    extra_keys: msgspec.Raw
    adapter: msgspec.Raw

    def read(self, blocks: int, *, opens: bool) -> BlockTokens:
        """blocks: of the event. opens: a prompt begins with them."""
        try:
            known, salt, name = blocks, "", ""
            if bytes(self.adapter) != _NIL or bytes(self.extra_keys) != _none(blocks):
                name = _NAME.decode(self.adapter) or ""
                keys = _KEYS.decode(self.extra_keys)
                known, salt = _plain(keys, name, opens=opens) if len(keys) == blocks else (0, "")
            if not known:
                return BlockTokens()
            data = packed(_IDS.decode(self.ids))
        except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError):
            return BlockTokens()
        return BlockTokens(data[: len(data) // blocks * known], scope_of(name, salt) if opens else "", name)


class PromptTokens(msgspec.Struct, frozen=True, gc=False):
    """A whole prompt, with what else its blocks' hashes cover."""

    ids: bytes  # as `packed`
    salt: str = ""

    @property
    def count(self) -> int:
        return len(self.ids) // TOKEN_BYTES


def scope_of(adapter: str, salt: str) -> str:
    return f"{adapter}\0{salt}"


def packed(ids: list[int]) -> bytes:
    """OverflowError for what is no token."""
    return array("I", ids).tobytes()


@lru_cache(1024)
def _none(blocks: int) -> bytes:
    """No extra key in any of them, as the event has it."""
    return msgspec.msgpack.encode([None] * blocks)


def _plain(keys: list[Any], adapter: str, *, opens: bool) -> tuple[int, str]:
    """How many blocks, from the first, have no more in their hash than their prompt's scope; and its salt."""
    salt = ""
    for place, entry in enumerate(keys):
        names = _names(entry)
        if names is None or names[: bool(adapter)] != [adapter] * bool(adapter):
            return place, salt
        more = names[bool(adapter) :]
        if more and (place or not opens or len(more) > 1):
            return place, salt
        salt = more[0] if more else salt
    return len(keys), salt


def _names(entry: Any) -> list[str] | None:
    """None where there is anything but names."""
    names = list[str]()
    for one in entry or ():
        name = one[1] if isinstance(one, list) and len(one) > 1 and one[0] in _TAGS else one
        if not isinstance(name, str):
            return None
        names.append(name)
    return names
