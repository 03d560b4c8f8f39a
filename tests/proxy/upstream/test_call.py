"""One answer, on a connection of which a test says what comes, and when."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import cast

import pytest

from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.upstream.call import Answer, Call, Timeouts
from ppd.proxy.upstream.connection import WorkerConnection
from tests.support.clock import scenario

WORKER = Worker(role=Role.DECODE, address="w:1")


class Wire:
    """A connection on which a test says what comes."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...


@scenario
async def test_each_wait_for_an_answer_has_its_own_limit() -> None:
    """The first one that of the worker's work, the others that of its silence; how long a client takes is neither."""
    answer = Answer(
        cast(WorkerConnection, Wire()), Timeouts(connect_s=1.0, first_s=10.0, idle_s=2.0), Call(WORKER), lambda _: None
    )
    answer.head(200, {b"content-encoding": b"identity"})
    assert answer.content_encoding == ""
    for pause_s in (9.0, 1.5, 1.5):
        asyncio.get_running_loop().call_later(pause_s, partial(answer.body_came, b"a", is_last=False))
        assert await answer.chunk() == b"a"
        await asyncio.sleep(100.0)
    with pytest.raises(LegError) as failure:
        await answer.chunk()
    assert failure.value.cause is Cause.TIMEOUT
