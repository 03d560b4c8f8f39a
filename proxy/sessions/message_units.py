# cython: language_level=3, annotation_typing=False, infer_types=True
"""What a message adds to a chain, apart from what comes before it: worked out once, for all prompts that hold it.

An agent sends each call and each result again with every turn. All that the unit of a message hashes is in the message
itself, but for the key before it, and for the places of calls. So it is kept as the bytes that it hashes, with gaps for
those places.

Most chat templates do not print the ids of calls, and some clients number them anew in each request. So a call has no
id in its hash, as its place is known from what was hashed before it, and a result has the place of the call that it
names. Where the template prints ids (`templates`) they are hashed as they are.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from .hasher import END, LONG_BYTES, Hasher, before_parts, encoded, finished, key_part, text_part
from .prefix_chain import UNIT_OVERHEAD_BYTES, longer
from .text_kinds import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from hashlib import _Hash

    from .prefix_chain import LongTexts

KEPT_BYTES = 4096
"""A unit that takes more memory is not kept. Nearly all take a quarter: a text is there as its digest, a call as its
key."""

# Of a unit with its place in a table, of a step that is bytes, and of a call, beside the bytes that they hold.
_UNIT_BYTES, _STEP_BYTES, _CALL_BYTES, _CHARACTER_BYTES = 520, 48, 260, 4


class CallPlaces:
    """What is hashed in place of the ids of a prompt's tool calls, which are told in the order of the prompt."""

    __slots__ = ("_answered", "_as_they_are", "_count", "_fresh", "_open")

    def __init__(self, *, as_they_are: bool = False) -> None:
        self._as_they_are = as_they_are
        self._count = 0
        self._open: dict[str, deque[int]] = {}  # places of calls without a result, by id, since its newest round
        self._answered: dict[str, int] = {}  # the place that the newest result of each id stands for
        self._fresh: set[str] = set()  # ids of the calls of this round

    def begin_round(self) -> None:
        """The next calls are another message's: an id that they repeat is theirs from now on."""
        if self._fresh:
            self._fresh = set()

    def call(self, id: str | None) -> str:
        if self._as_they_are:
            return id or ""
        self._count += 1
        if id and id not in self._fresh:
            self._fresh.add(id)
            self._open[id] = deque((self._count,))
        elif id:
            self._open[id].append(self._count)
        return ""

    def result(self, id: str | None) -> str:
        """Of calls with the same id in one round, the first that has no result yet. An unknown id stands for itself."""
        if self._as_they_are or not id:
            return id or ""
        places = self._open.get(id)
        if places:
            self._answered[id] = places.popleft()
        place = self._answered.get(id)
        return f"={id}" if place is None else f"#{place}"


class _Call:
    """A call, as the part that stands for it in the hash of its unit."""

    __slots__ = ("by_id", "by_place", "id")

    def __init__(self, id: str, by_place: bytes, by_id: bytes) -> None:
        """by_place, by_id: where calls are known by their places; by their ids."""
        self.id, self.by_place, self.by_id = id, by_place, by_id


class _LongText:
    """A text that can be cut. Its digest is in what follows."""

    __slots__ = ("offset", "text")

    def __init__(self, text: bytes, offset: int) -> None:
        """offset: in the unit."""
        self.text, self.offset = text, offset


