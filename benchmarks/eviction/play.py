"""Plays turns through a proxy, or on an engine itself, and compares each answer with the right one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from ppd.proxy.errors import PPDError

from .conversations import AskedTurn, Message

_ROUNDING = 64  # tokens; engines keep whole blocks of 32


class PlayedTurn(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """cached_tokens: as the engine that answered says, which counts what it pulled too."""

    conversation: int
    number: int
    status: int
    is_right: bool
    ttft_s: float | None = None
    prompt_tokens: int = 0
    answer_tokens: int = 0
    cached_tokens: int = 0
    route: str = ""  # this and what follows: only through a proxy
    decode: str = ""
    claimed_tokens: int = 0  # that the engine was believed to hold
    evidence: str = ""

    @property
    def is_refuted(self) -> bool:
        """The engine had less than half of what it was believed to hold. Of a SPLIT it does not say."""
        missing = self.claimed_tokens - self.cached_tokens
        return self.route in ("LOCAL", "REPLICA") and missing > max(self.cached_tokens, _ROUNDING)


@dataclass(slots=True)
class _Answer:
    """A stream as it comes."""

    asked_s: float
    status: int = 0
    text: str = ""
    first_s: float | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False

    def take(self, line: bytes) -> None:
        name, _, data = line.strip().partition(b": ")
        self.is_done = self.is_done or data == b"[DONE]"
        if name != b"data" or data == b"[DONE]":
            return
        event = json.loads(data)
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            content = choice["delta"].get("content") or ""
            if content and self.first_s is None:
                self.first_s = time.perf_counter() - self.asked_s
            self.text += content


@dataclass(frozen=True, slots=True)
class Player:
    """Asks one address. With an admin key that is a proxy, whose receipts are read."""

    session: aiohttp.ClientSession
    base_url: str
    model: str
    answer_tokens: int
    salt: str  # prefix caches of other salts are of no use
    admin_key: str = ""

    async def play(self, turns: Iterable[AskedTurn], at_once: int) -> list[PlayedTurn]:
        """In their order, a few at once; those of a conversation one after the other."""
        permits = asyncio.Semaphore(at_once)
        asking: list[asyncio.Task[PlayedTurn]] = []
        newest: dict[int, asyncio.Task[PlayedTurn]] = {}
        async with asyncio.TaskGroup() as group:
            for turn in turns:
                await permits.acquire()
                task = group.create_task(self._after(newest.get(turn.conversation), turn, permits))
                newest[turn.conversation] = task
                asking.append(task)
        return [task.result() for task in asking]

    async def text(self, messages: list[Message]) -> str:
        answer, _ = await self._ask(messages)
        if not answer.is_done:
            raise PPDError(f"{self.base_url} gave no whole answer, and status {answer.status}")
        return answer.text

    async def ttft_s(self, messages: list[Message]) -> float:
        answer, _ = await self._ask(messages)
        assert answer.first_s is not None, "the tiny model always says something"
        return answer.first_s

    async def _after(
        self, earlier: asyncio.Task[PlayedTurn] | None, turn: AskedTurn, permits: asyncio.Semaphore
    ) -> PlayedTurn:
        try:
            if earlier is not None:
                await earlier
            return await self.turn(turn)
        finally:
            permits.release()

    async def turn(self, turn: AskedTurn) -> PlayedTurn:
        answer, headers = await self._ask(list(turn.messages))
        receipt = await self._receipt(headers["X-Request-Id"]) if self.admin_key else {}
        return PlayedTurn(
            conversation=turn.conversation,
            number=turn.number,
            status=answer.status,
            is_right=answer.is_done and answer.text == turn.right,
            ttft_s=None if answer.first_s is None else round(answer.first_s, 5),
            prompt_tokens=answer.usage.get("prompt_tokens", 0),
            answer_tokens=answer.usage.get("completion_tokens", 0),
            cached_tokens=(answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            route=headers.get("X-PPD-Route", ""),
            decode=headers.get("X-PPD-Decode", ""),
            claimed_tokens=receipt.get("estimated_cached_tokens", 0),
            evidence=receipt.get("cached_evidence", ""),
        )

    async def _ask(self, messages: list[Message]) -> tuple[_Answer, Any]:
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.answer_tokens,
            "temperature": 0,
            "cache_salt": self.salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = _Answer(time.perf_counter())
        async with self.session.post(f"{self.base_url}/v1/chat/completions", json=body) as response:
            answer.status = response.status
            async for line in response.content:
                answer.take(line)
            return answer, response.headers

    async def _receipt(self, request_id: str) -> dict[str, Any]:
        url, headers = f"{self.base_url}/admin/requests/{request_id}", {"X-Admin-Key": self.admin_key}
        async with self.session.get(url, headers=headers) as response:
            response.raise_for_status()
            receipt: dict[str, Any] = await response.json()
            return receipt
