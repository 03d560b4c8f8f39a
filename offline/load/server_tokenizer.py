"""Token counts of a text, asked of the endpoint itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import aiohttp
import msgspec

from ppd.proxy.errors import ConfigError

from ..experiment.files import UNREADABLE
from ..traces.turns import Message
from .client import cause
from .target import Target

_AT_ONCE = 8  # requests for token counts, all before the measurement
_TIMEOUT_S = 60.0


class Tokenizer(Protocol):
    async def encode(self, text: str) -> list[int]:
        """Token ids of a text as inside a prompt: without a token that begins it."""

    async def render(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the prompt that the chat template makes, ready for an answer."""


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_TOKENIZED = msgspec.json.Decoder(_Tokenized)


class ServerTokenizer:
    """vLLM's `/tokenize`, which the proxy passes through. ConfigError where the endpoint has none."""

    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self._session = session
        self._target = target
        self._permits = asyncio.Semaphore(_AT_ONCE)

    async def encode(self, text: str) -> list[int]:
        return await self._ask({"prompt": text, "add_special_tokens": False})

    async def render(self, messages: Sequence[Message]) -> list[int]:
        said = [{"role": message.role, "content": message.content} for message in messages]
        return await self._ask({"messages": said, "add_generation_prompt": True})

    async def _ask(self, members: dict[str, Any]) -> list[int]:
        body = msgspec.json.encode({"model": self._target.model, **members})
        try:
            async with self._permits, asyncio.timeout(_TIMEOUT_S):
                async with self._session.post(
                    self._target.at("/tokenize"), data=body, headers=self._target.headers()
                ) as response:
                    if response.status != 200:
                        raise ConfigError(f"/tokenize: answered {response.status}")
                    return _TOKENIZED.decode(await response.read()).tokens
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise ConfigError(f"/tokenize: no answer: {cause(exc)}") from exc
        except UNREADABLE as exc:
            raise ConfigError(f"/tokenize: cannot be read: {exc}") from exc
