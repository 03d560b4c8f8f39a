"""Chained keyed hashes that name each prefix of a conversation and keep nothing of its text.

A chain starts at a seed: tenant, model, endpoint, salt, and what changes how all of the prompt is rendered. Each
*unit* turns the key so far into the next one, so equal keys mean equal prefixes: each tool and the system's text (see
`prompt_head`), then each message or item. Only the proxy knows the secret: a client can neither construct two prompts
with one key, nor test a guess at another's prompt.

Raw prompts of `/v1/completions` have no units. They are cut into blocks whose ends depend on the offset only: 16
bytes at first, and from 4 KiB on 1/128 to 1/256 of the offset, so a 64 MiB prompt takes under 3,000 hashes. A prefix
that ends inside a block is known by the block's start, and by the length and a hash of its tail (`PrefixEnd`).

The byte 0xFF ends every string, as UTF-8 never holds it. So no length has to be known in advance, and a reply can be
hashed while it streams. SHA-256 hashes everything except what a text holds beyond its first 4 KiB. A keyed BLAKE3
hashes that, and its digest follows the first 4 KiB, after the byte 0xFE, which UTF-8 never holds either. So a text
reads `T text FF` or `T 4,096 bytes FE digest FF`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from ..errors import ConfigError

if TYPE_CHECKING:
    from hashlib import _Hash

KEY_BITS = 60
"""Two of CPython's 30-bit digits: 32 bytes of memory, not 48. Among 2 million keys, two collide in 1 run of 500,000."""

UNIT_OVERHEAD_BYTES = 16
"""What a chat template adds around a message (role, separators): about four tokens."""

USUAL_KEYS = 1024

KEPT_UNITS = 100_000
"""Of lists that many prompts have: at most 10 MB."""

HEAD_BYTES = 4096
"""How much of a unit's text SHA-256 hashes. BLAKE3 hashes the rest, so only longer texts hold its state of 2 KB."""

_BEYOND_CONTEXT = "ppd-router 2026-11-22 proxy.chain: texts beyond their first 4 KiB"
_MIN_SECRET_BYTES = 16
_MIN_BLOCK_BYTES = 16
_DIGEST_BYTES = 32
END = b"\xff"
BEYOND = b"\xfe"


class PrefixEnd(msgspec.Struct, frozen=True):
    """Where a prefix ends: the key to look it up by and, inside a block, what follows the block's start."""

    key: int
    tail: int = 0  # bytes after the point that `key` names
    check: int = 0  # a hash of those bytes in 32 bits, chained to `key`; 0 where there are none


class LongTexts(Protocol):
    """The texts above 4 KiB of one prompt: see `text_cuts`."""

    known: Sequence[tuple[int, int]]

    def note(self, state: _Hash, beyond: memoryview, offset: int) -> None: ...
    def cuts(self, hasher: Hasher) -> Sequence[tuple[int, int]]: ...
    def without_text(self) -> LongTexts: ...


class Marks(msgspec.Struct, frozen=True, gc=False):
    """Which of a chain's keys ends each part of the prompt; 0, the seed's place, where there is no such part.

    The later one of `tools` and `system` is the whole head; see `Chain.head`.
    """

    tools: int = 0  # the last tool
    system: int = 0  # the system's text
    first_user: int = 0  # the first message by the user
    last_user: int = 0  # the newest one; results of tools are not by the user
    last_reply: int = 0  # the newest message by the assistant, or the last of its items
    reasons: bool = False  # that reply comes with its reasoning, which has no key

    @property
    def head(self) -> int:
        return max(self.tools, self.system)


NO_MARKS = Marks()


class Units(msgspec.Struct, frozen=True, gc=False):
    """A list that many prompts have, hashed without what is before it: `ends[i]` is the size of its first i + 1."""

    keys: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


NO_UNITS = Units()


