"""Chained keyed hashes that name each prefix of a conversation and keep nothing of its text.

A chain starts at a seed: tenant, model, endpoint, salt, and what changes how all of the prompt is rendered. Each
*unit* turns the key so far into the next one, so equal keys mean equal prefixes: each tool and the system's text (see
`prompt_head`), then each message or item.

Raw prompts of `/v1/completions` have no units. They are cut into blocks whose ends depend on the offset only: 16
bytes at first, and from 4 KiB on 1/128 to 1/256 of the offset, so a 64 MiB prompt takes under 3,000 hashes. A prefix
that ends inside a block is known by the block's start, and by the length and a hash of its tail (`PrefixEnd`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec.structs import force_setattr, replace

from .hasher import Hasher, TextInBody, before_parts, encoded, finished, key_part, text_part

if TYPE_CHECKING:
    from hashlib import _Hash

    from ..plane.text_hash import Places
    from .hasher import OpenText

UNIT_OVERHEAD_BYTES = 16
"""What a chat template adds around a message (role, separators): about four tokens."""

_MIN_BLOCK_BYTES = 16


class PrefixEnd(msgspec.Struct, frozen=True):
    """Where a prefix ends: the key to look it up by and, inside a block, what follows the block's start."""

    key: int
    tail: int = 0  # bytes after the point that `key` names
    check: int = 0  # a hash of those bytes in 32 bits, chained to `key`; 0 where there are none


TextOrKind = str | bytes | TextInBody | int | None
"""A unit's longest text, or its kind where that is known (see `text_kinds`); None: media."""


class LongTexts(Protocol):
    """The texts of one prompt that are long enough to be cut: see `text_cuts`."""

    @property
    def known(self) -> Sequence[tuple[int, int]]: ...
    def cuts(self, hasher: Hasher) -> Sequence[tuple[int, int]]: ...
    def without_text(self) -> LongTexts | None: ...


class NotesTexts(Protocol):
    """Is told the texts of a prompt that are long enough to be cut, as they are hashed."""

    def note(self, state: _Hash, text: bytes, offset: int) -> None: ...


class Marks(msgspec.Struct, frozen=True, gc=False):
    """Which of a chain's keys ends each part of the prompt; 0, the seed's place, where there is no such part.

    The later one of `tools` and `system` is the whole head, `head`; see `Chain.head`.
    """

    tools: int = 0  # the last tool
    system: int = 0  # the system's text
    first_user: int = 0  # the first message by the user
    last_user: int = 0  # the newest one; results of tools are not by the user
    last_reply: int = 0  # the newest message by the assistant, or the last of its items
    reasons: bool = False  # that reply comes with its reasoning, which has no key
    tools_first: bool | None = None  # by the model's template; None: not known, and here the system's text is
    head: int = 0

    def __post_init__(self) -> None:
        force_setattr(self, "head", self.tools if self.tools > self.system else self.system)

    def with_messages(self, first_user: int, last_user: int, last_reply: int, *, reasons: bool) -> Marks:
        return Marks(self.tools, self.system, first_user, last_user, last_reply, reasons, self.tools_first)


NO_MARKS = Marks()


@lru_cache(maxsize=1024)
def _shared(marks: Marks) -> Marks:
    """One object for all prompts of the same shape: most are of few."""
    return marks


class ResultUnit(Protocol):
    """The unit of a tool's result that is a part of a message."""

    @property
    def size(self) -> int: ...
    @property
    def text(self) -> str | None: ...
    def key_after(self, previous: int, places: Any, unit_key: Callable[[int, bytes], int]) -> int: ...


def longer(one: str | None, other: str | None) -> str | None:
    """By the longest text of a unit its tokens are counted; None: it holds media."""
    return None if one is None or other is None else max(one, other, key=len)


