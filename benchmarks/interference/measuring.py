"""Runs trials against an endpoint, one after the other.

A trial starts its decode streams together and waits until each has its first token. Only then does it send the
prefills, each for one token. So every prefill runs beside the whole batch and adds no decoding of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import aiohttp

from ppd.offline.load.client import LoadClient
from ppd.offline.load.target import Target
from ppd.proxy.errors import PPDError

from .records import Stream, Trial, TrialResult
from .streams import StreamRequest, complete, request_for
from .trials import Prompts, Setting

_WARM_AT_ONCE = 8

Clock = Callable[[], float]
Progress = Callable[[int, TrialResult], None]  # the trial's index in the plan, and its result


class WarmUpError(PPDError):
    """The endpoint could not compute a context."""


class TrialBench:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        setting: Setting,
        nonce: str,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._session = session
        self._target = target
        self._setting = setting
        self._prompts = Prompts(setting, nonce)
        self._clock = clock

    async def run(self, trials: Iterable[Trial], results: list[TrialResult], progress: Progress) -> None:
        """Appends to the caller's `results`, so that none is lost if this is interrupted."""
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
        model, prompts = self._target.model, self._prompts
        decodes = [
            request_for(model, prompts.decode(trial, number), self._setting.output_tokens, number=number)
            for number in range(trial.batch)
        ]
        prefills = [
            request_for(model, prompts.prefill(trial, number), 1, is_decode=False, number=number)
            for number in range(trial.prefills)
        ]
        started_at = self._clock()
        client = LoadClient(self._session, self._target, lambda: self._clock() - started_at)
        batch = _Batch(len(decodes))

        async def decode(request: StreamRequest) -> Stream:
            try:
                return await complete(client, request, lambda: batch.has_started(request.number))
            finally:
                batch.has_started(request.number)  # a failed stream must not hold up the prefills

        async def prefill(request: StreamRequest) -> Stream:
            await batch.decodes.wait()
            return await complete(client, request)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(decode(request)) for request in decodes]
            tasks += [group.create_task(prefill(request)) for request in prefills]
        return TrialResult(trial, tuple(task.result() for task in tasks))

    async def _warm(self, contexts: list[list[int]]) -> None:
        """Puts contexts into the endpoint's prefix cache; WarmUpError if one is refused."""
        at_once = asyncio.Semaphore(_WARM_AT_ONCE)
        client = LoadClient(self._session, self._target, self._clock)

        async def one(context: tuple[int, ...]) -> Stream:
            async with at_once:
                return await complete(client, request_for(self._target.model, list(context), 1))

        for stream in await asyncio.gather(*(one(context) for context in dict.fromkeys(map(tuple, contexts)))):
            if stream.error:
                raise WarmUpError(f"{self._target.url}: a context could not be computed: {stream.error}")


class _Batch:
    """Sets `decodes` once every decode stream has started."""

    def __init__(self, streams: int) -> None:
        self._waiting = set(range(streams))
        self.decodes = asyncio.Event()

    def has_started(self, number: int) -> None:
        self._waiting.discard(number)
        if not self._waiting:
            self.decodes.set()
