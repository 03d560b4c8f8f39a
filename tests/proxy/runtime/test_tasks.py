"""Background tasks never die silently."""

from __future__ import annotations

import asyncio

import pytest

from ppd.proxy.runtime.tasks import Background


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
    await asyncio.wait_for(done.wait(), 20)
    await tasks.close()
    assert runs == 3
    assert caplog.text.count("background task probe failed") == 2
