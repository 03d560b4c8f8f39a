"""The simulated clients: they play a run's conversations, open loop, and record each request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from ppd.proxy.policy import Route

from ..experiment.plan import Conversation
from ..experiment.records import Record
from .engine import SimulatedSequence
from .fleet import FinishedPrefill, SimulatedFleet, SimulatedLeg
from .kv_cache import Span
from .routing import Routed, Routing
from .timeline import Timeline

TOO_LONG = 400  # the HTTP status of a prompt that no engine can hold


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
    conversation: Conversation
    turn: int  # from 1
    prompt: tuple[Span, ...]
    reply: Span
    scheduled_s: float
    sent_s: float = 0.0
    first_token_s: float | None = None
    prefill_cached: int | None = None  # cached tokens on P
    job: SimulatedSequence | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(span.tokens for span in self.prompt)


@dataclass(slots=True, eq=False)
class Clients:
    """`records` fills in the order in which requests end."""

    timeline: Timeline
    fleet: SimulatedFleet
    routing: Routing
    connections: ClientPool
    is_retokenised: Callable[[], bool]  # asked for each answer that is sent back
    records: list[Record] = field(default_factory=list)
    open_conversations: int = 0
    _spans: Iterator[int] = field(default_factory=lambda: count(1))

    def play(self, conversations: list[Conversation]) -> None:
        self.open_conversations = len(conversations)
        for conversation in conversations:
            self.timeline.at(conversation.arrival_s, self._begin, conversation)

    def _begin(self, conversation: Conversation) -> None:
        first = conversation.turns[0]
        shared = conversation.shared_prefix_tokens
        prompt = (self._span(first.new_tokens - shared),)
        self._send(conversation, 1, (Span(0, shared), *prompt) if shared else prompt)

    def _send(self, conversation: Conversation, turn: int, prompt: tuple[Span, ...]) -> None:
        reply = self._span(conversation.turns[turn - 1].output_tokens)
        request = _Request(conversation, turn, prompt, reply, self.timeline.now_s)
        self.connections.ask(lambda: self._start(request))

    def _start(self, request: _Request) -> None:
        request.sent_s = self.timeline.now_s
        if not self.fleet.fits(request.prompt_tokens + request.reply.tokens):
            self._record(request, Route.SPLIT, "", "", TOO_LONG, "the engines' KV cache is too small for this prompt")
            self._end(request)
            return
        routed = self.routing.route(request.conversation, request.turn, request.prompt_tokens)
        leg = SimulatedLeg(
            prompt=request.prompt,
            prompt_tokens=request.prompt_tokens,
            reply=request.reply,
            first_token=lambda: self._first_token(request, routed),
            finished=lambda: self._finished(request, routed),
        )
        if routed.prefill is None:
            request.job = self.fleet.ask(routed.decode, leg)
            return

        def handed_over(handoff: FinishedPrefill) -> None:
            request.prefill_cached = handoff.job.cached_tokens
            routed.prefilled(handoff.job.cached_tokens)
            request.job = self.fleet.decode(routed.decode, leg, handoff)

        quiet = SimulatedLeg(request.prompt, request.prompt_tokens, request.reply, _nothing, _nothing)
        self.fleet.prefill(routed.prefill, quiet, routed.decode, handed_over)

    def _first_token(self, request: _Request, routed: Routed) -> None:
        request.first_token_s = self.timeline.now_s
        routed.answering()

    def _finished(self, request: _Request, routed: Routed) -> None:
        conversation, turn = request.conversation, request.turn
        cached = 0 if request.job is None else request.job.cached_tokens
        routed.completed(request.prompt_tokens, request.reply.tokens, cached)
        prefill = routed.prefill.name if routed.prefill else ""
        self._record(request, routed.route, prefill, routed.decode.name, 200, "")
        self.connections.give_back()
        if turn == len(conversation.turns):
            self.open_conversations -= 1
            return
        said = self._span(request.reply.tokens) if self.is_retokenised() else request.reply
        after = conversation.turns[turn]
        prompt = (*request.prompt, said, self._span(after.new_tokens))
        if after.think_s:
            self.timeline.after(after.think_s, self._send, conversation, turn + 1, prompt)
        else:
            self._send(conversation, turn + 1, prompt)

    def _end(self, request: _Request) -> None:
        # A failed request ends its conversation; the turns that could no longer be sent failed with it.
        self.connections.give_back()
        self.open_conversations -= 1
        now_s = self.timeline.now_s
        for turn in range(request.turn + 1, len(request.conversation.turns) + 1):
            unsent = _Request(request.conversation, turn, (), request.reply, now_s, now_s)
            wanted = request.conversation.turns[turn - 1].route or Route.SPLIT
            self._record(unsent, wanted, "", "", 0, f"not sent: turn {request.turn} failed")

    def _record(self, request: _Request, route: Route, prefill: str, decode: str, status: int, error: str) -> None:
        cached = request.prefill_cached  # as the proxy reports it: after a handoff, D counts all that it pulled
        if cached is None and request.job is not None:
            cached = request.job.cached_tokens
        self.records.append(
            Record(
                conversation=request.conversation.number,
                turn=request.turn,
                measured=request.conversation.measured,
                scheduled_s=request.scheduled_s,
                sent_s=request.sent_s,
                first_token_s=request.first_token_s,
                last_token_s=None if error else self.timeline.now_s,
                prompt_tokens=request.prompt_tokens,
                cached_tokens=cached,
                output_tokens=0 if error else request.reply.tokens,
                route=route,
                prefill=prefill,
                decode=decode,
                status=status,
                error=error,
            )
        )

    def _span(self, tokens: int) -> Span:
        return Span(next(self._spans), tokens)


def _nothing() -> None:
    """P's own token is not for the client."""
