"""Keyed hashes of texts. Only the proxy knows the secret: a client can neither construct two prompts with one key, nor
test a guess at another's prompt.

SHA-256 makes all keys. The byte 0xFF ends every string that it hashes, as UTF-8 never holds it, so no length has to be
known in advance. What a message says stands there as `T` and 16 bytes: the text's own keyed digest, which can be made
while a reply streams. With the CPU's instructions for it that is POLYVAL, at ten times the speed of SHA-256; elsewhere
it is SHA-256 too. docs/prefix-keys.md says why nobody can make two texts with one key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence, Sized
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import msgspec

from .. import plane
from ..errors import ConfigError

if TYPE_CHECKING:
    from hashlib import _Hash

    from ..plane.text_hash import Places

KEY_BITS = 60
"""Two of CPython's 30-bit digits: 32 bytes of memory, not 48. Among 2 million keys, two collide in 1 run of 500,000."""

_BEYOND_KEY = 64 - KEY_BITS

USUAL_KEYS = 1024

KNOWN_UNITS_BYTES = 16 << 20
"""Of units that are kept of messages which are no plain texts: some 50,000, as 400 chats with 120 of these have."""

PLACE_BYTES = 230  # that one takes beside its own bytes: two objects, and a place in a table

KEPT_UNITS = 100_000
"""Of lists that many prompts have: at most 10 MB."""

LONG_BYTES = 4096
"""Longer texts can be cut: see `text_cuts`."""

_MIN_SECRET_BYTES = 16
DIGEST_BYTES = 16  # of a text
_POINT_CONTEXT = b"ppd-router 2026-11-30 proxy.sessions.hasher: the point at which texts are evaluated"
END = b"\xff"
TEXT = b"T"  # before a text's digest
CUT = b"\xfd"  # before that of its beginning; UTF-8 never holds it
_ROLES = {role: role.encode() + 3 * END for role in ("system", "user", "assistant", "tool", "developer")}
_IN_RUNS = {role: before for role, before in _ROLES.items() if role != "system"}  # not every text of it counts


class Units(msgspec.Struct, frozen=True, gc=False):
    """A list that many prompts have, hashed without what is before it: `ends[i]` is the size of its first i + 1."""

    keys: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


NO_UNITS = Units()


class TextInBody(Protocol):
    """A text that is made when it is asked for."""

    @property
    def utf8(self) -> bytes: ...


LongUnit = tuple[int, bytes, TextInBody, int]
"""A unit that is one text of more than `LONG_BYTES`: the key before it, what is hashed before the text, the text, and
the bytes of the prompt before the unit."""

ManyUnits = tuple[Sequence[int], Sequence[int], bytes | bytearray, Sequence[LongUnit]]
"""Units of messages: keys, ends, a letter for who says each, and which of them are one long text."""


class OpenText(Protocol):
    """A text that comes in pieces."""

    def update(self, data: bytes | memoryview) -> None: ...
    def copy(self) -> OpenText: ...
    def digest(self) -> bytes:
        """`DIGEST_BYTES`, of what has come so far."""


class UncompiledText:
    """What `plane.TextDigest` is, for machines without it: a keyed SHA-256."""

    __slots__ = ("_state",)

    def __init__(self, state: _Hash) -> None:
        """state: of the secret alone."""
        self._state = state

    def update(self, data: bytes | memoryview) -> None:
        self._state.update(data)

    def copy(self) -> UncompiledText:
        return UncompiledText(self._state.copy())

    def digest(self) -> bytes:
        return self._state.digest()[:DIGEST_BYTES]


def no_units(messages: list[Any], at: int, previous: int, size: int, around: int, places: Places | None) -> ManyUnits:
    """Those of the messages from `at` on, up to the first that is neither a text nor known.

    Compiled code takes all of them in one step; without it each is hashed by itself. size: of the prompt before them.
    around: what a unit has beside its text. places: of calls, once the prompt has had one.
    """
    return (), (), b"", ()


T = TypeVar("T", bound=Sized)


