"""The handles of one process's sessions, each until it is used, D has given up its KV, or the session is elsewhere."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

import msgspec

from ..fleet.worker import WorkerId
from ..kv_events.block_tokens import TOKEN_BYTES, packed
from ..runtime.loop_watch import uptime_s
from .lineage import digest_of

NOT_A_PREFIX = "not_a_prefix"  # the prompt does not begin with the tokens of a handle

MODELS_KEPT = 256
MOST_BYTES = 64 * 1024 * 1024
ENTRY_BYTES = 600  # of one, beside its parameters
MARGIN_S = 10.0  # before D gives up its KV: P gives up a handle 5 s before
LEAST_LEFT_S = 20.0  # for a P to read the KV and compute the rest
REFUSED = 3  # handles of one model whose tokens were no beginning of the prompt, one after the other
REFUSED_S = 600.0  # for how long none of that model is used then


class Handle(msgspec.Struct, frozen=True, gc=False):
    """KV of one session that a D keeps."""

    params: bytes  # JSON that a P is given, checked
    tokens: int
    digest: bytes  # of these tokens
    model: str
    decode: WorkerId
    incarnation: str  # D's
    until_s: float  # by `uptime_s`; D has the KV for longer

    def proves(self, prompt: list[int]) -> bool:
        try:
            return self.begins(packed(prompt))
        except (OverflowError, TypeError):  # of what is no token
            return False

    def begins(self, prompt: bytes) -> bool:
        """Whether the prompt begins with the handle's tokens, and goes on. prompt: as `packed`."""
        size = self.tokens * TOKEN_BYTES
        return len(prompt) > size and digest_of(prompt[:size]) == self.digest

    @property
    def size(self) -> int:
        return ENTRY_BYTES + len(self.params)


class Handles:
    """By the history of their session. Each is given out once. Other processes of the proxy know nothing of them."""

    def __init__(self, uptime: Callable[[], float] = uptime_s, most_bytes: int = MOST_BYTES) -> None:
        self.uptime = uptime
        self._most_bytes = most_bytes
        self._bytes = 0
        self.kept = OrderedDict[int, Handle]()  # the oldest first; for others to read
        # By model: how many in a row, and when the last one was; the longest unrefused first.
        self._refused = dict[str, tuple[int, float]]()

    def __len__(self) -> int:
        return len(self.kept)

    def keep(self, history: int, handle: Handle) -> None:
        """In place of the one before, whose KV is nearly always in this one's."""
        self.drop(history)
        self.kept[history] = handle
        self._bytes += handle.size
        self.expire()
        while self._bytes > self._most_bytes:
            self.drop(next(iter(self.kept)))

    def of(self, history: int) -> Handle | None:
        """One that may still be used."""
        handle = self.kept.get(history)
        if handle is None or self._is_barred(handle.model):
            return None
        return handle if self._is_good(handle) else None

    def take(self, history: int) -> Handle | None:
        """The same, for its one use."""
        handle = self.of(history)
        self.drop(history)
        return handle

    def drop(self, history: int) -> None:
        """D keeps the KV all the same, until its time is over."""
        if (handle := self.kept.pop(history, None)) is not None:
            self._bytes -= handle.size

    def answered(self, history: int, by: WorkerId, gone_on_from: int | None = None) -> None:
        """A session leaves its handle when it moves to another worker, or goes on from fewer tokens than it stands for.

        gone_on_from: how many of the session's tokens the prompt began with; None: it was the prompt before.
        """
        handle = self.kept.get(history)
        if handle is None:
            return
        has_parted = gone_on_from is not None and gone_on_from < handle.tokens
        if handle.decode != by or has_parted:
            self.drop(history)

    def left(self, now: Mapping[WorkerId, str | None]) -> None:
        """These D have begun anew, or (None) are gone: what they kept before is gone too.

        now: by D, its incarnation; all at once, as each look at what is kept may take a millisecond.
        """
        gone = [
            history
            for history, handle in self.kept.items()
            if handle.decode in now and now[handle.decode] != handle.incarnation
        ]
        for history in gone:
            self.drop(history)

    def expire(self) -> None:
        """Drops those whose time is over, up to the first one whose time is not: a later one may wait for it."""
        while self.kept and not self._is_good(next(iter(self.kept.values()))):
            self.drop(next(iter(self.kept)))

    def judged(self, model: str, *, is_prefix: bool) -> None:
        """Whether a P's tokens began with a handle's. A model whose template drops reasoning, say, proves none."""
        if is_prefix:
            self._refused.pop(model, None)
        else:
            times, _ = self._refused.pop(model, (0, 0.0))
            self._refused[model] = times + 1, self.uptime()
            if len(self._refused) > MODELS_KEPT:
                del self._refused[next(iter(self._refused))]

    def _is_good(self, handle: Handle) -> bool:
        return self.uptime() + LEAST_LEFT_S <= handle.until_s

    def _is_barred(self, model: str) -> bool:
        times, at_s = self._refused.get(model, (0, 0.0))
        return times >= REFUSED and self.uptime() < at_s + REFUSED_S
