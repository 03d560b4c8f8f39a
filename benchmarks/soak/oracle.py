"""The right text of any request: that of one simulated engine without peers, faults or other requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import msgspec

from ppd.proxy.openai.request import Endpoint
from ppd.servers.sim.api.completions import ChatCompletions, Completions
from ppd.servers.sim.api.messages import Messages
from ppd.servers.sim.api.reply import Dialect, Reply
from ppd.servers.sim.api.requests import JsonBody
from ppd.servers.sim.api.responses import Responses
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.engine.engine import SimEngine

_DIALECTS: dict[Endpoint, Dialect] = {
    Endpoint.CHAT: ChatCompletions(),
    Endpoint.COMPLETIONS: Completions(),
    Endpoint.RESPONSES: Responses(),
    Endpoint.MESSAGES: Messages(),
}


class _NoPeers:
    async def read(self, *_: object) -> NoReturn:
        raise AssertionError("a replica pulls nothing")

    close = extend = read


class Oracle:
    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    async def texts(self, endpoint: Endpoint, body: dict[str, Any]) -> dict[int, str]:
        generation = _DIALECTS[endpoint].read(JsonBody.decode(msgspec.json.encode(body)), self._engine.config)
        reply = Reply("", 0, generation)
        async with self._engine.generate(generation, self._engine.new_id()) as deltas:
            async for delta in deltas:
                reply.add(delta)
        return {at: choice.text for at, choice in enumerate(reply.choices)}


@asynccontextmanager
async def running_oracle(seed: int = 0) -> AsyncIterator[Oracle]:
    """`seed`: of the engines' weights, the same as in the fleet."""
    engine = SimEngine(SimConfig(seed=seed), _NoPeers())  # type: ignore[arg-type]
    engine.start()
    try:
        yield Oracle(engine)
    finally:
        engine.stop()
        await engine.close()
