"""Two legs of one attempt that run at once, as P and D wait for each other in their engines.

`leg_moves` says what follows from what becomes of each. Each runs in a task of its own, which ends with its connection
closed when it is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from ..leg_moves import Legs, LegsAction, LegsEvent, LegsState

T = TypeVar("T")

Note = Callable[[LegsAction, T, BaseException | None], None]


def _unnoted(_action: LegsAction, _answer: object, _error: BaseException | None) -> None: ...


class TwoLegs(Generic[T]):
    """prefill comes to what P's answer is: HANDED_OVER, NOTHING or WHOLE. decode: to D's answer, once it has begun.

    legs: at their beginning. note: called with each NOTE action, D's answer, and P's failure if it has failed.
    """

    def __init__(
        self,
        legs: Legs,
        prefill: Coroutine[Any, Any, LegsEvent],
        decode: Coroutine[Any, Any, T],
        note: Note[T] = _unnoted,
    ) -> None:
        self._legs = legs
        self._note = note
        self._error: BaseException | None = None
        self._known: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # what `answer` comes to
        self._prefill: asyncio.Task[LegsEvent]
        self._decode: asyncio.Task[T]
        for ask in legs.asked_first:  # tasks begin in the order in which they are made
            if ask is LegsAction.ASK_PREFILL:
                self._prefill = asyncio.create_task(prefill)
            else:
                self._decode = asyncio.create_task(decode)
        self._under_way: set[asyncio.Task[Any]] = {self._prefill, self._decode}
        for leg in (self._prefill, self._decode):
            leg.add_done_callback(self._ended)

    async def answer(self) -> T | None:
        """D's; None where P's takes its place, or D is to compute the prompt itself: `legs` say which.

        Raises the failure that ended the attempt, and CancelledError if nobody waits for it any more, unless D has
        begun all the same. When it comes to anything but D's answer no leg is left under way.
        """
        both = (self._prefill, self._decode)
        try:
            await self._known
        except BaseException:
            self.close()
            await asyncio.wait(both)
            raise
        if ending := [leg for leg in both if leg not in self._under_way and not leg.done()]:
            await asyncio.wait(ending)
        if self._error is not None:
            raise self._error
        if self._legs.state in (LegsState.ALONE, LegsState.ANSWERED) and _failure(self._decode) is not None:
            return None
        return self._decode.result()

    def leave(self) -> None:
        """Nobody waits for the answer any more, but D may need what P computes."""
        self._take(LegsEvent.LEFT)

    async def until_prefilled(self) -> None:
        """Until P's leg has ended, and `legs` know."""
        await asyncio.wait({self._prefill})

    def close(self, *, is_unreached: bool = False) -> None:
        """Ends what is under way, at any time; may be called twice. is_unreached: D was not sent its leg."""
        self._take(LegsEvent.UNREACHED if is_unreached else LegsEvent.CLOSED)

    def _ended(self, _: asyncio.Task[Any]) -> None:
        """A leg has. Of two that ended at once D's answer counts first, then what became of P."""
        prefill, decode = self._prefill, self._decode
        of_prefill, of_decode = _failure(prefill), _failure(decode)
        if self._is_news(decode) and of_decode is None:
            self._settle(decode)
            self._take(LegsEvent.BEGAN)
        if self._is_news(prefill):
            self._settle(prefill)
            self._take(prefill.result() if of_prefill is None else LegsEvent.PREFILL_FAILED, of_prefill)
        if self._is_news(decode):
            self._settle(decode)
            self._take(LegsEvent.DECODE_FAILED, of_decode)

    def _is_news(self, leg: asyncio.Task[Any]) -> bool:
        """It has ended, and `legs` do not know it yet, nor had it ended."""
        return leg.done() and leg in self._under_way

    def _settle(self, leg: asyncio.Task[Any]) -> None:
        self._under_way.discard(leg)
        if leg is self._decode and not self._known.done():
            self._known.set_result(None)

    def _take(self, event: LegsEvent, error: BaseException | None = None) -> None:
        for action in self._legs.take(event):
            match action:
                case LegsAction.END_PREFILL:
                    self._end(self._prefill)
                case LegsAction.END_DECODE:
                    self._end(self._decode)
                case LegsAction.FAIL:
                    self._error = error
                case LegsAction.COMPUTE | LegsAction.ANSWER:
                    pass  # by who awaits `answer`
                case _:
                    self._note(action, self._decode.result(), error)

    def _end(self, leg: asyncio.Task[Any]) -> None:
        self._settle(leg)
        leg.cancel()


def _failure(leg: asyncio.Task[Any]) -> BaseException | None:
    """Of a leg that has ended; also has asyncio know that somebody has looked."""
    if not leg.done():
        return None
    return asyncio.CancelledError() if leg.cancelled() else leg.exception()
