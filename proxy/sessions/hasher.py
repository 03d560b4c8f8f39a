"""Keyed hashes of texts. Only the proxy knows the secret: a client can neither construct two prompts with one key, nor
test a guess at another's prompt.

The byte 0xFF ends every string, as UTF-8 never holds it. So no length has to be known in advance, and a reply can be
hashed while it streams. SHA-256 hashes everything except what a text holds beyond its first 4 KiB. A keyed BLAKE3
hashes that, and its digest follows the first 4 KiB, after the byte 0xFE, which UTF-8 never holds either. So a text
reads `T text FF` or `T 4,096 bytes FE digest FF`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import msgspec
from blake3 import blake3

from .. import plane
from ..errors import ConfigError

if TYPE_CHECKING:
    from hashlib import _Hash

KEY_BITS = 60
"""Two of CPython's 30-bit digits: 32 bytes of memory, not 48. Among 2 million keys, two collide in 1 run of 500,000."""

_BEYOND_KEY = 64 - KEY_BITS

USUAL_KEYS = 1024

KEPT_UNITS = 100_000
"""Of lists that many prompts have: at most 10 MB."""

HEAD_BYTES = 4096
"""How much of a unit's text SHA-256 hashes. BLAKE3 hashes the rest, so only longer texts hold its state of 2 KB."""

_BEYOND_CONTEXT = "ppd-router 2026-11-22 proxy.chain: texts beyond their first 4 KiB"
_MIN_SECRET_BYTES = 16
_DIGEST_BYTES = 32
END = b"\xff"
_ROLES = {role: role.encode() + 3 * END for role in ("system", "user", "assistant", "tool", "developer")}
_BEFORE_TEXTS = {role: before + b"T" for role, before in _ROLES.items()}
_IN_RUNS = {role: before for role, before in _BEFORE_TEXTS.items() if role != "system"}  # not every text of it counts
BEYOND = b"\xfe"


class Units(msgspec.Struct, frozen=True, gc=False):
    """A list that many prompts have, hashed without what is before it: `ends[i]` is the size of its first i + 1."""

    keys: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


NO_UNITS = Units()

LongUnit = tuple[int, bytes, bytes, int]
"""A unit that is one text of more than `HEAD_BYTES`: the key before it, what is hashed before the text, the text, and
the bytes of the prompt before the unit."""

TextUnits = tuple[Sequence[int], Sequence[int], Sequence[bytes], bytes | bytearray, Sequence[LongUnit]]
"""Units that are one text each: keys, ends, texts, the first letters of the roles, and which of them are long."""


def no_text_units(messages: list[Any], at: int, previous: int, size: int, around: int) -> TextUnits:
    """Those of the messages from `at` on, up to the first that is anything but a text.

    Compiled code takes all of them in one step; without it each is hashed by itself. size: of the prompt before them.
    around: what a unit has beside its text.
    """
    return (), (), (), b"", ()


class Hasher:
    """All keyed hashing: one for the life of the process, and nobody else knows its secret."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _MIN_SECRET_BYTES:
            raise ConfigError(f"the hashing secret must have at least {_MIN_SECRET_BYTES} bytes")
        self.secret = secret  # for the process that hashes large prompts
        # SHA-256, because CPUs have instructions for it: half of BLAKE2's time. The secret fills the first block, which
        # is hashed once, here. A key is only a part of a digest, so nobody can continue a hash from it.
        block = hashlib.sha512(secret).digest()
        self._root = hashlib.sha256(block)
        # BLAKE3 hashes many blocks of a long text in parallel, with AVX-512 in a quarter of SHA-256's time: 130 KB take
        # 25 us, not 91; 26 KB take 7 us, not 19. 100 bytes take 0.5 us with both, but its state is 2.0 KB, not 0.2.
        # Its key is derived from the secret separately, so neither hash says anything about the other.
        self._beyond = blake3(key=blake3(secret, derive_key_context=_BEYOND_CONTEXT).digest())
        ends = partial(long_end, self._beyond)
        self._texts = plane.TextHash(block, KEY_BITS, _IN_RUNS, END, HEAD_BYTES, ends) if plane.IS_FAST else None
        self.text_units = no_text_units if self._texts is None else self._texts.run
        self._once: dict[int, tuple[int, int]] = {}
        self._lists: dict[int, Units] = {}
        self._listed = 0  # units in them
        self.known_heads: dict[tuple[int, int], bytes] = {}  # see `text_cuts`
        self.usual_key = lru_cache(USUAL_KEYS)(self.key)  # cached, for what nearly every request has again

    def start(self, domain: bytes, previous: int = 0, first: bytes = b"") -> _Hash:
        """A running hash that continues from a key; `domain` (one byte) keeps different uses apart."""
        state = self._root.copy()
        state.update(domain + previous.to_bytes(8, "little") + first)
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
            end, text = long_end(self._beyond, text), text[:HEAD_BYTES]
        before = None if name or call_id else _BEFORE_TEXTS.get(role)
        if before is None:
            before = before_parts(role, name, call_id) + b"T"
        if self._texts is not None:
            return self._texts.key(previous, before, text, end)
        state = self._root.copy()
        state.update(b"".join((b"U", previous.to_bytes(8, "little"), before, text, end)))
        return finished(state)


def finished(state: _Hash) -> int:
    """The key that a running hash has now; the hash itself can be continued."""
    return int.from_bytes(state.digest()[:8], "little") >> _BEYOND_KEY


def before_parts(role: str, name: str | None, call_id: str | None) -> bytes:
    """What a unit's hash begins with."""
    if not name and not call_id and role in _ROLES:  # nearly always
        return _ROLES[role]
    return b"".join((encoded(role), END, encoded(name or ""), END, encoded(call_id or ""), END))


def encoded(text: str) -> bytes:
    """UTF-8, for any `str`: a lone surrogate is not an error here."""
    return text.encode("utf-8", "surrogatepass")


def text_end(beyond: blake3 | None) -> bytes:
    return END if beyond is None else b"".join((BEYOND, beyond.digest(_DIGEST_BYTES), END))


def long_end(beyond: blake3, text: bytes) -> bytes:
    """What ends a text of more than `HEAD_BYTES` behind these. beyond: the hash of nothing."""
    return text_end(beyond.copy().update(memoryview(text)[HEAD_BYTES:]))
