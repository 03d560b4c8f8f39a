"""P's end of the protocols whose two legs meet by a key, such as SGLang's room: whoever comes first waits."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..core.counters import Counters, Trap
from ..core.errors import BadRequest, EngineFailure
from ..core.handoffs import HandedOver
from ..protocols.legs import KvProtocol
from .deltas import Delta, DeltaStream

_REMEMBERED = 16_384  # keys, the latest


class UsedKeys:
    """Of which each is good for one use."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._used: OrderedDict[str, None] = OrderedDict()

    def use(self, key: str) -> bool:
        """False, and counted, if it was used before."""
        if key in self._used:
            self._counters.traps[Trap.USED_KEY] += 1
            return False
        self._used[key] = None
        if len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)
        return True


class MeetingFailed(Exception):
    """The other leg has ended, or the key was used before; the text says which."""


@dataclass(slots=True, eq=False)
class _Meeting:
    """Of one key. An error in a future is for the leg that waits for it."""

    has_prefill: bool = False
    has_decode: bool = False
    came: asyncio.Future[None] = field(default_factory=asyncio.Future)  # D has
    handed_over: asyncio.Future[HandedOver] = field(default_factory=asyncio.Future)
    taken: asyncio.Future[None] = field(default_factory=asyncio.Future)  # D has the KV


class Meetings:
    """A key is good for one leg on P and one on D; a leg waits `timeout_s` for the other."""

    def __init__(
        self, protocol: KvProtocol, counters: Counters, timeout_s: float, is_pinned: Callable[[str], bool]
    ) -> None:
        """`is_pinned`: whether P still holds the blocks of a request."""
        self._protocol = protocol
        self._counters = counters
        self._timeout_s = timeout_s
        self._is_pinned = is_pinned
        self.waiting = 0  # requests of P that wait for their D
        self._meetings: OrderedDict[str, _Meeting] = OrderedDict()
        self._by_request: dict[str, _Meeting] = {}  # handed over and not yet taken, by P's request id

    def __len__(self) -> int:
        """Prefills that are handed over and not yet taken, and that P still holds."""
        return sum(map(self._is_pinned, self._by_request))

    # P's leg

    def offer(self, keys: Sequence[str]) -> None:
        """P's leg has come; BadRequest if one had before under any of its keys."""
        for key in keys:
            meeting = self._of(key)
            if meeting.has_prefill:
                raise BadRequest(str(self._used(key)), self._protocol.key_member)
            meeting.has_prefill = True

    async def until_decode(self, keys: Sequence[str]) -> None:
        """EngineFailure if P waits for D in vain; at once where P does not wait."""
        if not self._protocol.is_joint or not keys:
            return
        self.waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                for key in keys:
                    await asyncio.shield(self._of(key).came)
        except (MeetingFailed, TimeoutError) as exc:
            raise EngineFailure("The decode leg did not come.") from exc
        finally:
            self.waiting -= 1

    def hand_over(self, key: str, handed_over: HandedOver) -> None:
        meeting = self._of(key)
        self._by_request = {one: other for one, other in self._by_request.items() if self._is_pinned(one)}
        if not meeting.handed_over.done():
            self._by_request[handed_over.request_id] = meeting
            meeting.handed_over.set_result(handed_over)

    async def put_once_taken(self, key: str, delta: Delta, deltas: DeltaStream) -> None:
        """P's answer, where it is due when D has the KV."""
        try:
            await asyncio.wait_for(asyncio.shield(self._of(key).taken), self._timeout_s)
        except (MeetingFailed, TimeoutError):
            deltas.put(EngineFailure("The decode leg did not take the KV."))
        else:
            deltas.put(delta)

    def withdraw(self, keys: Sequence[str]) -> None:
        """P's leg has ended: a D that waits fails, if P is one that tells it (SGLang's) and has not handed over."""
        if self._protocol.engine == "sglang":
            for key in keys:
                self._fail(self._of(key).handed_over, "the prefill leg has ended")

    def end(self) -> None:
        """P stops: it waits for no D any longer."""
        for meeting in self._meetings.values():
            for waited in (meeting.came, meeting.taken):
                self._fail(waited, "the engine stops")

    # D

    async def join(self, key: str) -> HandedOver:
        """D has come; waits until P has computed the prompt. MeetingFailed if it never will."""
        meeting = self._of(key)
        if meeting.has_decode:
            raise self._used(key)
        meeting.has_decode = True
        if not meeting.came.done():
            meeting.came.set_result(None)
        try:
            return await asyncio.shield(meeting.handed_over)
        except asyncio.CancelledError:
            self._fail(meeting.taken, "the decode leg has ended")
            raise

    def take(self, request_id: str) -> None:
        meeting = self._by_request.pop(request_id, None)
        if meeting is not None and not meeting.taken.done():
            meeting.taken.set_result(None)

    def _of(self, key: str) -> _Meeting:
        if key not in self._meetings:
            self._meetings[key] = _Meeting()
            if len(self._meetings) > _REMEMBERED:
                self._meetings.popitem(last=False)
        return self._meetings[key]

    def _used(self, key: str) -> MeetingFailed:
        self._counters.traps[Trap.USED_KEY] += 1
        return MeetingFailed(f"{self._protocol.key_member}: {key} was used before")

    @staticmethod
    def _fail(waited: asyncio.Future[HandedOver] | asyncio.Future[None], why: str) -> None:
        if not waited.done():
            waited.set_exception(MeetingFailed(why))
            waited.exception()  # it is no loss if nobody waits
