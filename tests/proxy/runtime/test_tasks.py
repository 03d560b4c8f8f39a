"""Background tasks never die silently."""

from __future__ import annotations

import asyncio
import time

import pytest

from ppd.proxy.runtime.tasks import Background, Drain, Throttle
from tests.support.clock import FakeClock


async def test_a_task_that_fails_is_logged_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    runs = 0
    done = asyncio.Event()

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise ValueError("broken")
        done.set()
        await asyncio.Event().wait()

    tasks = Background(restart_s=0.0)
    tasks.start("probe", work)
    await asyncio.wait_for(done.wait(), 60)
    await tasks.close()
    assert runs == 3
    assert caplog.text.count("background task probe failed") == 2


async def test_a_slice_in_which_the_process_stood_still_is_not_followed_by_a_long_pause() -> None:
    stood_s, pauses_s = 0.05, list[float]()

    async def sleep(pause_s: float) -> None:
        pauses_s.append(pause_s)

    async with Throttle(sleep).slice():
        time.sleep(stood_s)  # noqa: ASYNC251  # as a process that is stopped
    assert len(pauses_s) == 1
    assert pauses_s[0] < stood_s


def test_what_is_left_of_a_drain_counts_from_its_beginning(clock: FakeClock) -> None:
    drain = Drain(clock)
    assert drain.left_s(30.0) == 0.0
    drain.begin()
    clock.advance(10.0)
    assert (drain.left_s(30.0), drain.left_s(5.0)) == (20.0, 0.0)


async def test_a_drain_is_announced_before_it_begins() -> None:
    drain = Drain()
    waiting = asyncio.create_task(drain.wait())
    drain.announce()
    await asyncio.sleep(0)
    assert (drain.is_announced, drain.is_draining, waiting.done()) == (True, False, False)
    drain.begin()
    await asyncio.wait_for(waiting, 60)
    assert drain.is_draining and not drain.is_cut
