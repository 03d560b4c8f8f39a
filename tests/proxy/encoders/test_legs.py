"""The legs to encoders of one turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from msgspec.structs import replace

from ppd.proxy.bodies.named_media import with_named_media
from ppd.proxy.config import EncoderUse, ProxyConfig
from ppd.proxy.encoders.legs import LEGS_AT_ONCE, EncoderLegs
from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Phase
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


async def test_hundreds_of_items_are_not_asked_for_in_one_step_of_the_loop(clock: FakeClock) -> None:
    state, upstream, count = fleet(clock, EncoderUse.ALWAYS), NeverWell(), 3 * LEGS_AT_ONCE
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
    async with upstream.rounds.counted():
        encoded = await legs.encode(replace(turn(state), request=with_named_media(said, "tenant", count)))
    assert encoded.record is not None and len(encoded.record.legs) == count
    asked = upstream.rounds.done
    assert asked.total() == count
    assert max(asked.values()) <= LEGS_AT_ONCE