class MessageUnit:
    """The unit of a message, or of one result of a tool that is a part of a message. It has the steps of `UnitHash`."""

    __slots__ = (
        "_answers",
        "_before",
        "_hasher",
        "_is_part",
        "_said",
        "_steps",
        "is_call",
        "is_cut",
        "kind",
        "letter",
        "memory_bytes",
        "role",
        "size",
        "text",
        "weighs",
    )

    def __init__(self, hasher: Hasher | None, role: str, name: str, answers: str, *, is_part: bool = False) -> None:
        """hasher: until it is kept, as it would be held in turn; None: it has no text. answers: the id of the call that
        it is the result of; empty: it is none. is_part: its texts cannot be cut."""
        self._hasher = hasher
        self._before, self._answers, self._is_part = before_parts(role, name, ""), answers, is_part
        self._steps: list[bytes | _Call | MessageUnit | _LongText] = []
        self._said: list[bytes] = []  # behind the last step
        self.role = role
        self.size = UNIT_OVERHEAD_BYTES
        self.text: str | None = ""  # the longest that it was shown; see `longer`
        self.kind: int | None = None  # the kind of that text, where it is no longer held
        self.is_cut = False  # it holds a text that can be cut
        self.letter = self.weighs = 0  # see `plane.Unit`
        self.is_call = False
        self.memory_bytes = 0  # once it is kept

    def key_after(
        self, previous: int, places: CallPlaces, unit_key: Callable[[int, bytes], int], cuts: LongTexts | None = None
    ) -> int:
        """unit_key: `Hasher.unit`. cuts: is told of the texts that can be cut."""
        said, state = [self._before], None
        if self._answers:
            said = [self._before[:-1], encoded(places.result(self._answers)), END]
        for step in self._steps:
            if type(step) is bytes:
                said.append(step)
            elif type(step) is _Call:
                said.append(step.by_id if places.call(step.id) else step.by_place)
            elif type(step) is MessageUnit:
                said.append(key_part(b"R", step.key_after(0, places, unit_key)))
            elif type(step) is _LongText and cuts is not None:
                state = self._hashed(state, previous, said)
                said = []
                cuts.note(state, step.text, step.offset)
        said += self._said
        if state is None:  # nearly always
            return unit_key(previous, b"".join(said))
        return finished(self._hashed(state, previous, said))

    def _hashed(self, state: _Hash | None, previous: int, said: list[bytes]) -> _Hash:
        if state is None:
            assert self._hasher is not None, "one that is kept has no texts that can be cut"
            return self._hasher.start(b"U", previous, b"".join(said))
        state.update(b"".join(said))
        return state

    def begin_text(self) -> None:
        """Each text that is added is a part of its own in any case."""

    def add_text(self, text: str) -> None:
        """Empty text changes nothing."""
        if not text:
            return
        data = encoded(text)
        if len(data) > LONG_BYTES and not self._is_part:
            self._add_step(_LongText(data, self.size))
            self.is_cut = True
        assert self._hasher is not None, "nothing is added to one that is kept"
        self._said.append(text_part(self._hasher.digest(data)))
        self.size += len(data)

    def add_part(self, kind: bytes, key: int, size: int) -> None:
        """A part with a key of its own. `kind` is one byte other than T."""
        self._said.append(key_part(kind, key))
        self.size += size

    def add_call(self, id: str, key_of: Callable[[str], int], size: int, places: CallPlaces) -> None:
        """key_of: the call's key, by the id that is hashed with it."""
        by_place = key_part(b"C", key_of(""))
        self._add_step(_Call(id, by_place, key_part(b"C", key_of(id)) if id else by_place))
        self.size += size

    def add_result(self, result: MessageUnit, places: CallPlaces) -> None:
        self._add_step(result)
        self.size += result.size
        self.show(result.text)

    def show(self, text: str | None) -> None:
        self.text = longer(self.text, text)

    def keep(self) -> bool:
        """Lets its text go, and keeps the kind of it; False: it is none to be kept."""
        if self.is_cut or self.text is None or (size := self._memory()) > KEPT_BYTES:
            return False
        self.kind, self.memory_bytes = kind_of(self.text), size
        self._pack()
        return True

    def _memory(self) -> int:
        self._end_step()
        found = _UNIT_BYTES + len(self._before) + len(self._answers) * _CHARACTER_BYTES
        for step in self._steps:
            if type(step) is bytes:
                found += _STEP_BYTES + len(step)
            elif type(step) is _Call:
                found += _CALL_BYTES + len(step.id) * _CHARACTER_BYTES
            elif type(step) is MessageUnit:
                found += step._memory()
        return found

    def _pack(self) -> None:
        """Many are kept for long, so the garbage collector is left one object of each to look at."""
        self._steps = tuple(self._steps)  # type: ignore[assignment]
        self._said = ()  # type: ignore[assignment]
        self._hasher, self.text = None, ""
        for step in self._steps:
            if type(step) is MessageUnit:
                step._pack()

    def _add_step(self, step: _Call | MessageUnit | _LongText) -> None:
        self._end_step()
        self._steps.append(step)

    def _end_step(self) -> None:
        if self._said:
            self._steps.append(b"".join(self._said))
            self._said = []
