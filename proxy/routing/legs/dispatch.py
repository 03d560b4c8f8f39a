"""Runs the legs of one decision up to the answer's first event.

Nothing goes to the client from here. When `open` returns, the answering worker's status is known and its first event
has come. When it raises, all its legs are closed, and another attempt may follow; but those of a client that has left
may be wound up by `HandoffRelease`.
"""

from __future__ import annotations

from ...bodies.body_reader import BodyReader
from ...config import ProxyConfig
from ...errors import LegError
from ...failures import Leg
from ...fleet.worker import Worker
from ...upstream.client import Upstream
from ..attempt import Attempt, OpenAnswer
from ..state import State
from .by_sidecar import sidecar_leg
from .encoder_legs import EncoderLegs
from .handoff_release import HandoffRelease
from .one_leg import OneLeg
from .split import Split


class Dispatcher:
    """Runs legs; what it reserves and opens is held by the `Attempt`."""

    def __init__(
        self,
        config: ProxyConfig,
        upstream: Upstream,
        handoff_release: HandoffRelease,
        state: State,
        bodies: BodyReader,
    ) -> None:
        self._encoders = EncoderLegs(config, upstream, state)
        self._health = state.health
        self._now = state.now
        self._upstream = upstream
        self._handoff_release = handoff_release
        self._leg = OneLeg(config, upstream, state, bodies)
        self._split = Split(self._leg, handoff_release, state)
        self._on_close = self._closed  # one bound method for all attempts

    async def open(self, attempt: Attempt) -> OpenAnswer:
        """The answer at its first event; LegError, with everything closed, where a leg fails."""
        try:
            attempt.booking.reserve(self._now())
            attempt.touches.sent()
            attempt.on_close = self._on_close
            has_sidecar = attempt.decision.decode.worker.has_sidecar
            if attempt.request.media and not has_sidecar:  # which lets through nothing that encoders tell
                await self._encode(attempt)
            if attempt.decision.prefill is None:
                kind = attempt.answering_leg
                return await self._leg.answered(attempt, self._leg.plain(attempt, kind[0]), kind)
            return await (self._by_sidecar(attempt) if has_sidecar else self._split.answer(attempt))
        except BaseException:
            if not attempt.is_left:  # else `HandoffRelease` closes it
                attempt.close()
            raise

    async def examine(self, exc: LegError, worker: Worker) -> LegError:
        """A leg's failure, once it is known whether its worker is dead."""
        return await self._upstream.examine(exc, worker)

    async def is_dead(self, worker: Worker) -> bool:
        return await self._upstream.is_dead(worker)

    def release(self, attempt: Attempt) -> None:
        """Has another D pull the KV of a handoff whose own D was never reached."""
        self._handoff_release.release(attempt)

    async def _by_sidecar(self, attempt: Attempt) -> OpenAnswer:
        leg = sidecar_leg(attempt, self._leg.fields(attempt, attempt.decision.decode.worker))
        opened = await self._leg.answered(attempt, leg, Leg.DECODE)
        if not attempt.is_finished_on_prefill:
            self._health.prefilled(attempt.decision, attempt.asked_s, moved=attempt.handoff is not None)
        return opened

    async def _encode(self, attempt: Attempt) -> None:
        note = attempt.receipt.note_encoders
        attempt.encoded = encoded = await self._encoders.encode(attempt.encoder_turn, note)
        before_s, attempt.asked_s = attempt.asked_s, self._now()  # what was predicted is without encoders
        self._health.asked_later(attempt.decision, before_s, attempt.asked_s)
        if encoded.is_late and attempt.foreseen is not None:
            attempt.foreseen = attempt.foreseen.without_ttft

    def _closed(self, attempt: Attempt) -> None:
        if attempt.leg is not None:
            self._leg.end(attempt, attempt.leg)
        if attempt.encoded is not None:
            attempt.encoded.computed(well=False)
        self._leg.free_prefill(attempt.booking)
        attempt.booking.release(self._now())
        attempt.touches.close()
