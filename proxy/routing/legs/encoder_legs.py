"""Runs the encoders' legs of a turn, before its others: side by side, within one limit, and without ever failing it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from ...config import ProxyConfig
from ...connectors.leg import REQUEST_ID
from ...encoders.answers import LABEL, EncodedItems, leg_body, read_answer
from ...encoders.choosing import ItemDecision, left_to_worker
from ...encoders.encoder_chooser import EncodedTurn, EncoderTurn, as_text
from ...errors import LegError, refusal
from ...failures import Cause, Leg, Phase
from ...fleet.view import WorkerView
from ...health.poisoned_prompts import is_loss, life_of
from ...media.items import MediaItem
from ...openai.request import Endpoint
from ...runtime.loop_watch import time_limit
from ...telemetry.receipts import EncoderLegRecord, EncoderRecord
from ...upstream.call import Call, Timeouts
from ...upstream.client import Upstream
from ..state import State

log = logging.getLogger(__name__)

LEGS_AT_ONCE = 32  # asked in one step of the loop: each takes some 0.1 ms, and a request may have hundreds of items


class EncoderLegs:
    """Asks the encoders that are chosen for a turn."""

    def __init__(self, config: ProxyConfig, upstream: Upstream, state: State) -> None:
        self._chooser = state.encoders
        self._upstream = upstream
        self._registry = state.registry
        self._health = state.health
        self._poisoned = state.poisoned
        self._metrics = state.metrics
        self._now = state.now
        self._limit_s = config.encoder_timeout_s
        self._timeouts = Timeouts(config.connect_timeout_s, config.encoder_timeout_s, config.encoder_timeout_s)

    async def encode(self, turn: EncoderTurn, note: Callable[[EncoderRecord], None]) -> EncodedTurn:
        """What the turn's other legs carry. What a leg that fails leaves is for the worker that computes the prompt.

        note: told what was done, also where the client leaves meanwhile; nothing where the fleet has no encoder.
        """
        choices = self._chooser.choose(turn)
        if choices is None:
            return EncodedTurn()
        seconds = self._chooser.seconds(turn.request.model)
        record = EncoderRecord(
            began_s=self._now() - turn.started_s, on_encoder_s=seconds.on_encoder, in_place_s=seconds.in_place
        )
        decisions = choices.decisions
        try:
            found = await self._all_legs(turn, choices.batches, record, decisions)
            record.items = as_text(turn.request.media, decisions)
        finally:
            record.waited_s = self._now() - turn.started_s - record.began_s
            note(record)
        return EncodedTurn(
            found,
            is_late=left_to_worker(decisions) > 0,
            on_computed=self._chooser.until_computed(turn, decisions, turn.predicted_s),
        )

    async def _all_legs(
        self,
        turn: EncoderTurn,
        batches: Iterable[tuple[WorkerView, list[MediaItem]]],
        record: EncoderRecord,
        decisions: dict[str, ItemDecision],
    ) -> EncodedItems:
        legs: dict[asyncio.Task[EncodedItems | None], list[MediaItem]] = {}
        try:
            for number, (view, items) in enumerate(batches):
                if number and number % LEGS_AT_ONCE == 0:
                    await asyncio.sleep(0)
                legs[asyncio.create_task(self._leg(turn, view, items, turn.leg_id(f"e{number}"), record))] = items
            if legs:
                await asyncio.wait(legs)
        finally:
            if left := [leg for leg in legs if not leg.done()]:  # as its client has
                for leg in left:
                    leg.cancel()
                await asyncio.wait(left)
        found = EncodedItems()
        for leg, items in legs.items():
            if (error := leg.exception()) is not None:
                log.error("request %s: %s failed", turn.leg_id("e"), LABEL, exc_info=error)
            if error is not None or (told := leg.result()) is None:
                decisions.update((item.name, ItemDecision.FAILED) for item in items)
            else:
                found = found.joined(told)
        return found

    async def _leg(
        self, turn: EncoderTurn, view: WorkerView, items: list[MediaItem], leg_id: str, record: EncoderRecord
    ) -> EncodedItems | None:
        """None where it failed."""
        asked_s, breakers = self._now(), self._health.breakers
        noted = EncoderLegRecord(
            id=leg_id,
            worker=view.name,
            address=view.worker.address,
            items=len(items),
            started_s=asked_s - turn.started_s,
        )
        record.legs.append(noted)
        breakers.began(view.id, asked_s)
        encoded = self._chooser.until_encoded(turn, view, items)
        used = self._registry.reserve(view.id)
        try:
            found = await self._asked(turn, view, items, leg_id)
        except LegError as exc:
            noted.error = f"{exc.phase}: {exc.cause}"
            exc = await self._upstream.examine(exc, view.worker)
            if turn.named is None:  # what it means for E is what it means for P; of one that is named the picker judges
                count = partial(self._health.leg_failed, Leg.PREFILL, exc, view.id, asked_s)
                turn.doubts.count(exc, count)
            if is_loss(exc):  # no reason to refuse the turn, unless another worker ends its connection too
                self._poisoned.lost(turn.request.prompt.chain.end(), life_of(view), self._now())
            self._metrics.failures.labels(LABEL, exc.phase, exc.cause).inc()
            log.warning("request %s: %s on %s: %s at %s", leg_id, LABEL, view.name, exc.cause, exc.phase)
            return None
        finally:
            breakers.abandoned(view.id, asked_s)
            self._registry.release(view.id, used)
            noted.ended_s = self._now() - turn.started_s
            self._metrics.legs.observe(noted.ended_s - noted.started_s, LABEL)
        self._health.succeeded(view.id)
        encoded()
        return found

    async def _asked(self, turn: EncoderTurn, view: WorkerView, items: list[MediaItem], leg_id: str) -> EncodedItems:
        call, body = Call(view.worker), leg_body(turn.request, items)
        headers = {**turn.headers, REQUEST_ID: leg_id}
        try:
            async with (
                time_limit(self._limit_s),
                self._upstream.answer(
                    call, Endpoint.CHAT, body=body, headers=headers, timeouts=self._timeouts
                ) as answer,
            ):
                told = await answer.body()
                if answer.status != 200:
                    raise refusal(
                        answer.status,
                        b"",
                        worker=view.id,
                        phase=Phase.HEADERS,
                        retry_after_s=answer.retry_after_s,
                    )
        except TimeoutError as exc:
            raise call.error("the items were not encoded in time", Cause.TIMEOUT) from exc
        found = read_answer(told, items)
        if found is None:
            said = "the encoder's 200 holds no answer"
            raise LegError(said, worker=view.id, phase=Phase.FIRST_EVENT, cause=Cause.MALFORMED)
        return found
