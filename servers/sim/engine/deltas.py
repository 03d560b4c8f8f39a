"""What the engine generates for one request, token by token (vLLM's output collector)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from ..core.errors import EngineFailure
from ..core.sequence import Finish, Ranking


@dataclass(frozen=True, slots=True)
class Delta:
    """One token of one choice; with `finish`, the last one."""

    choice: int
    text: str
    token: int | None
    finish: Finish | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    transfer_params: dict[str, Any] | None = None  # P's handoff, in the last delta
    logprobs: Ranking | None = None  # of the token, if asked for


class DeltaStream:
    """The deltas of all choices of one request, in the order they are generated; ends when every choice has."""

    def __init__(self, choices: int) -> None:
        self._open = choices
        self._inbox: asyncio.Queue[Delta | EngineFailure] = asyncio.Queue()

    def put(self, item: Delta | EngineFailure) -> None:
        self._inbox.put_nowait(item)

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> Delta:
        if self._open == 0:
            raise StopAsyncIteration
        item = await self._inbox.get()
        if isinstance(item, EngineFailure):
            raise item
        self._open -= item.finish is not None
        return item


@dataclass(slots=True)
class OutputState:
    """Of one sequence: where its tokens go, and their times for the latency metrics."""

    deltas: DeltaStream
    choice: int
    arrived_at: float
    abort_after: int | None = None  # tokens, by a fault
    tokens: int = 0
    last_at: float | None = None
