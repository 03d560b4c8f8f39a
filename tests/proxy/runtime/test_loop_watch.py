"""How late a loop is, as its ticks tell."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ppd.proxy.runtime.loop_watch import STOOD_STILL_S, TICK_S, WINDOW_S, LoopWatch, TimeLimit, time_limit, uptime_s
from ppd.proxy.runtime.process import new_loop
from tests.support.clock import LeapingTime, VirtualLoop, run, scenario


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


def test_a_standstill_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def work(_: LoopWatch, stalls_s: list[float]) -> None:
        for seconds in (0.9, 7.0):
            stalls_s[0] += seconds
            await asyncio.sleep(4 * TICK_S)

    with caplog.at_level(logging.WARNING):
        ticking(work)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["this process stood still for 7.0 s: it was stopped, or got no processor"]


LIMIT_S = 10.0


@pytest.mark.parametrize(
    ("at_s", "stands_s", "ends_s"),
    [
        (0.0, 0.0, LIMIT_S),
        (1.0, 4.0, LIMIT_S),  # its end is still ahead
        (8.0, 2.0 + STOOD_STILL_S / 2, LIMIT_S + STOOD_STILL_S / 2),
        (1.0, 40.0, 41.0 + LIMIT_S),
        (9.9, 3600.0, 3609.9 + LIMIT_S),
    ],
)
def test_a_limit_that_ends_while_the_process_stands_still_begins_anew(
    at_s: float, stands_s: float, ends_s: float
) -> None:
    async def ends(way: str) -> None:
        loop = asyncio.get_running_loop()
        began_s, leaping = loop.time(), LeapingTime.of(loop)
        loop.call_later(at_s, leaping.leap, stands_s)
        over = asyncio.Event()
        if way == "timer":
            TimeLimit(LIMIT_S, over.set)
            await over.wait()
        else:
            with pytest.raises(TimeoutError):
                async with time_limit(LIMIT_S):
                    await over.wait()
        assert loop.time() - began_s == pytest.approx(ends_s)

    for way in ("timer", "context"):
        run(ends(way))


@pytest.mark.parametrize("make_loop", [new_loop, asyncio.SelectorEventLoop])
@pytest.mark.parametrize("seconds", [0.0, 0.0003, -5.0])
def test_a_limit_that_is_over_already_ends_at_once(
    make_loop: Callable[[], asyncio.AbstractEventLoop], seconds: float
) -> None:
    """Also uvloop's, whose handles of what is due at once say no time."""

    async def ends() -> None:
        over = asyncio.Event()
        TimeLimit(seconds, over.set)
        await asyncio.wait_for(over.wait(), 60)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60) as patience, time_limit(seconds):
                await asyncio.Event().wait()
        assert not patience.expired()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(ends())


@scenario
async def test_what_comes_after_a_standstill_has_come_in_time() -> None:
    loop = asyncio.get_running_loop()
    answer = loop.create_future()

    async def stand_still() -> None:
        LeapingTime.of(loop).leap(40.0)
        await asyncio.sleep(5.0)  # the other side stood still too
        answer.set_result("here")

    asking = asyncio.create_task(stand_still())
    async with time_limit(LIMIT_S):
        assert await answer == "here"
    await asking


@scenario
async def test_a_limit_that_somebody_else_ended_is_over_once() -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError):
        async with time_limit(0.0) as limit:
            limit.reschedule(loop.time())
            await asyncio.sleep(60.0)
