"""The end of a hand-over that its client left, or whose D could not be asked: no KV stays pinned on P for it.

A P that computes is told to abort. A P that has announced a handoff pins the KV until a D takes it, so a D is asked for
one token. What the client left behind gets `GRACE_S` first: P's answer may be on the wire, and a D that was just asked
frees nothing before its engine knows the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from ..connectors import CONNECTORS, can_pair
from ..connectors.leg import Pair
from ..connectors.prefill import engine_version, prefill_fields
from ..errors import LegError
from ..fleet.view import WorkerView
from ..fleet.worker import Role
from ..upstream.call import Call, Timeouts
from ..upstream.client import Upstream
from .attempt import Attempt, OpenAnswer
from .state import State

log = logging.getLogger(__name__)

GRACE_S = 0.08  # a client's leaving ends its legs within 100 ms
READ_TURNS = 8  # from bytes in a socket to the handoff that they tell of
REACHED_S = 1.0  # to connect to the D that takes a handoff which waits
TAKEN_S = 10.0  # for its one token


class WindingUp:
    """Owns the tasks that outlive their clients."""

    def __init__(self, state: State, upstream: Upstream) -> None:
        self._registry = state.registry
        self._ledger = state.ledger
        self._metrics = state.metrics
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()

    async def shielded(self, opening: Coroutine[Any, Any, OpenAnswer], attempt: Attempt) -> OpenAnswer:
        """The result of `opening`; where the client leaves first, its hand-over is wound up in the background."""
        task = asyncio.create_task(opening)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            attempt.is_left = True
            self._own(self._wind_up(task, attempt))
            raise

    def release(self, attempt: Attempt) -> None:
        """The D of this hand-over was never reached: another one takes the KV off P's hands."""
        self._own(self._release(attempt))

    async def close(self) -> None:
        """Waits for what is under way, not for long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=REACHED_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a hand-over could not be wound up", exc_info=task.exception())

    async def _wind_up(self, task: asyncio.Task[OpenAnswer], attempt: Attempt) -> None:
        try:
            await asyncio.wait({task}, timeout=GRACE_S)
            for _ in range(READ_TURNS):  # of the loop: what P has sent by now is not lost
                await asyncio.sleep(0)
        finally:
            task.cancel()
            await asyncio.wait({task})
            attempt.close()
        if attempt.handoff is None:
            fate = "aborted"
        elif not attempt.has_asked_decode:
            await self._release(attempt)
            fate = "left" if self._ledger.has(attempt.leg_id("p")) else "taken"
        elif task.cancelled() or task.exception() is None:
            fate = "taken"
            self._ledger.close(attempt.leg_id("p"))
        else:
            fate = "left"
        self._metrics.abandoned.labels(fate).inc()

    async def _release(self, attempt: Attempt) -> None:
        decision, handoff = attempt.decision, attempt.handoff
        prefill, decode = decision.prefill, self._taker(attempt)
        assert prefill is not None and handoff is not None, "there is something to release"
        connector = CONNECTORS[prefill.worker.connector]
        if decode is None or not connector.needs_handoff:
            return
        endpoint = attempt.request.endpoint
        pair = Pair(prefill.worker, decode.worker)
        # One token is the least that D computes, and all that this leg is for is its beginning.
        least = prefill_fields(endpoint, attempt.request.fields, engine_version(decode.worker.engine_version))
        leg = connector.decode_leg(endpoint, least, pair, attempt.leg_id("f"), handoff)
        self._registry.reserve(decode.id, 0)
        try:
            async with self._upstream.answer(
                Call(decode.worker, once=True),
                leg.path,
                body=leg.parts,
                headers={**attempt.headers, **leg.headers},
                timeouts=Timeouts(REACHED_S, TAKEN_S, TAKEN_S),
            ) as answer:
                await answer.body()
                if answer.status == 200:
                    self._ledger.close(attempt.leg_id("p"))
        except LegError as exc:
            log.info("a handoff waits for the end of its lease: %s", exc)
        finally:
            self._registry.release(decode.id)

    def _taker(self, attempt: Attempt) -> WorkerView | None:
        """The D of the turn, unless that was tried; else the least loaded that could have had it."""
        prefill, own = attempt.decision.prefill, attempt.decision.decode.id
        able = [
            view
            for view in self._registry.views()
            if view.role is Role.DECODE and view.takes_turns(attempt.request.model)
            if prefill is not None and can_pair(prefill.worker, view.worker)
        ]
        if attempt.call is not None:
            able = [view for view in able if view.id != own]
        return min(able, key=lambda view: (view.id != own, view.requests), default=None)
