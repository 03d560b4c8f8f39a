"""The legs to encoders of one turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from msgspec.structs import replace

from ppd.proxy.bodies.named_media import with_named_media
from ppd.proxy.config import EncoderUse, ProxyConfig
from ppd.proxy.encoders.legs import LEGS_AT_ONCE, EncoderLegs
from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Phase
from ppd.proxy.upstream.client import Upstream
from tests.proxy.encoders.test_encoder_chooser import fleet, turn
from tests.support.clock import FakeClock
from tests.support.requests import image, parse, user


class Rounds:
    """An upstream that never answers well, and counts in which rounds of the loop it was asked."""

    def __init__(self) -> None:
        self.round = 0
        self.asked: Counter[int] = Counter()

    async def count(self) -> None:
        while True:
            self.round += 1
            await asyncio.sleep(0)

    @asynccontextmanager
    async def answer(self, *_: object, **__: object) -> AsyncIterator[Any]:
        self.asked[self.round] += 1
        raise LegError("", worker="", phase=Phase.HEADERS, cause=Cause.SERVER)
        yield

    async def examine(self, exc: LegError, _: object) -> LegError:
        return exc


async def test_hundreds_of_items_are_not_asked_for_in_one_step_of_the_loop(clock: FakeClock) -> None:
    state, upstream, count = fleet(clock, EncoderUse.ALWAYS), Rounds(), 3 * LEGS_AT_ONCE
    legs = EncoderLegs(
        ProxyConfig(),
        cast("Upstream", upstream),
        state.encoders,
        state.registry,
        state.health,
        state.poisoned,
        state.metrics,
        clock,
    )
    said = parse(prompt=[user([image(f"http://x/{number}") for number in range(count)])])
    counting = asyncio.create_task(upstream.count())
    done = await legs.encode(replace(turn(state), request=with_named_media(said, "tenant", count)))
    counting.cancel()
    with suppress(asyncio.CancelledError):
        await counting
    assert done.record is not None and len(done.record.legs) == count
    assert upstream.asked.total() == count
    assert max(upstream.asked.values()) <= LEGS_AT_ONCE
