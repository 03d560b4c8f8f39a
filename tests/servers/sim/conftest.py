"""Engines on real sockets, and a client that talks to them as a proxy would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from ppd.proxy.fleet.worker import Role
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.engine.engine import SimEngine
from ppd.servers.sim.launch import running_engine

CHAT = "/v1/chat/completions"
SMALL_CACHE = {"num_blocks": 2048, "max_model_len": 32_768}  # starts in an eighth of the time of the default's 16,384


@dataclass
class Answer:
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """The answer of a chat, streamed or not."""
        if self.body.startswith(b"data:"):
            deltas = [choice["delta"].get("content", "") for chunk in self.chunks for choice in chunk["choices"]]
            return "".join(deltas)
        return str(self.json["choices"][0]["message"]["content"])

    @property
    def chunks(self) -> list[Any]:
        """The data events of a stream, without its terminator."""
        lines = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    @property
    def cached_tokens(self) -> int:
        return int(self.json["usage"]["prompt_tokens_details"]["cached_tokens"])


class Lab:
    """Starts engines, which end with the test, and sends them legs."""

    def __init__(self, stack: AsyncExitStack, session: aiohttp.ClientSession) -> None:
        self._stack = stack
        self.session = session

    async def start(self, role: str = "R", *, now: Any = None, **settings: Any) -> SimEngine:
        config = SimConfig(role=Role(role), **{"keep_requests": 16, "allow_faults": True, **SMALL_CACHE} | settings)
        clock = {} if now is None else {"now": now}
        return await self._stack.enter_async_context(running_engine(config, **clock))

    async def post(self, engine: SimEngine, path: str, body: Any, **kwargs: Any) -> Answer:
        async with self.session.post(f"http://{engine.address}{path}", json=body, **kwargs) as answer:
            return Answer(answer.status, await answer.read(), dict(answer.headers))

    async def fetch(self, engine: SimEngine, path: str, **kwargs: Any) -> Answer:
        async with self.session.get(f"http://{engine.address}{path}", **kwargs) as answer:
            return Answer(answer.status, await answer.read(), dict(answer.headers))

    async def chat(self, engine: SimEngine, messages: list[Any], **fields: Any) -> Answer:
        return await self.post(engine, CHAT, {"messages": messages, **fields})

    async def prefill(self, engine: SimEngine, messages: list[Any], **fields: Any) -> dict[str, Any]:
        """P's leg; what it hands over."""
        asked = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        answer = await self.chat(engine, messages, **asked | fields)
        assert answer.status == 200, answer.body
        params = answer.json["kv_transfer_params"]
        assert isinstance(params, dict)
        return params

    async def split(self, p: SimEngine, d: SimEngine, messages: list[Any], **fields: Any) -> Answer:
        return await self.chat(d, messages, kv_transfer_params=await self.prefill(p, messages), **fields)

    async def joint(self, p: SimEngine, d: SimEngine, to_p: dict[str, Any], to_d: dict[str, Any]) -> list[Answer]:
        """Both legs at once: P's answer, then D's."""
        return list(await asyncio.gather(self.post(p, CHAT, to_p), self.post(d, CHAT, to_d)))

    async def expected(self, messages: list[Any]) -> str:
        """The text of an engine that computes the prompt itself."""
        return (await self.chat(await self.start("R"), messages)).text

    @staticmethod
    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0)

    @staticmethod
    def is_quiet(engine: SimEngine) -> bool:
        return (engine.scheduler.sequences, engine.pool.used, engine.pinned) == ([], 0, 0)


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)))
        yield Lab(stack, session)
