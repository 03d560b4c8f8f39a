"""How late a loop is, as its ticks tell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ppd.proxy.runtime.loop_watch import TICK_S, WINDOW_S, LoopWatch, uptime_s
from tests.support.clock import VirtualLoop


def ticking(work: Callable[[LoopWatch, list[float]], Coroutine[Any, Any, None]]) -> tuple[list[str], list[float]]:
    """What a watch has told in virtual time, which `stands_still` lets pass within one round of the loop."""
    ticks, lags = list[str](), list[float]()
    stalls_s = [0.0]

    async def main() -> None:
        loop = asyncio.get_running_loop()
        watch = LoopWatch(lambda: ticks.append("tick"), lags.append, lambda: loop.time() + stalls_s[0])
        watch.start()
        await work(watch, stalls_s)
        watch.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
    return ticks, lags


def test_a_loop_that_runs_ticks_in_time() -> None:
    async def work(watch: LoopWatch, _: list[float]) -> None:
        await asyncio.sleep(4.5 * TICK_S)
        assert watch.lag_s() == pytest.approx(0.0)

    ticks, lags = ticking(work)
    assert len(ticks) == 5
    assert lags == pytest.approx([0.0] * 4)


def test_a_standstill_is_told_when_it_is_over_and_while_it_lasts_and_is_forgotten_after_a_while() -> None:
    async def work(watch: LoopWatch, stalls_s: list[float]) -> None:
        stalls_s[0] = 7.0
        assert watch.lag_s() == pytest.approx(7.0 - TICK_S)
        await asyncio.sleep(2 * TICK_S)
        assert watch.lag_s() == pytest.approx(7.0)
        await asyncio.sleep(WINDOW_S + 2 * TICK_S)
        assert watch.lag_s() == pytest.approx(0.0)

    _, lags = ticking(work)
    assert [lag for lag in lags if lag > 0.001] == pytest.approx([7.0])


def test_a_watch_that_has_stopped_ticks_no_more() -> None:
    async def work(watch: LoopWatch, _: list[float]) -> None:
        watch.stop()
        await asyncio.sleep(10 * TICK_S)
        assert watch.lag_s() == 0.0

    assert ticking(work) == (["tick"], [])


def test_the_clock_of_handoffs_goes_on_while_the_machine_sleeps() -> None:
    assert abs(uptime_s() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 1.0
