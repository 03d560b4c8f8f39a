"""D's end of a protocol whose P sends a prompt's KV before D is asked for it: what has come, by the legs' key."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ..core.counters import Counters, Trap
from .meetings import UsedKeys


class ArrivalFailed(Exception):
    """The text says why."""


@dataclass(frozen=True, slots=True)
class SentPrompt:
    tokens: int
    blocks: list[list[int]]


class Arrivals:
    """A prompt is taken once. One that no leg takes stays for good, as in vLLM's buffer."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._awaited: dict[str, asyncio.Future[SentPrompt]] = {}
        self._taken = UsedKeys(counters)

    def __len__(self) -> int:
        """Prompts that have come and are not taken."""
        return sum(arrival.done() for arrival in self._awaited.values())

    def put(self, key: str, sent: SentPrompt) -> None:
        arrival = self._of(key)
        if not arrival.done():
            arrival.set_result(sent)

    async def take(self, key: str, tokens: int) -> SentPrompt:
        """Waits, without a time-out, for P to send it. ArrivalFailed if it is another prompt, or was taken before."""
        if not self._taken.use(key):
            raise ArrivalFailed(f"{key} was used before")
        sent = await asyncio.shield(self._of(key))
        del self._awaited[key]
        if sent.tokens != tokens:
            self._counters.traps[Trap.OTHER_PROMPT] += 1
            raise ArrivalFailed(f"P's prompt has {sent.tokens} tokens, this one {tokens}")
        return sent

    def _of(self, key: str) -> asyncio.Future[SentPrompt]:
        return self._awaited.setdefault(key, asyncio.get_running_loop().create_future())
