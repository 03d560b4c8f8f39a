"""The legs to encoders of one turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any, cast

import msgspec

from ppd.proxy.bodies.named_media import with_named_media
from ppd.proxy.config import EncoderUse, ProxyConfig
from ppd.proxy.encoders.answers import LABEL
from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Phase
from ppd.proxy.routing.legs.encoder_legs import LEGS_AT_ONCE, EncoderLegs
from ppd.proxy.routing.state import State
from ppd.proxy.telemetry.receipts import EncoderRecord
from ppd.proxy.upstream.client import Upstream
from tests.proxy.encoders.test_encoder_chooser import fleet, turn
from tests.support.clock import FakeClock, Rounds
from tests.support.requests import image, parse, user


class NeverWell:
    """An upstream of which no leg comes to anything."""

    def __init__(self) -> None:
        self.rounds = Rounds()

    @asynccontextmanager
    async def answer(self, *_: object, **__: object) -> AsyncIterator[Any]:
        self.rounds.note()
        raise LegError("", worker="", phase=Phase.HEADERS, cause=Cause.SERVER)
        yield

    async def examine(self, exc: LegError, _: object) -> LegError:
        return exc


def legs(state: State, upstream: NeverWell) -> EncoderLegs:
    return EncoderLegs(ProxyConfig(), cast("Upstream", upstream), state)


async def test_hundreds_of_items_are_not_asked_for_in_one_step_of_the_loop(clock: FakeClock) -> None:
    state, upstream, items = fleet(clock, EncoderUse.ALWAYS), NeverWell(), 3 * LEGS_AT_ONCE
    said = parse(prompt=[user([image(f"http://x/{number}") for number in range(items)])])
    named = msgspec.structs.replace(turn(state), request=with_named_media(said, "tenant", items))
    noted = list[EncoderRecord]()
    async with upstream.rounds.counted():
        await legs(state, upstream).encode(named, noted.append)
    assert [len(record.legs) for record in noted] == [items]
    asked = upstream.rounds.done
    assert asked.total() == items
    assert max(asked.values()) <= LEGS_AT_ONCE


async def test_a_leg_takes_as_long_in_the_metrics_as_in_its_receipt() -> None:
    """Whenever the clock is read."""
    state, seconds = fleet(clock := FakeClock(), EncoderUse.ALWAYS), count()

    def ticking() -> float:
        return clock() + next(seconds)

    noted = list[EncoderRecord]()
    await legs(replace(state, now=ticking), NeverWell()).encode(turn(state), noted.append)
    took_s = sum((leg.ended_s or 0.0) - leg.started_s for record in noted for leg in record.legs)
    assert state.metrics.registry.get_sample_value("ppd_leg_seconds_sum", {"leg": LABEL}) == took_s > 0
