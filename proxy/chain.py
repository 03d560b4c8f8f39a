"""Chained keyed hashes: a name for each prefix of a conversation that keeps nothing of its text.

A chain starts at a seed (tenant, model, endpoint, salt, and all that is rendered before the first message). Each
*unit*, a message or an item, turns the key so far into the next one, so equal keys mean equal prefixes. The secret
is the proxy's own: a client cannot construct two prompts with one key, nor test a guess at another's prompt.

Raw prompts of `/v1/completions` have no units. They are cut into blocks whose ends depend on the offset only: 16
bytes at first, from 4 KiB on 1/128 to 1/256 of the offset, which keeps a 64 MiB prompt under 3,000 hashes. A prefix
that ends inside a block is known by the block's start, the length of its tail and a check of it (`Mark`).

UTF-8 never holds the byte 0xFF, which therefore ends every string: framing that needs no length in advance, so that
a reply can be hashed while it streams.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from .errors import ConfigError

if TYPE_CHECKING:
    from hashlib import _Hash

KEY_BITS = 60
"""Two of CPython's 30-bit digits: 32 bytes of memory a key, not 48. Two of 2 million keys meet once in 500,000 runs."""

UNIT_OVERHEAD_BYTES = 16
"""What a chat template puts around a message (role, separators), about four tokens."""

USUAL_KEYS = 1024

_MIN_SECRET_BYTES = 16
_MIN_BLOCK_BYTES = 16
END = b"\xff"


class Mark(msgspec.Struct, frozen=True):
    """Where a prefix ends: the key to look it up by and, inside a block, what follows the block's start."""

    key: int
    tail: int = 0  # bytes after the point that `key` names
    check: int = 0  # 32 bits over those bytes, chained to `key`; 0 where there are none


class Hasher:
    """All keyed hashing; one for the life of the process, its secret known to nobody else."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _MIN_SECRET_BYTES:
            raise ConfigError(f"the hashing secret must have at least {_MIN_SECRET_BYTES} bytes")
        # SHA-256, as CPUs have instructions for it: half of BLAKE2's time. The secret is a whole block before all else,
        # hashed once, here; and since a key is but a part of a digest, nobody can go on from one.
        self._root = hashlib.sha256(hashlib.sha512(secret).digest())
        self._once: dict[int, tuple[int, int]] = {}
        self.usual_key = lru_cache(USUAL_KEYS)(self.key)  # the same, for what nearly every request has again

    def start(self, domain: bytes, previous: int = 0) -> _Hash:
        """A running hash that continues from a key; `domain` (one byte) keeps different uses apart."""
        state = self._root.copy()
        state.update(domain + previous.to_bytes(8, "little"))
        return state

    def key(self, domain: bytes, *parts: str | bytes, previous: int = 0) -> int:
        """The key of a tuple of strings, after another key."""
        state = self.start(domain, previous)
        state.update(b"".join([(part if isinstance(part, bytes) else encoded(part)) + END for part in parts]))
        return finished(state)

    def once(self, raw: bytes, form: Callable[[bytes], bytes]) -> tuple[int, int]:
        """The key and the size of what `form` makes of a value, which is worked out once for many that are alike.

        Tools are the same in each turn, and bringing 30 KB of them into form takes 300 us. Only keys are kept.
        """
        name = self.key(b"F", raw)
        found = self._once.get(name)
        if found is None:
            formed = form(raw)
            if len(self._once) >= USUAL_KEYS:
                self._once.clear()
            found = self._once[name] = (self.key(b"V", formed), len(formed))
        return found

    def text_unit(self, previous: int, role: str, name: str | None, call_id: str | None, text: bytes) -> int:
        """The key of a `UnitHash` with one text that is not empty: what nearly all messages are, in one go."""
        ids = encoded(name or "") + END + encoded(call_id or "") if name or call_id else END
        state = self._root.copy()
        state.update(b"".join((b"U", previous.to_bytes(8, "little"), encoded(role), END, ids, END, b"T", text, END)))
        return finished(state)


def finished(state: _Hash) -> int:
    """The key that a running hash has now; the hash itself can go on."""
    return int.from_bytes(state.digest()[:8], "little") >> (64 - KEY_BITS)


def encoded(text: str) -> bytes:
    """UTF-8, for any `str`: a lone surrogate is not an error here."""
    return text.encode("utf-8", "surrogatepass")


class UnitHash:
    """One unit as it is hashed; it grows at its end only, so a reply can be hashed as it streams."""

    __slots__ = ("_hasher", "_open", "_state", "size")

    def __init__(self, hasher: Hasher, previous: int, role: str, name: str = "", call_id: str = "") -> None:
        self._hasher = hasher
        self._state = hasher.start(b"U", previous)
        self._state.update(b"".join((encoded(role), END, encoded(name), END, encoded(call_id), END)))
        self._open = False  # inside a text part
        self.size = UNIT_OVERHEAD_BYTES

    def begin_text(self) -> None:
        """The next text is a part of its own."""
        if self._open:
            self._state.update(END)
            self._open = False

    def add_text(self, text: str) -> None:
        """More of the text part that is open; opens one if need be. Empty text leaves no trace."""
        if text:
            self.add_utf8(encoded(text))

    def add_utf8(self, data: bytes) -> None:
        """The same with the bytes of a text, which is not empty."""
        if not self._open:
            self._state.update(b"T")
            self._open = True
        self._state.update(data)
        self.size += len(data)

    def add_part(self, kind: bytes, key: int, size: int) -> None:
        """A part known by its own key: media, a tool call, a tool's result. `kind` is one byte, not T."""
        self.begin_text()
        self._state.update(kind + key.to_bytes(8, "little"))
        self.size += size

    def copy(self) -> UnitHash:
        twin = object.__new__(UnitHash)
        twin._hasher, twin._state = self._hasher, self._state.copy()
        twin._open, twin.size = self._open, self.size
        return twin

    def key(self) -> int:
        """The chain's key if the unit ended here."""
        if not self._open:
            return finished(self._state)
        state = self._state.copy()
        state.update(END)
        return finished(state)


