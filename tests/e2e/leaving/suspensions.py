"""What happens while a task awaits something, or a task that it has begun does: at each of their awaits in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from enum import Enum
from typing import Any


class Moment(Enum):
    """Of one await."""

    SUSPENDED = "suspended"  # the task has just stopped there
    DUE = "due"  # what it waits for has come, and it is about to go on


class Strike:
    """What happens at the `number`-th await, from 1, of a task and of all that it leads to, at such a moment."""

    def __init__(self, number: int, moment: Moment, happens: Callable[[], object]) -> None:
        self.where = ""  # that await, by the functions that led there; empty as long as it was not reached
        self._left = number
        self._moment = moment
        self._happens = happens

    def suspended(self, work: Coroutine[Any, Any, Any], awaited: object) -> None:
        self._left -= 1
        if self._left:
            return
        self.where = _place(work)
        if self._moment is Moment.SUSPENDED:
            self._happens()
        elif isinstance(awaited, asyncio.Future):
            awaited.add_done_callback(lambda _: self._happens())  # comes before the task's own
        else:  # the next round of the loop
            asyncio.get_running_loop().call_soon(self._happens)


class _Watched:
    def __init__(self, work: Coroutine[Any, Any, Any], strike: Strike) -> None:
        self._work, self._strike = work, strike

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Any = self._work.send
        given: Any = None
        while True:
            try:
                awaited = step(given)
            except StopIteration as ended:
                return ended.value
            self._strike.suspended(self._work, awaited)
            try:
                given = yield awaited
                step = self._work.send
            except BaseException as exc:
                step, given = self._work.throw, exc


_strike: ContextVar[Strike | None] = ContextVar("strike", default=None)


async def _watched(work: Coroutine[Any, Any, Any], strike: Strike) -> Any:
    return await _Watched(work, strike)


def watch_tasks() -> None:
    """Of the running loop, those that a task of `struck` leads to."""

    def made(loop: asyncio.AbstractEventLoop, work: Any, **how: Any) -> asyncio.Task[Any]:
        strike = _strike.get()
        return asyncio.Task(work if strike is None else _watched(work, strike), loop=loop, **how)

    asyncio.get_running_loop().set_task_factory(made)


async def struck(
    work: Coroutine[Any, Any, int], number: int, moment: Moment, happens: Callable[[], object] | None = None
) -> tuple[asyncio.Task[int], str]:
    """The task of this work once it has ended, and where it was struck, if it came to so many awaits.

    happens: None: it is cancelled.
    """

    def leave() -> None:
        task.cancel()

    strike = Strike(number, moment, happens or leave)
    before = _strike.set(strike)
    task = asyncio.create_task(work)
    _strike.reset(before)
    await asyncio.wait({task})
    return task, strike.where


def _place(work: Any) -> str:
    names = list[str]()
    while (code := getattr(work, "cr_code", None)) is not None:
        names.append(code.co_name)
        work = work.cr_await
    return " > ".join(names)
