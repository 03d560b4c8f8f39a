"""Beginnings of prompts that were read before: the next turn of a conversation is read from there on.

Nearly all of a chat's body is what the turn before has sent. Lists that begin with the same bytes say the same there.
So what was made of a beginning is kept. It is found by the keyed digest of the list's bytes up to a point before its
end (`POINTS`), of which one pass over a body makes all, and known by the digest of the rest.

A beginning ends between two messages, behind one that is no reply: no round of calls is open there. Nothing is kept of
what its messages say. Where one of them is to be cut (`text_cuts`), all of the body is read again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from ... import plane
from ...sessions.hasher import AskedLately
from .messages import FOUND_MESSAGE, is_reply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...sessions.hasher import Hasher
    from ...sessions.prefix_chain import LongTexts

_GRAIN = 8 * 1024
_SHORTEST, _LONGEST = 32 * 1024, 1024 * 1024

WORTH_BYTES = 24 * 1024
"""By so much a beginning must be longer than the one that is known: to learn it takes as long as to read some 20 KB."""

KNOWN_BYTES = 8 << 20
"""Of beginnings. One of 100 messages takes 2 KB, so these are the last 4,000."""

MOST_SEEN = 32_768

_OWN_BYTES = 440  # of a beginning without messages
_SYSTEM_BYTES = 120  # of a system's key and size

_PART_WEIGHS = 1
"""`plane.messages_at` counts 2 for what is around a list, with each part of one that is read. One of them stays, for
the escapes that are rounded off there."""

LEFT_REPLIES, LEFT_BYTES = 3, 16 * 1024
"""How many of a prompt's newest replies, if it has so many, or how much of its list no beginning has that is learned:
some clients change their newest messages from turn to turn, as they move `cache_control`. Where those are long, an
older beginning is found."""

_LOOKED_AT = 256  # newest messages, for the place where a beginning ends


def _points() -> list[int]:
    found = [_SHORTEST]
    while found[-1] < _LONGEST:
        found.append(found[-1] + max(1, found[-1] // (16 * _GRAIN)) * _GRAIN)
    return found


POINTS = _points()
"""Bytes from a list's start on: every 8 KiB, and from 256 KiB on wherever it has grown by a sixteenth. To know less is
not worth its while."""


class Beginning(msgspec.Struct, frozen=True, gc=False):
    """The first messages of a list, as they were read behind one head."""

    end: int  # of its last message, in bytes from the list's start
    weighs: int  # at least, as `plane.bones` weighs it
    seed: int
    mask: int  # of the head, in the keys
    head_size: int  # bytes of the prompt before the messages, in the ends
    prints_call_ids: bool  # the template does
    can_be_cut: bool  # a text in it is long enough
    calls: int  # so many are in it; -1: nor is any result
    is_beside: bool  # the system's text is no message
    system: tuple[int, int] | None  # key and size of the first message, if that is the system's and not among the units
    keys: array[int]  # of units
    ends: array[int]
    letters: bytes  # for who says them
    kinds: bytes  # of the newest units' texts
    check: bytes = b""  # the digest of what is behind the last point in it

    def __len__(self) -> int:
        """Bytes that it takes."""
        own = _OWN_BYTES + _SYSTEM_BYTES * (self.system is not None)
        return own + 12 * len(self.keys) + len(self.letters) + len(self.kinds)


class Begun:
    """How one body's list begins: what is known of that, and, once it has been read, what is learned."""

    __slots__ = ("cuts", "digests", "found", "known", "name", "seen", "start", "weighs")

    def __init__(self, start: int, name: bytes, seen: int) -> None:
        """start: of the list in the body. name: of whose it is. seen: names what is before the first point."""
        self.start = start
        self.name = name
        self.seen = seen
        self.digests: list[bytes] = []  # of what lies between there and each point, where something may be known
        self.known: Beginning | None = None
        self.weighs = 0  # the part of the list that is read
        self.cuts: LongTexts | None = None  # the prompt's, where its beginning is known
        self.found: Beginning | None = None  # without its check

    def anew(self) -> Begun:
        """To read all of the body."""
        begun = Begun(self.start, self.name, self.seen)
        begun.digests = self.digests
        return begun

    def weighs_before(self, messages: Sequence[plane.PlainMessage | plane.FoundMessage], stop: int) -> int:
        """What all that comes before the message at `stop` weighs, at least."""
        left = messages[-1].weighs - messages[stop - 1].weighs
        left += sum(plane.bones(one.raw)[2] for one in messages[stop:] if type(one) is FOUND_MESSAGE and not one.unit)
        return (0 if self.known is None else self.known.weighs) + self.weighs - _PART_WEIGHS - left

    def stop(self, messages: Sequence[plane.PlainMessage | plane.FoundMessage]) -> int:
        """Which message comes first behind a beginning that is worth to be learned; 0: there is none."""
        least = self.start + (POINTS[0] if self.known is None else self.known.end + WORTH_BYTES)
        if not messages or messages[-1].end < least:
            return 0
        stop, left = 0, LEFT_REPLIES
        for at in range(len(messages) - 1, max(0, len(messages) - _LOOKED_AT), -1):
            if is_reply(messages[at]) and not is_reply(messages[at - 1]):
                stop, left = at, left - 1
                if not left or messages[-1].end - messages[at - 1].end > LEFT_BYTES:
                    break
        return stop if stop and messages[stop - 1].end >= least else 0


class KnownBeginnings:
    """Those of one endpoint's prompts, with one set of templates."""

    least_bytes = POINTS[0]  # of a list that is worth to be asked for

    def __init__(self) -> None:
        self._kept = AskedLately[Beginning](KNOWN_BYTES)
        # By the hash of what is before the first point: whether more of it is known. What comes once is not learned.
        self._seen: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, hasher: Hasher, tenant: str, before: bytes, body: bytes, start: int) -> Begun | None:
        """start: of the list. before: the digest of what is before it. None where the list is short or comes once, or
        no digests are made."""
        point = hasher.point
        first = [] if point is None else point.digests_of(body, start, POINTS[:1])
        if point is None or not first:
            return None
        name = hasher.digest(before + tenant.encode())
        seen = hash(first[0] + name)
        is_known = self._seen.get(seen)
        if is_known is None:
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()
            self._seen[seen] = False
            return None
        begun = Begun(start, name, seen)
        if is_known:
            begun.digests, view = point.digests_of(body, start, POINTS), memoryview(body)[start:]
            for digest, at in zip(reversed(begun.digests), reversed(POINTS[: len(begun.digests)]), strict=True):
                known = self._kept.find(digest + name)
                if known is not None and hasher.digest(view[at : known.end]) == known.check:
                    begun.known = known
                    break
        return begun

    def learn(self, hasher: Hasher, body: bytes, begun: Begun) -> None:
        """What the reader has found."""
        found, point = begun.found, hasher.point
        if found is None or point is None:
            return
        at = bisect_right(POINTS, found.end) - 1
        digest = begun.digests[at] if begun.digests else point.digests_of(body, begun.start, [POINTS[at]])[0]
        check = hasher.digest(memoryview(body)[begun.start + POINTS[at] : begun.start + found.end])
        self._kept.add(digest + begun.name, replace(found, check=check))
        self._seen[begun.seen] = True
