"""Runs trials against an endpoint, one after the other.

A trial starts its decode streams together and waits until each has its first token; only then are the prefills sent,
each for one token. So every prefill meets the whole batch, and is nothing but a prefill.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from ppd.proxy.errors import PPDError

from .records import Stream, Trial, TrialResult
from .streams import Ask, Client
from .trials import Prompts, Setting

_WARM_AT_ONCE = 8

Clock = Callable[[], float]
Progress = Callable[[int, TrialResult], None]  # the trial's place in the plan, and its result


class WarmUpError(PPDError):
    """The endpoint does not answer as the trials need it to."""


class TrialBench:
    """Owns nothing but its memory of which contexts it has put into the endpoint's cache."""

    def __init__(self, client: Client, setting: Setting, nonce: str, clock: Clock = time.perf_counter) -> None:
        self._client = client
        self._setting = setting
        self._prompts = Prompts(setting, nonce)
        self._clock = clock

    async def run(self, trials: Iterable[Trial], results: list[TrialResult], progress: Progress) -> None:
        """Appends to `results`, so that what is done stays with the caller if this is interrupted."""
        batch = 0
        for index, trial in enumerate(trials):
            if trial.batch != batch:
                batch = trial.batch
                await self._warm([self._prompts.decode_context(number) for number in range(batch)])
            if trial.cached_tokens:
                contexts = range(trial.prefills)
                await self._warm([self._prompts.prefill_context(n, trial.cached_tokens) for n in contexts])
            results.append(await self.trial(trial))
            progress(index, results[-1])

    async def trial(self, trial: Trial) -> TrialResult:
        client, prompts = self._client, self._prompts
        decodes = [
            client.ask(prompts.decode(trial, number), self._setting.output_tokens, number=number)
            for number in range(trial.batch)
        ]
        prefills = [
            client.ask(prompts.prefill(trial, number), 1, is_decode=False, number=number)
            for number in range(trial.prefills)
        ]
        started_at = self._clock()
        batch = _Batch(len(decodes))

        def now() -> float:
            return self._clock() - started_at

        async def decode(ask: Ask) -> Stream:
            try:
                return await client.complete(ask, now, lambda: batch.has_started(ask.number))
            finally:
                batch.has_started(ask.number)  # one that failed holds up nobody

        async def prefill(ask: Ask) -> Stream:
            await batch.decodes.wait()
            return await client.complete(ask, now)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(decode(ask)) for ask in decodes]
            tasks += [group.create_task(prefill(ask)) for ask in prefills]
        return TrialResult(trial, tuple(task.result() for task in tasks))

    async def _warm(self, contexts: list[list[int]]) -> None:
        """Put contexts into the endpoint's cache; WarmUpError if one is refused."""
        at_once = asyncio.Semaphore(_WARM_AT_ONCE)

        async def one(context: tuple[int, ...]) -> Stream:
            async with at_once:
                return await self._client.complete(self._client.ask(list(context), 1), self._clock)

        for stream in await asyncio.gather(*(one(context) for context in dict.fromkeys(map(tuple, contexts)))):
            if stream.error:
                raise WarmUpError(f"{self._client.target.url}: a context could not be computed: {stream.error}")


class _Batch:
    """Which decode streams have yet to begin."""

    def __init__(self, streams: int) -> None:
        self._waiting = set(range(streams))
        self.decodes = asyncio.Event()

    def has_started(self, number: int) -> None:
        self._waiting.discard(number)
        if not self._waiting:
            self.decodes.set()
