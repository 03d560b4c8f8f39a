"""Frees the KV of a SPLIT whose client left, or whose D could not be reached.

A P that still computes is aborted. A P that has announced a handoff pins the KV until a D pulls it, so a D is asked for
one token. An abandoned SPLIT first gets `GRACE_S`: P's answer may be on the wire, and a D that was just asked frees
nothing before its engine knows the request. Once the head of P's answer is there, P has computed the prompt, and the
rest of the answer is read for up to `READ_ON_S`. A D that is short of time reads a request later, and drops it unread
if its connection is closed by then. So it gets up to `READ_ON_S` to send the head of a stream, which shows that it has
read the request, or `READ_BY_S` where no stream was asked for.

Where D sets blocks aside for P to write into, both legs go on until P has computed the prompt: after an abort of P's, D
would wait for P, and keep these blocks, for minutes. D's goes on for a while more, as above.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Set
from typing import Any

from ...connectors import CONNECTORS, can_pair, reads_back
from ...connectors.leg import Pair
from ...connectors.prefill import prefill_fields
from ...errors import LegError, PPDError
from ...failures import ROWS, HandoffEffect, HealthEffect, Leg
from ...fleet.view import WorkerView
from ...fleet.worker import Role, WorkerId
from ...leg_moves import Legs, LegsEvent, LegsState
from ...openai.answer import AnswerObserver
from ...openai.body_members import Edited, encoded
from ...openai.request import Endpoint, Fields
from ...openai.stream_relay import Edits, StreamRelay
from ...upstream.answer_checks import until_begun
from ...upstream.call import Answer, Call, Timeouts
from ...upstream.client import Upstream
from ..attempt import Attempt, OpenAnswer
from ..state import State

log = logging.getLogger(__name__)

GRACE_S = 0.08  # the legs of a client that left end within 100 ms
READ_ON_S = 2.0  # for the rest of P's answer, or the head of D's
READ_TURNS = 8  # rounds of the loop from bytes in a socket to a parsed handoff
REACHED_S = 1.0  # to connect to the D that is to pull the KV
TAKEN_S = 10.0  # for its one token
MOST_TAKERS = 3  # Ds that are asked until one is reached
AT_ONCE = 32  # handoffs that are taken: a crowd that leaves must not stand before the turns of those who stay

_STREAMED: Fields = {"stream": encoded(True)}


class HandoffRelease:
    """Owns the tasks that outlive their clients."""

    def __init__(self, state: State, upstream: Upstream) -> None:
        self._registry = state.registry
        self._handoffs = state.handoffs
        self._health = state.health
        self._admission = state.admission
        self._metrics = state.metrics
        self._now = state.now
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(AT_ONCE)

    async def shielded(self, opening: Coroutine[Any, Any, OpenAnswer], attempt: Attempt) -> OpenAnswer:
        """The result of `opening`. If the client leaves first, its SPLIT is ended in the background."""
        task = asyncio.create_task(opening)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            _leave(attempt)
            if attempt.legs is not None and attempt.legs.state is LegsState.OVER:
                task.cancel()  # now, as what a leg comes to after that has no meaning
            self._own(self._end_abandoned(task, attempt))
            raise

    def release(self, attempt: Attempt) -> None:
        """The D of this SPLIT was never reached: another D pulls the KV, so that P can free it."""
        self._own(self._release(attempt))

    async def close(self, limit_s: float = 0.0) -> None:
        """Waits for tasks under way, for up to `limit_s` or `REACHED_S` if that is longer, then cancels them.

        What is cancelled leaves KV in engines: on P until its lease ends, in blocks that D has set aside for minutes.
        """
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(limit_s, REACHED_S))
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
            log.error("an abandoned SPLIT could not be ended", exc_info=task.exception())

    async def _end_abandoned(self, task: asyncio.Task[OpenAnswer], attempt: Attempt) -> None:
        legs, both = attempt.legs, attempt.both
        assert legs is not None, "a SPLIT has two"
        try:
            if legs.state is LegsState.LEFT_BOTH and both is not None:
                await both.until_prefilled()
            if legs.state in (LegsState.LEFT_PREFILL, LegsState.LEFT_PULL):
                await self._wind_up(task, attempt)
            is_unreached = legs.state is LegsState.LEFT_PULL and not attempt.has_asked_decode
            if both is not None:
                both.close(is_unreached=is_unreached)
            else:
                legs.take(LegsEvent.UNREACHED if is_unreached else LegsEvent.CLOSED)
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is None:
                attempt.has_answered()
            attempt.close()
        self._metrics.abandoned.labels(await self._fate(attempt, legs)).inc()

    async def _fate(self, attempt: Attempt, legs: Legs) -> str:
        """Of P's KV."""
        if attempt.handoff is None:
            return "aborted"
        if legs.state is LegsState.UNTAKEN:
            await self._release(attempt)
            return "left" if self._handoffs.has(attempt.attempt_id) else "taken"
        if legs.state is LegsState.TAKEN:
            self._handoffs.close(attempt.attempt_id)
            return "taken"
        return "left" if self._handoffs.has(attempt.attempt_id) else "aborted"

    async def _wind_up(self, task: asyncio.Task[OpenAnswer], attempt: Attempt) -> None:
        await asyncio.wait({task}, timeout=GRACE_S)
        for _ in range(READ_TURNS):  # so that a handoff which P has already sent is read
            await asyncio.sleep(0)
        if attempt.both is None and attempt.has_prefill_begun_to_answer:
            attempt.booking.release(self._now())  # neither engine works for it
            self._admission.admit_waiting()
            await asyncio.wait({task}, timeout=READ_ON_S)
        pause_s, left_s = GRACE_S, READ_ON_S  # looks, as nobody is told of a head
        while left_s > 0 and attempt.may_be_unread(_loop_s()):
            await asyncio.wait({task}, timeout=min(pause_s, left_s))
            pause_s, left_s = 2 * pause_s, left_s - pause_s

    async def _release(self, attempt: Attempt) -> None:
        """Asks one D after the other while none has been reached; a D that was may have used the handoff."""
        assert attempt.decision.prefill is not None and attempt.handoff is not None, "there is something to release"
        if not CONNECTORS[attempt.decision.prefill.worker.connector].needs_handoff:
            return
        tried = set[WorkerId]()
        if attempt.leg is not None and attempt.leg.error is not None:
            tried.add(attempt.decision.decode.id)
        async with self._places:
            for _ in range(MOST_TAKERS):
                decode = self._taker(attempt, tried)
                if decode is None:
                    return
                tried.add(decode.id)
                asked_s = self._now()
                try:
                    await self._have_taken(attempt, decode)
                    return
                except LegError as exc:
                    log.info("a handoff stays pinned on P unless another D takes it: %s", exc)
                    row = ROWS[Leg.DECODE, exc.phase, exc.cause]
                    if row.health is HealthEffect.OPENED:  # a time-out proves little: turns have longer ones
                        self._health.leg_failed(Leg.DECODE, exc, decode.id, asked_s)
                    if row.handoff is not HandoffEffect.RELEASED:
                        return
                except PPDError as exc:  # nothing is left to ask with
                    log.info("a handoff stays pinned on P until its lease ends: %s", exc)
                    return

    async def _have_taken(self, attempt: Attempt, decode: WorkerView) -> None:
        prefill, handoff = attempt.decision.prefill, attempt.handoff
        assert prefill is not None and handoff is not None, "it is to be taken off P"
        endpoint, fields, keeps = attempt.request.endpoint, attempt.request.fields, reads_back(decode.worker)
        # D pulls the KV when it begins; one token is the least that it can be asked for. A D from which P may read back
        # keeps the KV of each answer that it ends, for minutes: so it is asked for a stream, left as it begins.
        if keeps:
            least: Fields = Edited.of(fields, _STREAMED)
        else:
            least = prefill_fields(endpoint, fields, decode.worker)
        connector, pair = CONNECTORS[prefill.worker.connector], Pair(prefill.worker, decode.worker)
        leg = connector.decode_leg(endpoint, least, pair, attempt.leg_id("f"), handoff)
        used = self._registry.reserve(decode.id)
        try:
            async with self._upstream.answer(
                Call(decode.worker, once=True, expiry=attempt.expiry),
                leg.path,
                body=leg.parts,
                headers={**attempt.headers, **leg.headers},
                timeouts=Timeouts(REACHED_S, TAKEN_S, TAKEN_S),
            ) as answer:
                if await _has_taken(answer, endpoint, is_stream=keeps):
                    self._handoffs.close(attempt.attempt_id)
        finally:
            self._registry.release(decode.id, used)

    def _taker(self, attempt: Attempt, tried: Set[WorkerId]) -> WorkerView | None:
        """The turn's own D, else the least loaded one that can pair with this P or lender.

        The own one comes last where it was slow to let the proxy in, as in a TLS handshake, and so do those that fail
        turns. An R is asked only where the turn's own is one: others may have no connector, whatever was said of them.
        """
        prefill, own = attempt.decision.prefill, attempt.decision.decode
        failing, is_slow = self._health.breakers.blocked(self._now()), attempt.call is not None
        able = [
            view
            for view in self._registry.views()
            if view.role in (Role.DECODE, own.role) and view.takes_turns(attempt.request.model)
            if prefill is not None and can_pair(prefill.worker, view.worker) and view.id != prefill.id
            if not view.worker.has_sidecar and view.id not in tried
        ]
        return min(
            able, key=lambda view: (view.id in failing, (view.id == own.id) is is_slow, view.requests), default=None
        )


def _loop_s() -> float:
    return asyncio.get_running_loop().time()


async def _has_taken(answer: Answer, endpoint: Endpoint, *, is_stream: bool) -> bool:
    """Whether D has the KV, once it has answered; of a stream, once it has begun."""
    if answer.status != 200 or not is_stream:
        await answer.body()
        return answer.status == 200
    observer = AnswerObserver(endpoint)
    await until_begun(endpoint, answer, StreamRelay(endpoint, Edits(), observer), observer, TAKEN_S)
    return observer.summary.error is None


def _leave(attempt: Attempt) -> None:
    attempt.is_left = True
    if attempt.both is not None:
        attempt.both.leave()
    elif attempt.legs is not None:
        attempt.legs.take(LegsEvent.LEFT)