class Hasher:
    """All keyed hashing: one for the life of the process, and nobody else knows its secret."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _MIN_SECRET_BYTES:
            raise ConfigError(f"the hashing secret must have at least {_MIN_SECRET_BYTES} bytes")
        self.secret = secret  # for the process that hashes large prompts
        # SHA-256, because CPUs have instructions for it: half of BLAKE2's time. The secret fills the first block, which
        # is hashed once, here. A key is only a part of a digest, so nobody can continue a hash from it.
        self._root = hashlib.sha256(hashlib.sha512(secret).digest())
        # BLAKE3 hashes many blocks of a long text in parallel, with AVX-512 in a quarter of SHA-256's time: 130 KB take
        # 25 us, not 91; 26 KB take 7 us, not 19. 100 bytes take 0.5 us with both, but its state is 2.0 KB, not 0.2.
        # Its key is derived from the secret separately, so neither hash says anything about the other.
        self._beyond = blake3(key=blake3(secret, derive_key_context=_BEYOND_CONTEXT).digest())
        self._once: dict[int, tuple[int, int]] = {}
        self._lists: dict[int, Units] = {}
        self._listed = 0  # units in them
        self.usual_key = lru_cache(USUAL_KEYS)(self.key)  # cached, for what nearly every request has again

    def start(self, domain: bytes, previous: int = 0) -> _Hash:
        """A running hash that continues from a key; `domain` (one byte) keeps different uses apart."""
        state = self._root.copy()
        state.update(domain + previous.to_bytes(8, "little"))
        return state

    def beyond(self, data: bytes | memoryview) -> blake3:
        return self._beyond.copy().update(data)

    def key(self, domain: bytes, *parts: str | bytes, previous: int = 0) -> int:
        state = self.start(domain, previous)
        state.update(b"".join([(part if isinstance(part, bytes) else encoded(part)) + END for part in parts]))
        return finished(state)

    def once(self, raw: bytes, form: Callable[[bytes], bytes]) -> tuple[int, int]:
        """The key and the size of `form(raw)`, computed once for equal values; only keys and sizes are kept."""
        name = self.name_of(raw)
        found = self._once.get(name)
        if found is None:
            formed = form(raw)
            if len(self._once) >= USUAL_KEYS:
                self._once.clear()
            found = self._once[name] = (self.key(b"V", formed), len(formed))
        return found

    def units(self, raw: bytes, form: Callable[[bytes], list[bytes]]) -> Units:
        """The units that `form` finds in `raw`, computed once for equal bytes.

        Tools are the same in each turn, and `form` takes 300 us for 30 KB of them.
        """
        name = self.name_of(raw)
        found = self._lists.get(name)
        if found is None:
            key, size, keys, ends = 0, 0, list[int](), list[int]()
            for one in form(raw):
                key = self.key(b"O", one, previous=key)
                size += len(one) + 1
                keys.append(key)
                ends.append(size)
            found = Units(tuple(keys), tuple(ends))
            self._listed += len(keys)
            if len(self._lists) >= USUAL_KEYS or self._listed > KEPT_UNITS:
                self._lists.clear()
                self._listed = len(keys)
            self._lists[name] = found
        return found

    def name_of(self, raw: bytes) -> int:
        """A key for exactly these bytes, by which to remember what was made of them."""
        if len(raw) <= HEAD_BYTES:
            return self.key(b"F", raw)
        return int.from_bytes(self.beyond(raw).digest(8), "little")

    def text_unit(self, previous: int, role: str, name: str | None, call_id: str | None, text: bytes) -> int:
        """The key of a `UnitHash` with one text that is not empty, in one step: nearly all messages are that."""
        end = END
        if len(text) > HEAD_BYTES:
            end = _text_end(self.beyond(memoryview(text)[HEAD_BYTES:]))
            text = text[:HEAD_BYTES]
        ids = encoded(name or "") + END + encoded(call_id or "") if name or call_id else END
        state = self._root.copy()
        state.update(b"".join((b"U", previous.to_bytes(8, "little"), encoded(role), END, ids, END, b"T", text, end)))
        return finished(state)


def finished(state: _Hash) -> int:
    """The key that a running hash has now; the hash itself can be continued."""
    return int.from_bytes(state.digest()[:8], "little") >> (64 - KEY_BITS)


def encoded(text: str) -> bytes:
    """UTF-8, for any `str`: a lone surrogate is not an error here."""
    return text.encode("utf-8", "surrogatepass")


def _text_end(beyond: blake3 | None) -> bytes:
    return END if beyond is None else b"".join((BEYOND, beyond.digest(_DIGEST_BYTES), END))


class UnitHash:
    """One unit as it is hashed. It grows only at its end, so a reply can be hashed as it streams."""

    __slots__ = ("_beyond", "_hasher", "_head_end", "_long_texts", "_state", "size", "text")

    def __init__(
        self,
        hasher: Hasher,
        previous: int,
        role: str,
        name: str = "",
        call_id: str = "",
        long_texts: LongTexts | None = None,
    ) -> None:
        """long_texts: notes the texts that can be cut; each is then added in one piece."""
        self._hasher = hasher
        self._long_texts = long_texts
        self._state = hasher.start(b"U", previous)
        self._state.update(b"".join((encoded(role), END, encoded(name), END, encoded(call_id), END)))
        self._head_end = 0  # the size at which the head of the open text is full; 0: no text is open
        self._beyond: blake3 | None = None  # hash of what the open text has beyond its head
        self.size = UNIT_OVERHEAD_BYTES
        self.text: str | None = ""  # the longest that it was shown, to count tokens by; None where it holds media

    def show(self, text: str | None) -> None:
        if self.text is not None and (text is None or len(text) > len(self.text)):
            self.text = text

    def begin_text(self) -> None:
        """The next `add_text` begins a text part of its own."""
        if self._head_end:
            self._state.update(_text_end(self._beyond))
            self._head_end = 0
            self._beyond = None

    def add_text(self, text: str) -> None:
        """More of the open text part, or the start of one. Empty text changes nothing."""
        if text:
            self.add_utf8(encoded(text))

    def add_utf8(self, data: bytes) -> None:
        """As `add_text`, with a text's bytes, which must not be empty."""
        self.size = size = self.size + len(data)
        if size <= self._head_end:
            self._state.update(data)
        elif self._beyond is not None:
            self._beyond.update(data)
        else:
            self._open_or_cross(data)

    def add_part(self, kind: bytes, key: int, size: int) -> None:
        """A part with a key of its own: media, a tool call, a tool's result. `kind` is one byte other than T."""
        self.begin_text()
        self._state.update(kind + key.to_bytes(8, "little"))
        self.size += size

    def copy(self) -> UnitHash:
        twin = object.__new__(UnitHash)
        twin._hasher, twin._state = self._hasher, self._state.copy()
        twin._long_texts = None
        twin._beyond = None if self._beyond is None else self._beyond.copy()
        twin._head_end, twin.size, twin.text = self._head_end, self.size, ""
        return twin

    def key(self) -> int:
        if not self._head_end:
            return finished(self._state)
        state = self._state.copy()
        state.update(_text_end(self._beyond))
        return finished(state)

    def _open_or_cross(self, data: bytes) -> None:
        before = self.size - len(data)  # `size` already counts `data`
        if not self._head_end:
            self._state.update(b"T")
            self._head_end = before + HEAD_BYTES
        room = self._head_end - before
        self._state.update(data[:room])
        if len(data) > room:
            rest = memoryview(data)[room:]
            self._beyond = self._hasher.beyond(rest)
            if self._long_texts is not None:
                self._long_texts.note(self._state, rest, before + room)


