"""A task that is cancelled at one of its awaits, or at one of a task that it has begun: at each of them in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from enum import Enum
from typing import Any


class Moment(Enum):
    """Of one await."""

    SUSPENDED = "suspended"  # the task has just stopped there
    DUE = "due"  # what it waits for has come, and it is about to go on


class Leaving:
    """Cancels `task` at the `number`-th await, from 1, of it and of all tasks that it leads to, at such a moment."""

    task: asyncio.Task[Any]

    def __init__(self, number: int, moment: Moment) -> None:
        self.where = ""  # that await, by the functions that led there; empty as long as it was not reached
        self._left = number
        self._moment = moment

    def suspended(self, work: Coroutine[Any, Any, Any], awaited: object) -> None:
        self._left -= 1
        if self._left:
            return
        self.where = _place(work)
        if self._moment is Moment.SUSPENDED:
            self.task.cancel()
        elif isinstance(awaited, asyncio.Future):
            awaited.add_done_callback(lambda _: self.task.cancel())  # comes before the task's own
        else:  # the next round of the loop
            asyncio.get_running_loop().call_soon(self.task.cancel)


class _Watched:
    def __init__(self, work: Coroutine[Any, Any, Any], leaving: Leaving) -> None:
        self._work, self._leaving = work, leaving

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Any = self._work.send
        given: Any = None
        while True:
            try:
                awaited = step(given)
            except StopIteration as ended:
                return ended.value
            self._leaving.suspended(self._work, awaited)
            try:
                given = yield awaited
                step = self._work.send
            except BaseException as exc:
                step, given = self._work.throw, exc


_leaving: ContextVar[Leaving | None] = ContextVar("leaving", default=None)


async def _watched(work: Coroutine[Any, Any, Any], leaving: Leaving) -> Any:
    return await _Watched(work, leaving)


def watch_tasks() -> None:
    """Of the running loop, those that a task of `left` leads to."""

    def made(loop: asyncio.AbstractEventLoop, work: Any, **how: Any) -> asyncio.Task[Any]:
        leaving = _leaving.get()
        return asyncio.Task(work if leaving is None else _watched(work, leaving), loop=loop, **how)

    asyncio.get_running_loop().set_task_factory(made)


async def left(work: Coroutine[Any, Any, Any], number: int, moment: Moment) -> Leaving:
    """The work once it has ended, being left so, if it came to so many awaits."""
    leaving = Leaving(number, moment)
    before = _leaving.set(leaving)
    leaving.task = asyncio.create_task(work)
    _leaving.reset(before)
    await asyncio.wait({leaving.task})
    return leaving


def _place(work: Any) -> str:
    names = list[str]()
    while (code := getattr(work, "cr_code", None)) is not None:
        names.append(code.co_name)
        work = work.cr_await
    return " > ".join(names)
