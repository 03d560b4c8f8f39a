"""Two legs of one attempt that run at once, as P and D wait for each other in their engines.

`MOVES` says what follows from what becomes of each leg; `TwoLegs` runs them by it. Whichever leg fails first ends the
other one. Once D answers, the answer is the client's, and what becomes of P is only noted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class NotHandedOver(Exception):
    """P's leg has ended well, but D gets nothing of it, and would wait."""


class LegsState(Enum):
    BOTH = auto()  # both are under way
    DECODE = auto()  # P has done its part, and D's first event is awaited
    PREFILL = auto()  # D answers, and P is still at work
    ANSWERED = auto()  # D answers, and P's leg has ended
    LEFT = auto()  # nobody waits for the answer; both go on, so that D gets what it has set blocks aside for
    OVER = auto()


class LegsEvent(Enum):
    PREFILLED = auto()  # P's whole answer is here, and is a good one
    PREFILL_FAILED = auto()  # or it handed nothing over
    BEGAN = auto()  # D's first event is here
    DECODE_FAILED = auto()
    LEFT = auto()  # the client left, and D would keep blocks for what an aborted P does not send
    CLOSED = auto()  # nobody waits any more: the client left, or the answer is at its end


class LegsAction(Enum):
    END_PREFILL = auto()
    END_DECODE = auto()
    RAISE = auto()  # the failure of this leg is the attempt's
    TELL = auto()  # what has become of P, on whose leg nothing depends any more


_Moves = Mapping[tuple[LegsState, LegsEvent], tuple[LegsState, tuple[LegsAction, ...]]]


def _moves() -> _Moves:
    s, e, a = LegsState, LegsEvent, LegsAction
    return MappingProxyType(
        {
            (s.BOTH, e.PREFILLED): (s.DECODE, ()),
            (s.BOTH, e.PREFILL_FAILED): (s.OVER, (a.END_DECODE, a.RAISE)),
            (s.BOTH, e.BEGAN): (s.PREFILL, ()),
            (s.BOTH, e.DECODE_FAILED): (s.OVER, (a.END_PREFILL, a.RAISE)),
            (s.BOTH, e.LEFT): (s.LEFT, ()),
            (s.BOTH, e.CLOSED): (s.OVER, (a.END_PREFILL, a.END_DECODE)),
            (s.DECODE, e.BEGAN): (s.ANSWERED, ()),
            (s.DECODE, e.DECODE_FAILED): (s.OVER, (a.RAISE,)),
            (s.DECODE, e.LEFT): (s.OVER, (a.END_DECODE,)),
            (s.DECODE, e.CLOSED): (s.OVER, (a.END_DECODE,)),
            (s.PREFILL, e.PREFILLED): (s.ANSWERED, (a.TELL,)),
            (s.PREFILL, e.PREFILL_FAILED): (s.ANSWERED, (a.TELL,)),
            (s.PREFILL, e.CLOSED): (s.OVER, (a.END_PREFILL, a.TELL)),
            (s.ANSWERED, e.CLOSED): (s.OVER, ()),
            (s.LEFT, e.PREFILLED): (s.OVER, (a.END_DECODE,)),
            (s.LEFT, e.PREFILL_FAILED): (s.OVER, (a.END_DECODE,)),
            (s.LEFT, e.BEGAN): (s.OVER, (a.END_PREFILL,)),
            (s.LEFT, e.DECODE_FAILED): (s.OVER, (a.END_PREFILL,)),
            (s.LEFT, e.CLOSED): (s.OVER, (a.END_PREFILL, a.END_DECODE)),
            (s.OVER, e.CLOSED): (s.OVER, ()),
        }
    )


MOVES = _moves()
"""The next state and what is to be done. Any other event in a state is an error of the caller."""

_AWAITED = (LegsState.BOTH, LegsState.DECODE, LegsState.LEFT)  # D's first event is
_PREFILLING = (LegsState.BOTH, LegsState.PREFILL, LegsState.LEFT)  # P's end is


class TwoLegs(Generic[T]):
    """Runs both legs, each in a task that ends with its connection closed when it is cancelled.

    decode_first: D's begins before P's, which is of no use until D has come.
    """

    def __init__(
        self, prefill: Coroutine[Any, Any, Any], decode: Coroutine[Any, Any, T], *, decode_first: bool = False
    ) -> None:
        self.state = LegsState.BOTH
        self._told: Callable[[BaseException | None], None] | None = None
        self._error: BaseException | None = None
        self._known: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # what `answer` comes to
        early = asyncio.create_task(decode) if decode_first else None  # tasks begin in the order in which they are made
        self._prefill = asyncio.create_task(prefill)
        self._decode = early or asyncio.create_task(decode)
        for task in (self._prefill, self._decode):
            task.add_done_callback(self._ended)

    async def answer(self) -> T:
        """D's. Raises the failure that ended the attempt; then, and when it is cancelled, no leg is left under way.

        Once it was left: when P's leg has ended, or D's, and CancelledError unless D has begun.
        """
        legs = (self._prefill, self._decode)
        try:
            await self._known
        except BaseException:
            self.close()
            await asyncio.wait(legs)
            raise
        if self.state is LegsState.OVER:
            await asyncio.wait(legs)
        if self._error is not None:
            raise self._error
        return self._decode.result()

    def when_prefilled(self, told: Callable[[BaseException | None], None]) -> None:
        """Once D answers: calls this when P's leg has ended, with its failure if it failed; at once if it has.

        With CancelledError if it is ended from here.
        """
        self._told = told
        if self._prefill.done():
            told(_failure(self._prefill))

    def leave(self) -> None:
        """While `answer` runs: nobody waits for it any more. Ends neither leg before P has done its part."""
        if (self.state, LegsEvent.LEFT) in MOVES:
            self._take(LegsEvent.LEFT)

    @property
    def has_handed_over(self) -> bool:
        """D has what P computed, or gets it: P's leg has ended well, or D has begun to answer."""
        return any(task.done() and _failure(task) is None for task in (self._prefill, self._decode))

    def close(self) -> None:
        """Ends what is under way, at any time; may be called twice."""
        self._take(LegsEvent.CLOSED, asyncio.CancelledError())

    def _ended(self, _: asyncio.Task[Any]) -> None:
        """A leg has. Of two that ended at once D's answer counts first, then what became of P."""
        of_prefill = _failure(self._prefill) if self._prefill.done() else None
        of_decode = _failure(self._decode) if self._decode.done() else None
        if self._decode.done() and of_decode is None and self.state in _AWAITED:
            self._take(LegsEvent.BEGAN)
        if self._prefill.done() and self.state in _PREFILLING:
            self._take(LegsEvent.PREFILLED if of_prefill is None else LegsEvent.PREFILL_FAILED, of_prefill)
        if of_decode is not None and self.state in _AWAITED:
            self._take(LegsEvent.DECODE_FAILED, of_decode)
        if self.state not in _AWAITED and not self._known.done():
            self._known.set_result(None)

    def _take(self, event: LegsEvent, error: BaseException | None = None) -> None:
        self.state, actions = MOVES[self.state, event]
        for action in actions:
            match action:
                case LegsAction.END_PREFILL:
                    self._prefill.cancel()
                case LegsAction.END_DECODE:
                    self._decode.cancel()
                case LegsAction.RAISE:
                    self._error = error
                case LegsAction.TELL if self._told is not None:
                    self._told(error)


def _failure(task: asyncio.Task[Any]) -> BaseException | None:
    """Of a leg that has ended; also has asyncio know that somebody has looked."""
    return asyncio.CancelledError() if task.cancelled() else task.exception()
