"""A turn that Envoy carries: what its workers are believed to do from the decision on, and what became of it.

Best is a sidecar's report, or to see the answer, where Envoy sends it: then the turn is learnt from as the proxy's own
are. Where only the answer's head was seen the turn ends with Envoy's call, and what it took is the estimate of before.
Its receipt says which it was (`counts_evidence`). Where the worker's sidecar has reported before, the end of the turn
waits a second for its report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from ..connectors.leg import Handoff
from ..discovery.turn_report import FailedLeg, TurnReport, as_replicas
from ..encoders.answers import LABEL
from ..errors import LegError, refusal
from ..failures import ROWS, Cause, Leg, Phase
from ..fleet.worker import Role, WorkerId
from ..openai.answer import ABORTED, AnswerObserver, AnswerSummary
from ..openai.edits import Edits
from ..openai.reply_key import ReplyKey
from ..openai.stream_relay import StreamRelay
from ..policy import Route
from ..routing.attempt import Attempt, Job
from ..routing.choosing import NEXT_BEST, Chooser
from ..routing.learning import Learner, SeenAnswer
from ..routing.state import State
from ..routing.stream import complete, tell
from ..sessions.prefix_chain import PrefixEnd
from ..telemetry.receipts import LegRecord
from .headers import ATTEMPTS, DIGITS
from .picked_encoders import PickedEncoders
from .reports import Reports

EVENT_STREAM = "text/event-stream"
OK, BAD_GATEWAY, UNAVAILABLE = 200, 502, 503
WHOLE_LIMIT_BYTES = 8 * 1024 * 1024  # of an answer that is no stream: a longer one is not read
REPORTED_S = 1.0  # after Envoy's call has ended; workers and queue are freed before
_PULLED = Handoff(params={}, tokens=0, cached_tokens=None)
"""D counts all KV that it pulled as cached; how much P had found, nobody tells."""


class PickedTurn:
    """Each call states what has happened; `ended` may come at any time, and twice."""

    def __init__(
        self,
        state: State,
        learner: Learner,
        chooser: Chooser,
        reports: Reports,
        job: Job,
        attempt: Attempt,
        others: Sequence[WorkerId] = (),
    ) -> None:
        """others: who may serve it in place of the attempt's worker, in Envoy's order. Holds nothing if it raises."""
        self._named = (attempt.decode, *others)
        self.turn_id = attempt.given_id  # that its sidecar was told; of one that is served elsewhere too
        self._state = state
        self._reports = reports
        self._waiting: asyncio.TimerHandle | None = None  # for a report
        self._learner = learner
        self._chooser = chooser
        self._observer: AnswerObserver | None = None  # once any of the answer is seen
        self._reply: ReplyKey | None = None  # fed by it
        self._relay: StreamRelay | None = None  # of a stream, once it is shown
        self._body = bytearray()
        self._is_stream = self._is_cut = False
        self._ended_s: float | None = None  # of Envoy's call, or of the answer
        self.on_end: Callable[[float], None] = lambda ended_s: None  # called once, when all is known
        self.encoders: PickedEncoders | None = None  # None: no media, or no encoder in the fleet
        self._early: TurnReport | None = None  # a report that came before the head
        self._status = 0
        self._times_s: tuple[float, float] | None = None  # of the first and the last token
        self._attempt = attempt
        attempt.request = job.request.without_prompt()
        attempt.handoff = None if attempt.decision.prefill is None else _PULLED
        self._job = replace(job, request=attempt.request)
        try:
            self._reserve(self._state.now())
        except BaseException:
            attempt.close()
            raise
        reports.open(attempt.receipt.id, self)

    def _reserve(self, now_s: float) -> None:
        attempt = self._attempt
        decode = attempt.decision.decode
        attempt.on_close = self._closed
        attempt.booking.reserve(now_s)
        attempt.touches.sent()
        self._state.health.asked(attempt.decision, attempt.asked_s)
        leg = attempt.leg = LegRecord(
            kind=attempt.answering_leg,
            id=attempt.receipt.id,
            worker=decode.name,
            address=decode.worker.address,
            started_s=now_s - attempt.started_s,
        )
        attempt.receipt.legs.append(leg)

    @property
    def worker(self) -> WorkerId:
        return self._attempt.decode

    @property
    def is_over(self) -> bool:
        return self._attempt.receipt.outcome != "running"

    def head(self, headers: Mapping[str, str], by: WorkerId) -> None:
        """The answer's head has come. by: who has served it, as Envoy says; empty: it does not."""
        status, asked = headers.get(":status", ""), headers.get(ATTEMPTS, "")
        self.served_by(by, asked=int(asked[:DIGITS]) if asked.isdecimal() else None)
        is_stream = headers.get("content-type", "").startswith(EVENT_STREAM)
        self.began(int(status[:DIGITS]) if status.isdecimal() else 0, is_stream=is_stream)

    def served_by(self, worker: WorkerId, *, asked: int | None) -> None:
        """Before `began`: the worker that answers, of those that Envoy was told.

        asked: how many Envoy has asked; None: it does not say. Where it has asked one only, it did not know the others.
        """
        view = self._state.registry.view(worker)
        if worker == self.worker or view is None or view.role is Role.PREFILL or self.is_over:
            return
        before, now_s = self._attempt, self._state.now()
        if asked != 1:
            missed = self._named[: self._named.index(worker)] if worker in self._named else self._named[:1]
            for each in missed:
                exc = LegError("Envoy has not reached it", worker=each, phase=Phase.CONNECT, cause=Cause.REFUSED)
                if each == before.decode:
                    self._blame(exc)
                else:
                    self._state.health.leg_failed(before.answering_leg, exc, each, before.asked_s)
        self._state.health.left(before.decision, before.asked_s)
        if self.encoders is not None:
            self.encoders.computed(well=False)
        moved = self._chooser.moved(self._job, before, view)
        before.permit = None
        before.close()
        self._attempt = moved
        self._reserve(now_s)

    def began(self, status: int, *, is_stream: bool) -> None:
        """The answer's head has come."""
        attempt, now_s = self._attempt, self._state.now()
        self._status, self._is_stream = status, is_stream
        if attempt.leg is not None:
            attempt.leg.status = status
            attempt.leg.first_event_s = now_s - attempt.started_s
        self._take_early()
        if status != OK or self.is_over:
            return
        attempt.booking.free_prefill(now_s)
        if attempt.decision.prefill is not None:
            attempt.touches.prefilled(None)
        attempt.booking.computed(now_s)
        attempt.touches.answering()
        if self.encoders is not None:
            self.encoders.computed(well=True)
        attempt.doubts.answered()
        self._state.health.began(attempt.decision)
        self._state.health.prefilled(attempt.decision, attempt.asked_s, moved=False)
        self._state.admission.admit_waiting()

    def observe(self, data: bytes) -> None:
        """A piece of the answer's body."""
        observer = self._observing()
        if self.is_over or self._status != OK or self._is_cut:
            return
        if not self._is_stream:
            self._is_cut = len(self._body) + len(data) > WHOLE_LIMIT_BYTES
            self._body += b"" if self._is_cut else data
            return
        if self._relay is None:
            self._relay = StreamRelay(self._attempt.request.endpoint, Edits(), observer)
        self._relay.feed(data)
        summary, now_s = observer.summary, self._state.now()
        if summary.first_token_seen:
            self._times_s = (now_s if self._times_s is None else self._times_s[0]), now_s
        if summary.completed:
            self.ended()

    def ended(self) -> None:
        """The answer has ended, or Envoy's call has: then nothing more will be known of it.

        Before a head has come, the client has gone. After it, a client that leaves looks as one that stays.
        """
        self._ended_s = self._state.now() if self._ended_s is None else self._ended_s
        self._take_early()
        if self.is_over or self._waiting is not None:
            return
        observer = self._observer
        if observer is not None and self._body and not self._is_cut:
            observer.observe_body(bytes(self._body))
        if not self._status:
            self._left()
        elif self._status != OK:
            self._failed(refusal(self._status, b"", worker=self._attempt.decode, phase=Phase.HEADERS))
        elif observer is not None and _is_good(observer.summary):
            self._completed(observer.summary)
        elif observer is not None and not self._is_cut:
            self._broken()
        elif self._reports.comes_from(self.worker):
            self._waiting = asyncio.get_running_loop().call_later(REPORTED_S, self._unreported)
        else:
            self._unreported()
        self._close()

    def _take_early(self) -> None:
        if self._early is not None:
            early, self._early = self._early, None
            self.reported(early)

    def _unreported(self) -> None:
        if not self.is_over:
            self._reports.missed(self._attempt.receipt.id, self.turn_id, self.worker)
            self._assumed(None)
            self._close()

    def reported(self, report: TurnReport) -> None:
        """What the sidecar says counts, unless the answer was seen to its end."""
        told = as_replicas(report) if self._attempt.decision.decode.role is Role.REPLICA else report
        if len(self._named) > 1 and told.outcome == "failed" and told.status == UNAVAILABLE:
            # It is not the last word: Envoy asks the next worker, and then says which one it was.
            for failed in () if self._status or self.is_over else told.failed_legs:
                self._blame_leg(failed)
            return
        if len(self._named) > 1 and not self._status and self._ended_s is None:
            self._early = report  # whose it is, Envoy says with the head
            return
        if self._waiting is not None:
            self._waiting.cancel()
        if self.is_over:
            return
        self._attempt.receipt.counts_evidence = "report"
        for failed in told.failed_legs:
            self._blame_leg(failed)
        if told.outcome == "completed":
            self._reported_whole(told)
        elif told.outcome == "cancelled":
            self._left()
        elif told.outcome == "broken":
            self._attempt.receipt.error = told.failure
            self._learner.broken(self._attempt.receipt, self._elapsed_s())
        else:
            exc = refusal(told.status or BAD_GATEWAY, b"", worker=self.worker, phase=Phase.HEADERS)
            self._chooser.left(self._job, exc)
            self._attempt.receipt.error = told.failure or self._attempt.receipt.error
        self._close()

    def _reported_whole(self, report: TurnReport) -> None:
        if not self._status:  # it came before Envoy told of the head
            self.began(OK, is_stream=self._is_stream)
        attempt = self._attempt
        attempt.doubts.answered()
        attempt.handoff = None
        if report.route in (Route.SPLIT, Route.READBACK):
            attempt.handoff = Handoff(params={}, tokens=0, cached_tokens=report.prefill_cached_tokens)
        summary = AnswerSummary() if self._observer is None else self._observer.summary
        summary.prompt_tokens, summary.completion_tokens = report.prompt_tokens, report.completion_tokens
        summary.cached_tokens = report.decode_cached_tokens
        if report.first_token_s is not None and report.last_token_s is not None:
            asked_s = attempt.asked_s
            if attempt.decision.reason == NEXT_BEST:  # it is the time of the head, which comes with the first token
                asked_s -= report.first_token_s
            self._times_s = asked_s + report.first_token_s, asked_s + report.last_token_s
        self._completed(summary)

    def _blame_leg(self, failed: FailedLeg) -> None:
        """A leg of the turn that failed, whatever became of the turn. A sidecar knows its engine by another address."""
        is_encoder = failed.leg == LABEL
        try:
            leg = Leg.PREFILL if is_encoder else Leg(failed.leg)  # what it means for E is what it means for P
            phase, cause = Phase(failed.phase), Cause(failed.cause)
            ROWS[leg, phase, cause]
        except (ValueError, KeyError):  # of another version
            return
        attempt, health = self._attempt, self._state.health
        worker = WorkerId(failed.address) if leg is Leg.PREFILL else self.worker
        exc = LegError("the sidecar says so", worker=worker, phase=phase, cause=cause)
        if is_encoder and self.encoders is not None:
            self.encoders.failed(worker)
        if worker == self.worker:
            attempt.doubts.count(exc, partial(health.count, leg, exc, attempt.decision, attempt.asked_s))
            health.left(attempt.decision, attempt.asked_s)
        elif self._state.registry.view(worker) is not None:
            attempt.doubts.count(exc, partial(health.leg_failed, leg, exc, worker, attempt.asked_s))
        self._state.metrics.failures.labels(failed.leg, phase, cause).inc()

    def _observing(self) -> AnswerObserver:
        if self._observer is None:
            request = self._attempt.request
            self._reply = ReplyKey(request)
            self._observer = AnswerObserver(request.endpoint, self._reply)
        return self._observer

    def _elapsed_s(self) -> float:
        return self._state.now() - self._attempt.started_s

    def _left(self) -> None:
        self._state.health.left(self._attempt.decision, self._attempt.asked_s)
        self._chooser.left(self._job, asyncio.CancelledError())

    def _completed(self, summary: AnswerSummary) -> None:
        reply = self._reply
        if reply is None:
            reply = ReplyKey(self._attempt.request)
            reply.give_up()  # its text is not known
        if summary.prompt_tokens is None:
            self._assumed(reply.key())
        else:
            answer = SeenAnswer(summary, reply, self._times_s)
            complete(self._state, self._learner, self._job.match, self._attempt, answer)
            tell(self._state)

    def _assumed(self, reply: PrefixEnd | None) -> None:
        self._attempt.booking.release(self._state.now())
        self._learner.assumed(self._job.match, self._attempt, reply, self._state.now())
        tell(self._state)
        self._state.health.completed(self._attempt.decision)

    def _failed(self, exc: LegError) -> None:
        self._blame(exc)
        self._note_error(exc)
        self._chooser.left(self._job, exc)

    def _broken(self) -> None:
        """After its head, and before its end."""
        attempt = self._attempt
        exc = LegError("the answer broke off", worker=attempt.decode, phase=Phase.STREAM, cause=Cause.RESET)
        self._blame(exc)
        self._note_error(exc)
        self._learner.broken(attempt.receipt, self._elapsed_s())

    def _blame(self, exc: LegError) -> None:
        attempt = self._attempt
        leg = attempt.answering_leg
        if attempt.leg is not None:
            attempt.leg.fail(exc)
        health = self._state.health
        attempt.doubts.count(exc, partial(health.count, leg, exc, attempt.decision, attempt.asked_s))
        health.left(attempt.decision, attempt.asked_s)
        self._state.metrics.failures.labels(leg, exc.phase, exc.cause).inc()

    def _note_error(self, exc: LegError) -> None:
        self._attempt.receipt.error = f"{self._attempt.answering_leg} {exc.phase}: {exc.cause}"

    def _close(self) -> None:
        self._attempt.close()
        if self.encoders is not None:
            self.encoders.computed(well=False)
        if self.is_over:
            if self.encoders is not None:
                self.encoders.ended(well=self._attempt.receipt.outcome == "completed")
            self._reports.close(self._attempt.receipt.id, self)
            on_end, self.on_end = self.on_end, lambda ended_s: None
            on_end(self._state.now() if self._ended_s is None else self._ended_s)

    def _closed(self, attempt: Attempt) -> None:
        now_s = self._state.now()
        if (leg := attempt.leg) is not None:
            if leg.ended_s is None:  # else its turn has ended, and its receipt says when it did
                leg.ended_s = now_s - attempt.started_s
            self._state.metrics.legs.observe(leg.ended_s - leg.started_s, leg.kind)
        attempt.booking.release(now_s)
        attempt.touches.close()
        self._state.admission.admit_waiting()


def _is_good(summary: AnswerSummary) -> bool:
    return summary.completed and summary.finish_reason != ABORTED
