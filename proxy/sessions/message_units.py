# cython: language_level=3, annotation_typing=False, infer_types=True
"""What a message adds to a chain, apart from what comes before it: worked out once, for all prompts that hold it.

An agent sends each call and each result again with every turn. All that the unit of a message hashes is in the message
itself, but for the key before it, and for the places of calls. So it is kept as the bytes that it hashes, with gaps for
those places: packed, as there are many, and read by compiled code alone (`plane/text_hash`).

Most chat templates do not print the ids of calls, and some clients number them anew in each request. So a call has no
id in its hash, as its place is known from what was hashed before it, and a result has the place of the call that it
names. Where the template prints ids (`templates`) they are hashed as they are.
"""

from __future__ import annotations

from collections import deque
from struct import Struct
from typing import TYPE_CHECKING

from .hasher import END, LONG_BYTES, Hasher, before_parts, encoded, finished, key_part, text_part
from .prefix_chain import UNIT_OVERHEAD_BYTES, longer
from .text_kinds import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from hashlib import _Hash

    from .prefix_chain import NotesTexts

KEPT_BYTES = 2048
"""A unit that takes more is not kept. Nearly all take 50 to 300: a text is there as its digest, a call as its key."""

# How a unit is packed, in little-endian numbers: the letter for who says it, whether it is a call, the kind of its
# text, its size, what its message weighs, and the lengths of what it begins with and of the id that it answers. Both
# follow, and then its steps, each a letter, a length and so many bytes: what is hashed; or a call's key without its id,
# and its id; or a result, packed likewise.
_HEAD = Struct("<BBBxIIHH")
_STEP = Struct("<BH")
_SAID, _CALLED, _RESULT = b"SCR"
_NOBODY = before_parts("", "", "")


def packed_thought(weighs: int) -> bytes:
    """As `MessageUnit.packed`, of reasoning: an item that adds nothing."""
    return _HEAD.pack(0, False, 0, 0, weighs, len(_NOBODY), 0) + _NOBODY


class PartNotRead(Exception):
    """What a prompt says depends on a part of it that was not read again."""


class CallPlaces:
    """What is hashed in place of the ids of a prompt's tool calls, which are told in the order of the prompt."""

    __slots__ = ("_answered", "_as_they_are", "_fresh", "_is_whole", "_open", "count")

    def __init__(self, *, as_they_are: bool = False, before: int | None = None) -> None:
        """before: how many calls are in the beginning of the prompt, if that is not told again; it ends between two
        rounds. A result of one of them raises PartNotRead."""
        self._as_they_are = as_they_are
        self._is_whole = before is None
        self.count = before or 0  # calls so far
        self._open: dict[str, deque[int]] = {}  # places of calls without a result, by id, since its newest round
        self._answered: dict[str, int] = {}  # the place that the newest result of each id stands for
        self._fresh: set[str] = set()  # ids of the calls of this round

    @property
    def is_in_round(self) -> bool:
        """Whether calls that come next may be of the round of those before them."""
        return bool(self._fresh)

    def begin_round(self) -> None:
        """The next calls are another message's: an id that they repeat is theirs from now on."""
        if self._fresh:
            self._fresh = set()

    def call(self, id: str | None) -> str:
        if self._as_they_are:
            return id or ""
        self.count += 1
        if id and id not in self._fresh:
            self._fresh.add(id)
            self._open[id] = deque((self.count,))
        elif id:
            self._open[id].append(self.count)
        return ""

    def result(self, id: str | None) -> str:
        """Of calls with the same id in one round, the first that has no result yet. An unknown id stands for itself."""
        if self._as_they_are or not id:
            return id or ""
        places = self._open.get(id)
        if places:
            self._answered[id] = places.popleft()
        place = self._answered.get(id)
        if place is None and not self._is_whole:
            raise PartNotRead
        return f"={id}" if place is None else f"#{place}"


class _Call:
    """A call: its id, and its key without it."""

    __slots__ = ("id", "key")

    def __init__(self, id: str, key: int) -> None:
        self.id, self.key = id, key


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
        "size",
        "text",
    )

    def __init__(self, hasher: Hasher, role: str, name: str, answers: str, *, is_part: bool = False) -> None:
        """answers: the id of the call whose result it is; empty: it is none. is_part: its texts cannot be cut."""
        self._hasher = hasher
        self._before, self._answers, self._is_part = before_parts(role, name, ""), answers, is_part
        self._steps: list[bytes | _Call | MessageUnit | _LongText] = []
        self._said: list[bytes] = []  # behind the last step
        self.size = UNIT_OVERHEAD_BYTES
        self.text: str | None = ""  # the longest that it was shown; see `longer`
        self.kind: int | None = None  # the kind of that text, once it is packed
        self.is_cut = False  # it holds a text that can be cut
        self.letter = 0  # for who says it; 0: nobody, as it is reasoning
        self.is_call = False  # it is an item: calls that follow one another are of one round

    def key_after(
        self, previous: int, places: CallPlaces, unit_key: Callable[[int, bytes], int], cuts: NotesTexts | None = None
    ) -> int:
        """unit_key: `Hasher.unit`. cuts: is told of the texts that can be cut."""
        said, state = [self._before], None
        if self._answers:
            said = [self._before[:-1], encoded(places.result(self._answers)), END]
        for step in self._steps:
            if type(step) is bytes:
                said.append(step)
            elif type(step) is _Call:
                said.append(key_part(b"C", self._hasher.call_key(step.key, places.call(step.id))))
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
        self._said.append(text_part(self._hasher.digest(data)))
        self.size += len(data)

    def add_part(self, kind: bytes, key: int, size: int) -> None:
        """A part with a key of its own. `kind` is one byte other than T."""
        self._said.append(key_part(kind, key))
        self.size += size

    def add_call(self, id: str, key: int, size: int, places: CallPlaces) -> None:
        """key: the call's, without its id."""
        self._add_step(_Call(id, key))
        self.size += size

    def add_result(self, result: MessageUnit, places: CallPlaces) -> None:
        self._add_step(result)
        self.size += result.size
        self.show(result.text)

    def show(self, text: str | None) -> None:
        self.text = longer(self.text, text)

    def packed(self, weighs: int) -> bytes | None:
        """For later prompts, without its text; None: it is not to be kept. weighs: as `plane.bones` has its message."""
        if self.is_cut:
            return None
        self.kind = kind_of(self.text)
        return self._packed(KEPT_BYTES, self.kind, weighs)

    def _packed(self, room: int, kind: int, weighs: int) -> bytes | None:
        """None where it takes more than there is room for."""
        self._end_step()
        answers = encoded(self._answers)
        room -= _HEAD.size + len(self._before) + len(answers)
        if room < 0:
            return None
        head = _HEAD.pack(self.letter, self.is_call, kind, self.size, weighs, len(self._before), len(answers))
        found = [head, self._before, answers]
        for step in self._steps:
            if type(step) is bytes:
                letter, said = _SAID, step
            elif type(step) is _Call:
                letter, said = _CALLED, step.key.to_bytes(8, "little") + encoded(step.id)
            else:
                assert type(step) is MessageUnit, "none that can be cut is kept"
                result = step._packed(room, 0, 0)
                if result is None:
                    return None
                letter, said = _RESULT, result
            room -= _STEP.size + len(said)
            if room < 0:
                return None
            found += (_STEP.pack(letter, len(said)), said)
        return b"".join(found)

    def _add_step(self, step: _Call | MessageUnit | _LongText) -> None:
        self._end_step()
        self._steps.append(step)

    def _end_step(self) -> None:
        if self._said:
            self._steps.append(b"".join(self._said))
            self._said = []