class BlockHash:
    """A raw prompt as it is hashed, block by block; `keys` and `ends` grow by one with each whole block."""

    __slots__ = ("_boundary", "_hasher", "_offset", "_partial", "ends", "keys")

    def __init__(self, hasher: Hasher, key: int, offset: int = 0) -> None:
        """From the seed, or from the block boundary at `offset` bytes whose key is given."""
        self._hasher = hasher
        self._offset = offset
        self.keys = [key]
        self.ends = [offset]
        self._open_block()

    def add(self, data: bytes) -> None:
        view = memoryview(data)
        while len(view) >= self._boundary - self._offset:
            step = self._boundary - self._offset
            self._partial.update(view[:step])
            view = view[step:]
            self._offset = self._boundary
            self.keys.append(finished(self._partial))
            self.ends.append(self._offset)
            self._open_block()
        self._partial.update(view)
        self._offset += len(view)

    def mark(self) -> Mark:
        tail = self._offset - self.ends[-1]
        return Mark(self.keys[-1], tail, finished(self._partial) & 0xFFFFFFFF) if tail else Mark(self.keys[-1])

    def _open_block(self) -> None:
        self._boundary = self._offset + max(_MIN_BLOCK_BYTES, 1 << max(0, self._offset.bit_length() - 8))
        self._partial = self._hasher.start(b"B", self.keys[-1])


class Chain(msgspec.Struct, frozen=True):
    """The prefixes of one prompt, shortest first: `keys[i]` names its first `ends[i]` bytes.

    Where the prompt was hashed in blocks `data` is all of it, `tail` is what lies beyond the last whole block, and
    `is_text` says whether it is text, not token ids; else they are empty. `open_unit` is the last unit where the reply
    continues it (an assistant's message that the client began).
    """

    keys: tuple[int, ...]
    ends: tuple[int, ...]
    hasher: Hasher
    data: bytes = b""
    tail: bytes = b""
    is_text: bool = False
    open_unit: UnitHash | None = None

    def __repr__(self) -> str:
        return f"Chain(keys={self.keys}, ends={self.ends})"  # without the prompt

    @property
    def size(self) -> int:
        """Bytes of the whole prompt."""
        return self.ends[-1] + len(self.tail)

    def end(self) -> Mark:
        """The mark of the prompt as a whole."""
        return self.resume().mark() if self.tail else Mark(self.keys[-1])

    def resume(self) -> BlockHash:
        """The running hash at the end of a prompt that was hashed in blocks."""
        blocks = BlockHash(self.hasher, self.keys[-1], self.ends[-1])
        blocks.add(self.tail)
        return blocks

    def without_prompt(self) -> Chain:
        """The same without the prompt's bytes: what its keys stand for can no longer be compared by `reach`."""
        return replace(self, data=b"") if self.data else self

    def reach(self, index: int, tail: int, check: int) -> int | None:
        """Bytes of this prompt that a mark found at `keys[index]` covers; None if the tail is another text."""
        end = self.ends[index] + tail
        if not tail:
            return end
        if end > len(self.data):
            return None
        state = self.hasher.start(b"B", self.keys[index])
        state.update(self.data[self.ends[index] : end])
        return end if finished(state) & 0xFFFFFFFF == check else None