class AskedLately(Generic[T]):
    """What was made of some bytes, by their digests: of what was asked for last, as much as takes `most_bytes` of
    memory; never more than twice that. The length of one is what it takes beside its place."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._newer: dict[bytes, T] = {}
        self._older: dict[bytes, T] = {}
        self._bytes = 0  # of the newer ones

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def find(self, digest: bytes) -> T | None:
        found = self._newer.get(digest)
        if found is None and (found := self._older.pop(digest, None)) is not None:
            self.add(digest, found)
        return found

    def add(self, digest: bytes, made: T) -> None:
        size, before = PLACE_BYTES + len(made), self._newer.get(digest)
        if before is not None:
            self._bytes -= PLACE_BYTES + len(before)
        if self._bytes + size > self._most:
            self._older, self._newer, self._bytes = self._newer, {}, 0
        self._newer[digest] = made
        self._bytes += size


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
        # POLYVAL takes a tenth of SHA-256's time: 4 KB take 0.2 us, not 2.0. Both are told other parts of the secret.
        self.point: plane.TextPoint | None = None  # by which compiled code hashes texts
        self._texts: plane.TextHash | None = None
        self.many_units: Callable[[list[Any], int, int, int, int, Places | None], ManyUnits] = no_units
        self.digest: Callable[[bytes | memoryview], bytes] = self._slow_digest  # of a text as a whole
        if plane.IS_FAST:
            self.point = point = plane.TextPoint(hashlib.sha512(_POINT_CONTEXT + secret).digest()[:DIGEST_BYTES])
            self._texts = plane.TextHash(block, point, KEY_BITS, _IN_RUNS, LONG_BYTES)
            self.digest = point.digest_of
            self.many_units, self.open_text = self._texts.run, cast("Callable[[], OpenText]", point.open)
        else:
            self.open_text = lambda: UncompiledText(self.start(b"Y"))
        self._once: dict[int, tuple[int, int]] = {}
        self._lists: dict[int, Units] = {}
        self._listed = 0  # units in them
        self.known_heads: dict[tuple[int, int], bytes] = {}  # see `text_cuts`
        self.known_units = AskedLately[bytes](KNOWN_UNITS_BYTES)  # packed, by their messages
        self.known_systems: dict[tuple[int, int], tuple[int, int]] = {}  # see `PromptReader`
        self.usual_key = lru_cache(USUAL_KEYS)(self.key)  # cached, for what nearly every request has again

    def start(self, domain: bytes, previous: int = 0, first: bytes = b"") -> _Hash:
        """A running hash that continues from a key; `domain` (one byte) keeps different uses apart."""
        state = self._root.copy()
        state.update(domain + previous.to_bytes(8, "little") + first)
        return state

    def _slow_digest(self, text: bytes | memoryview) -> bytes:
        whole = self.open_text()
        whole.update(text)
        return whole.digest()

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
        """A number for exactly these bytes, by which to remember what was made of them."""
        return int.from_bytes(self.digest(raw), "little")

    def text_unit(self, previous: int, role: str, name: str | None, call_id: str | None, text: bytes) -> int:
        """The key of a `UnitHash` with one text that is not empty, in one step: nearly all messages are that."""
        before = before_parts(role, name, call_id)
        if self._texts is not None:
            return self._texts.key(previous, before, text)
        return finished(self.start(b"U", previous, before + text_part(self.digest(text))))

    def unit(self, previous: int, said: bytes) -> int:
        """The key of a unit that hashes these bytes."""
        if self._texts is not None:
            return self._texts.unit_key(previous, said)
        return finished(self.start(b"U", previous, said))

    def call_key(self, key: int, id: str) -> int:
        """Of a tool call, by the key that it has without its id; empty: that one."""
        return finished(self.start(b"C", key, encoded(id) + END)) if id else key

    def known_unit(self, previous: int, unit: bytes, places: Places) -> int:
        """The key of one of the known units, which compiled code alone finds."""
        assert self._texts is not None
        return self._texts.known_key(previous, unit, places)

    def message_unit(self, previous: int, before: bytes, message: plane.PlainMessage) -> int:
        """As `text_unit`, of a message that was found in a body. before: by `before_parts`."""
        if self._texts is not None:
            return self._texts.message_key(previous, before, message)
        return finished(self.start(b"U", previous, before + text_part(self.digest(message.utf8))))

    def cuts(self, domain: bytes, previous: int, before: bytes, text: bytes, offsets: list[int]) -> list[int]:
        """Keys of the beginnings of a text that end at these offsets, which rise."""
        if self._texts is not None:
            return self._texts.cuts(domain + CUT, previous, before, text, offsets)
        return self.cuts_after(self.start(domain, previous, before), text, offsets)

    def cuts_after(self, state: _Hash, text: bytes, offsets: list[int]) -> list[int]:
        """The same after what a running hash has taken."""
        keys, opened, at, view = list[int](), self.open_text(), 0, memoryview(text)
        for offset in offsets:
            opened.update(view[at:offset])
            at, cut = offset, state.copy()
            cut.update(CUT + opened.digest())
            keys.append(finished(cut))
        return keys


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


def text_part(digest: bytes) -> bytes:
    """What stands for a text in the hash of its unit."""
    return TEXT + digest


def key_part(kind: bytes, key: int) -> bytes:
    """What stands for a part with a key of its own there. kind: one byte other than T."""
    return kind + key.to_bytes(8, "little")