class BlockHash:
    """Hashes a raw prompt block by block; `keys` and `ends` grow by one with each whole block."""

    __slots__ = ("_boundary", "_hasher", "_offset", "_partial", "ends", "keys")

    def __init__(self, hasher: Hasher, key: int, offset: int = 0) -> None:
        """Starts at the seed, or at the block boundary at `offset` bytes, whose key is given."""
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

    def end(self) -> PrefixEnd:
        tail = self._offset - self.ends[-1]
        return (
            PrefixEnd(self.keys[-1], tail, finished(self._partial) & 0xFFFFFFFF) if tail else PrefixEnd(self.keys[-1])
        )

    def _open_block(self) -> None:
        self._boundary = self._offset + max(_MIN_BLOCK_BYTES, 1 << max(0, self._offset.bit_length() - 8))
        self._partial = self._hasher.start(b"B", self.keys[-1])


class Chain(msgspec.Struct, frozen=True):
    """The prefixes of one prompt, shortest first: `keys[i]` names its first `ends[i]` bytes.

    The first key is the seed's, with 0 bytes, or that of a stored response which the prompt continues. Then come the
    tools and the system's text, in the order that the model's template is believed to have, then messages or items;
    `marks` tells where these parts end. Equal keys mean equal prefixes, except that inside the head both prompts must
    have been read in the same order. A chain of several prompts, or of embeddings, has one key and no seed.

    If the prompt was hashed in blocks, `data` is all of it, `tail` is what follows the last whole block, and `is_text`
    tells text from token ids; otherwise they are empty. `marks` tells where the prompt's parts end. `open_unit` is the
    last unit, if the reply continues it (an assistant's message that the client began).
    """

    keys: tuple[int, ...]
    ends: tuple[int, ...]
    hasher: Hasher
    data: bytes | memoryview = b""
    tail: bytes = b""
    is_text: bool = False
    open_unit: UnitHash | None = None
    marks: Marks = NO_MARKS
    is_blocks: bool = False  # it was hashed in blocks
    long_texts: LongTexts | None = None
    samples: tuple[bytes | None, ...] = ()  # of the newest units' texts, see `text_kinds`

    def __repr__(self) -> str:
        return f"Chain(keys={self.keys}, ends={self.ends})"  # without the prompt

    @property
    def size(self) -> int:
        return self.ends[-1] + len(self.tail)

    def end(self) -> PrefixEnd:
        return self.resume().end() if self.tail else PrefixEnd(self.keys[-1])

    def head(self, *, tools_first: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Keys and ends from the seed to the end of the head, in one of the two orders: see `prompt_head`.

        What the seed holds counts to the first unit in the chain's own order, and to the last in the other.
        """
        tools, system = self.marks.tools, self.marks.system
        keys, ends = self.keys[: self.marks.head + 1], self.ends[: self.marks.head + 1]
        if not tools or not system or tools_first is (tools < system):
            return keys, ends
        if tools < system:  # so they were first
            text, bytes_before = keys[-1] ^ keys[tools] ^ keys[0], ends[-1] - ends[tools]
            change, ours, sizes = keys[0] ^ text, keys[1:tools], ends[1:tools]
            return (
                (keys[0], text, *(key ^ change for key in ours), keys[-1]),
                (0, bytes_before, *(bytes_before + size for size in sizes), ends[-1]),
            )
        change, before = keys[0] ^ keys[1], ends[1]
        return (
            (keys[0], *(key ^ change for key in keys[2:]), keys[-1]),
            (0, *(size - before for size in ends[2:]), ends[-1]),
        )

    def resume(self) -> BlockHash:
        blocks = BlockHash(self.hasher, self.keys[-1], self.ends[-1])
        blocks.add(self.tail)
        return blocks

    def without_prompt(self) -> Chain:
        """Without the prompt's bytes, which only `reach`, cuts and `added` need."""
        return replace(self, data=b"", samples=(), long_texts=self.long_texts and self.long_texts.without_text())

    def reach(self, index: int, tail: int, check: int) -> int | None:
        """Bytes of this prompt that a prefix found at `keys[index]` covers; None if its tail is another text."""
        end = self.ends[index] + tail
        if not tail:
            return end
        if end > len(self.data):
            return None
        state = self.hasher.start(b"B", self.keys[index])
        state.update(self.data[self.ends[index] : end])
        return end if finished(state) & 0xFFFFFFFF == check else None
