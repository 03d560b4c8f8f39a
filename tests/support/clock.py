"""Time that is not the machine's: it passes when a test says so, or when a loop has nothing else to do."""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any


class FakeClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


STEP_S = 0.5  # in which time passes by


class LeapingTime:
    """The time of an event loop, in which all that waits may have waited for long enough at once."""

    def __init__(self, real: Callable[[], float]) -> None:
        self._real = real
        self._ahead_s = 0.0

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> LeapingTime:
        if not isinstance(loop.time, cls):
            loop.time = cls(loop.time)  # type: ignore[method-assign]
        assert isinstance(loop.time, cls)
        return loop.time

    def __call__(self) -> float:
        return self._real() + self._ahead_s

    def leap(self, seconds: float) -> None:
        self._ahead_s += seconds

    async def pass_by(self, seconds: float) -> None:
        """In steps, so that the loop has not stood still for who looks at its timers."""
        until_s = self() + seconds
        while (left_s := until_s - self()) > 0:
            await self.leap_over(min(STEP_S, left_s))

    async def leap_over(self, seconds: float) -> None:
        """As `leap`, and what is due by then and waits for nothing else has been done."""
        self.leap(seconds)
        for _ in range(5):
            await asyncio.sleep(0)


class Rounds:
    """How often something is done in each round of the event loop."""

    def __init__(self) -> None:
        self.done: Counter[int] = Counter()
        self._round = 0

    def note(self) -> None:
        self.done[self._round] += 1

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        async def count() -> None:
            while True:
                self._round += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        try:
            yield
        finally:
            counting.cancel()
            await asyncio.wait((counting,))


class JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing: the time that it is asked to wait has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "a task waits for ever"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def run(work: Coroutine[Any, Any, None]) -> None:
    failures: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: failures.append(context))
        runner.run(work)
    assert not failures


def scenario(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test whose time is virtual."""

    def test() -> None:
        run(work())

    test.__name__, test.__doc__ = work.__name__, work.__doc__
    return test