class UnitHash:
    """One unit as it is hashed. It grows only at its end, so a reply can be hashed as it streams."""

    __slots__ = ("_hasher", "_long_texts", "_open", "_state", "size", "text")

    def __init__(
        self,
        hasher: Hasher,
        previous: int,
        role: str,
        name: str = "",
        call_id: str = "",
        long_texts: NotesTexts | None = None,
    ) -> None:
        """long_texts: notes the texts that can be cut; each is then added in one piece."""
        self._hasher = hasher
        self._long_texts = long_texts
        self._state = hasher.start(b"U", previous, before_parts(role, name, call_id))
        self._open: OpenText | None = None  # the text that may go on
        self.size = UNIT_OVERHEAD_BYTES
        self.text: str | None = ""  # the longest that it was shown; see `longer`

    def show(self, text: str | None) -> None:
        self.text = longer(self.text, text)

    def begin_text(self) -> None:
        """The next `add_text` begins a text part of its own."""
        if self._open is not None:
            self._state.update(text_part(self._open.digest()))
            self._open = None

    def add_text(self, text: str) -> None:
        """More of the open text part, or the start of one. Empty text changes nothing."""
        if text:
            self.add_utf8(encoded(text))

    def add_utf8(self, data: bytes) -> None:
        """As `add_text`, with a text's bytes, which must not be empty."""
        if self._open is None:
            self._open = self._hasher.open_text()
            if self._long_texts is not None:
                self._long_texts.note(self._state, data, self.size)
        self._open.update(data)
        self.size += len(data)

    def add_part(self, kind: bytes, key: int, size: int) -> None:
        """A part with a key of its own: media, a tool call, a tool's result. `kind` is one byte other than T."""
        self.begin_text()
        self._state.update(key_part(kind, key))
        self.size += size

    def add_call(self, id: str, key: int, size: int, places: Places) -> None:
        """key: the call's, without its id."""
        self.add_part(b"C", self._hasher.call_key(key, places.call(id)), size)

    def add_result(self, result: ResultUnit, places: Places) -> None:
        self.add_part(b"R", result.key_after(0, places, self._hasher.unit), result.size)
        self.show(result.text)

    def copy(self) -> UnitHash:
        twin = object.__new__(UnitHash)
        twin._hasher, twin._state = self._hasher, self._state.copy()
        twin._long_texts = None
        twin._open = None if self._open is None else self._open.copy()
        twin.size, twin.text = self.size, ""
        return twin

    def key(self) -> int:
        if self._open is None:
            return finished(self._state)
        state = self._state.copy()
        state.update(text_part(self._open.digest()))
        return finished(state)


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

    keys: Sequence[int]
    ends: Sequence[int]
    hasher: Hasher
    data: bytes | memoryview = b""
    tail: bytes = b""
    is_text: bool = False
    open_unit: UnitHash | None = None
    marks: Marks = NO_MARKS
    is_blocks: bool = False  # it was hashed in blocks
    long_texts: LongTexts | None = None
    texts: tuple[TextOrKind, ...] = ()  # of the newest units
    size: int = 0  # its bytes
    head_mask: int = 0
    """What tools and system change in each key after them, by XOR: without it, keys name the conversation alone."""

    def __post_init__(self) -> None:
        if self.size:  # it was made of another one, with the same keys
            return
        keys, head = self.keys, self.marks.head
        force_setattr(self, "size", self.ends[-1] + len(self.tail))
        force_setattr(self, "head_mask", keys[head] ^ keys[0] if head else 0)

    def __repr__(self) -> str:
        return f"Chain(keys={self.keys}, ends={self.ends})"  # without the prompt

    def sizes(self) -> dict[int, int]:
        """The bytes of the prompt at each key."""
        return dict(zip(self.keys, self.ends, strict=True))

    def end(self) -> PrefixEnd:
        return self.resume().end() if self.tail else PrefixEnd(self.keys[-1])

    def head(self, *, tools_first: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Keys and ends from the seed to the end of the head, in one of the two orders: see `prompt_head`.

        What the seed holds counts to the first unit in the chain's own order, and to the last in the other.
        """
        tools, system = self.marks.tools, self.marks.system
        keys, ends = tuple(self.keys[: self.marks.head + 1]), tuple(self.ends[: self.marks.head + 1])
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
        """Without the prompt's bytes, which only `reach`, cuts and `added` need.

        Keys and ends are in arrays then: as objects each number takes five times as much, and a chat may be long.
        """
        keys, ends, cuts = array("Q", self.keys), array("Q", self.ends), self.long_texts
        cuts, marks = None if cuts is None else cuts.without_text(), _shared(self.marks)
        return replace(self, keys=keys, ends=ends, data=b"", texts=(), long_texts=cuts, marks=marks)

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
