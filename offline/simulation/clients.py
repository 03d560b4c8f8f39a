"""The simulated clients: they play a run's conversations, open loop, and record each request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ppd.proxy.policy import Route

from ..experiment.records import Record
from .attempt import Routed
from .routing import Routing
from .sessions import Asked, SimulatedSession
from .timeline import Timeline
from .workers.engine import SimulatedSequence
from .workers.fleet import FinishedPrefill, SimulatedFleet, SimulatedLeg
from .workers.links import Work

TOO_LONG = 400  # the HTTP status of a prompt that no engine can hold
UNFINISHED = "not finished when the run was over"
BROKEN_OFF = "broken off: the worker was lost that answered"


class ClientPool:
    """The client's connection pool. A client that gives a connection back and asks again at once is served before those
    who wait.
    """

    def __init__(self, timeline: Timeline, limit: int | None) -> None:
        self._timeline = timeline
        self._free = limit
        self._queue: deque[Callable[[], None]] = deque()

    def ask(self, granted: Callable[[], None]) -> None:
        if self._free is None:
            granted()
        elif self._free > 0:
            self._free -= 1
            granted()
        else:
            self._queue.append(granted)

    def give_back(self) -> None:
        if self._free is not None:
            self._free += 1
            self._timeline.after(0.0, self._serve)

    def _serve(self) -> None:
        if self._free and self._queue:
            self._free -= 1
            self._queue.popleft()()


@dataclass(slots=True, eq=False)
class _Request:
    session: SimulatedSession
    turn: int  # from 1
    asked: Asked
    scheduled_s: float
    sent_s: float = 0.0
    first_token_s: float | None = None
    prefill_cached: int | None = None  # cached tokens on P
    job: SimulatedSequence | None = None
    work: Work = field(default_factory=Work)


class Watch(Protocol):
    """Is told of each request."""

    def sent(self, turn: int, now_s: float) -> None: ...
    def ended(self, record: Record, known_tokens: int, work: Work) -> None: ...


@dataclass(slots=True, eq=False)
class Clients:
    """`records` fills in the order in which requests end, where no watch takes them."""

    timeline: Timeline
    fleet: SimulatedFleet
    routing: Routing
    connections: ClientPool
    watch: Watch | None = None
    records: list[Record] = field(default_factory=list)
    open_sessions: int = 0
    _under_way: dict[_Request, None] = field(default_factory=dict)

    def play(self, sessions: Sequence[SimulatedSession]) -> None:
        self.open_sessions = len(sessions)
        for session in sessions:
            self.timeline.at(session.arrival_s, self._send, session, 1)

    def play_endless(self, sessions: Iterator[SimulatedSession]) -> None:
        """Sessions in order of arrival, each asked for when the one before it begins."""
        self._await(sessions)

    def give_up(self) -> None:
        """Records what has not ended, as failed."""
        for request in [*self._under_way]:
            self._record(request, "", 0, UNFINISHED)

    def _await(self, sessions: Iterator[SimulatedSession]) -> None:
        session = next(sessions, None)
        if session is not None:
            self.open_sessions += 1
            self.timeline.at(session.arrival_s, self._begin, session, sessions)

    def _begin(self, session: SimulatedSession, following: Iterator[SimulatedSession]) -> None:
        self._await(following)
        self._send(session, 1)

    def _send(self, session: SimulatedSession, turn: int) -> None:
        request = _Request(session, turn, session.ask(turn), self.timeline.now_s)
        self._under_way[request] = None
        if self.watch is not None:
            self.watch.sent(turn, request.scheduled_s)
        self.connections.ask(lambda: self._start(request))

    def _start(self, request: _Request) -> None:
        request.sent_s, asked = self.timeline.now_s, request.asked
        if not self.fleet.fits(asked.prompt_tokens + asked.output_tokens):
            self._record(request, Route.SPLIT, TOO_LONG, "the engines' KV cache is too small for this prompt")
            self._end(request)
            return
        self.routing.route(request.session.number, asked, lambda routed: self._serve(request, routed))

    def _serve(self, request: _Request, routed: Routed) -> None:
        asked = request.asked
        leg = SimulatedLeg(
            prompt=asked.prompt,
            prompt_tokens=asked.prompt_tokens,
            reply=asked.reply,
            output_tokens=asked.output_tokens,
            first_token=lambda: self._first_token(request, routed),
            finished=lambda: self._finished(request, routed),
            source=routed.source,
            reach_tokens=routed.reach_tokens,
            work=request.work,
            failed=lambda: self._failed(request, routed),
            media=asked.media,
        )
        if routed.prefill is None:
            request.job = self.fleet.ask(routed.decode, leg)
            return

        def handed_over(handoff: FinishedPrefill) -> None:
            request.prefill_cached = handoff.job.cached_tokens
            routed.prefilled(handoff.job.cached_tokens)
            request.job = self.fleet.decode(routed.decode, leg, handoff)

        self.fleet.prefill(routed.prefill, leg, routed.decode, handed_over)

    def _first_token(self, request: _Request, routed: Routed) -> None:
        request.first_token_s = self.timeline.now_s
        routed.answering()

    def _failed(self, request: _Request, routed: Routed) -> None:
        routed.failed()
        if request.first_token_s is None:
            request.prefill_cached = request.job = None
            routed.again()
            return
        self._record(request, routed.route, 200, BROKEN_OFF, routed)
        self._go_on(request)

    def _finished(self, request: _Request, routed: Routed) -> None:
        asked = request.asked
        cached = 0 if request.job is None else request.job.cached_tokens
        routed.completed(asked.prompt_tokens, asked.output_tokens, cached)
        self._record(request, routed.route, 200, "", routed)
        self._go_on(request)

    def _go_on(self, request: _Request) -> None:
        """With the session's next turn, as its pauses are."""
        self.connections.give_back()
        session, turn = request.session, request.turn + 1
        if turn > session.turns:
            self.open_sessions -= 1
            return
        think_s, gap_s = session.pauses_s(turn)
        pause_s = max(think_s, request.scheduled_s + gap_s - self.timeline.now_s)
        if pause_s > 0:
            self.timeline.after(pause_s, self._send, session, turn)
        else:
            self._send(session, turn)

    def _end(self, request: _Request) -> None:
        # A failed request ends its conversation; the turns that could no longer be sent failed with it.
        self.connections.give_back()
        self.open_sessions -= 1
        session, now_s = request.session, self.timeline.now_s
        for turn in range(request.turn + 1, session.turns + 1):
            unsent = _Request(session, turn, _UNSENT, now_s, now_s)
            if self.watch is not None:
                self.watch.sent(turn, now_s)
            self._record(unsent, session.wants(turn), 0, f"not sent: turn {request.turn} failed")

    def _record(self, request: _Request, route: str, status: int, error: str, routed: Routed | None = None) -> None:
        cached = request.prefill_cached  # as the proxy reports it: after a handoff, D counts all that it pulled
        if cached is None and request.job is not None:
            cached = request.job.cached_tokens
        record = Record(
            conversation=request.session.number,
            turn=request.turn,
            measured=request.session.measures(request.scheduled_s),
            scheduled_s=request.scheduled_s,
            sent_s=request.sent_s,
            first_token_s=request.first_token_s,
            last_token_s=None if error else self.timeline.now_s,
            prompt_tokens=request.asked.prompt_tokens,
            cached_tokens=cached,
            output_tokens=0 if error else request.asked.output_tokens,
            route=route,
            prefill=routed.prefill.name if routed is not None and routed.prefill else "",
            decode=routed.decode.name if routed is not None else "",
            status=status,
            error=error,
            images=request.asked.images,
        )
        self._under_way.pop(request, None)
        if self.watch is None:
            self.records.append(record)
        else:
            self.watch.ended(record, request.asked.known_tokens, request.work)


_UNSENT = Asked((), 0, (), 0, 0, (), (), 0)
