"""How each failure of the proxy's table is provoked from outside, and which ones can't be, and why."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import product

from ppd.proxy.config import ProxyConfig
from ppd.proxy.failures import ROWS, Cause, Failure, FailureRule, Leg, Phase
from ppd.proxy.telemetry.receipts import LegRecord
from ppd.servers.sim.api.reply import openai_error
from ppd.servers.sim.core.errors import OrderedError
from ppd.servers.sim.core.fault_orders import FaultKind, FaultPhase, Faults, Order
from ppd.servers.sim.engine.engine import SimEngine
from tests.e2e.failures.fleet import FaultFleet, Seen
from tests.support.scripted_workers import stop_listening

HANDOFF_MAX_AGE_S = ProxyConfig().handoff_max_age_s
SOME_EVENTS = 4  # of a stream, so that the client has some of its text
RETRY_AFTER_S = 7


@dataclass(frozen=True, slots=True)
class Case:
    """One failure of one leg, in one of the two forms of an answer."""

    leg: Leg
    phase: Phase
    cause: Cause
    stream: bool

    @property
    def failure(self) -> Failure:
        return (self.leg, self.phase, self.cause)

    @property
    def row(self) -> FailureRule:
        return ROWS[self.failure]

    def __str__(self) -> str:
        form = "stream" if self.stream else "whole"
        return f"{self.leg}-{self.phase}-{self.cause}-{form}"


EVERY_CASE = [Case(*failure, stream) for failure in ROWS for stream in (True, False)]


@dataclass(slots=True)
class Strike:
    """One case under way: the turn that is asked, and the worker that fails it."""

    field: FaultFleet
    case: Case
    name: str
    asking: asyncio.Task[Seen]
    seen: Seen
    received: int  # requests of the engine before

    @property
    def engine(self) -> SimEngine:
        return self.field.engines[self.name]

    def is_at_work(self) -> bool:
        """The leg is begun."""
        return self.record is not None and self.record.ended_s is None

    @property
    def record(self) -> LegRecord | None:
        """Of the turn's newest leg of this kind, which need not be its newest leg."""
        legs = [leg for leg in self.field.newest().legs if leg.kind is self.case.leg]
        return legs[-1] if legs else None


Arm = Callable[[SimEngine], AbstractAsyncContextManager[None]]
Moment = Callable[[Strike], bool]
Act = Callable[[Strike], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Provocation:
    """`arm` spoils the worker for as long as it is entered; at the `moment` comes the `act`, where there is one.

    is_freed: whether P is rid of the KV before its lease ends; not so where a stand-in takes the place of a D, or where
    only P knows that it pins anything.
    own: the worker's own error, as JSON, where it answers one.
    leaps_s: what passes until the proxy's clock for the age of handoffs is read, the first time, the second, ...
    is_death: the worker's process has ended by this, so that it returns as another incarnation.
    """

    arm: Arm
    moment: Moment | None = None
    act: Act | None = None
    is_freed: bool = True
    variant: str = ""
    own: str = ""
    leaps_s: tuple[float, ...] = ()
    is_death: bool = False


# -- what is wrong with the worker


def ordered(kind: FaultKind, phase: FaultPhase = FaultPhase.REQUEST, after_events: int = 1, **rest: object) -> Arm:
    """Each of its requests meets this fault."""

    @asynccontextmanager
    async def arm(engine: SimEngine) -> AsyncIterator[None]:
        order = Order(kind, phase=phase, after_events=after_events, times=99, **rest)  # type: ignore[arg-type]
        engine.faults = Faults([order])
        try:
            yield
        finally:
            engine.faults = Faults()

    return arm


@asynccontextmanager
async def closed(engine: SimEngine) -> AsyncIterator[None]:
    """Its port is closed, and the connections that the proxy had kept are too."""
    engine.listener.sever()
    await asyncio.gather(engine.listener.closed(), asyncio.sleep(0.01))  # the proxy knows by then
    try:
        yield
    finally:
        await engine.listener.open()


@asynccontextmanager
async def deaf(engine: SimEngine) -> AsyncIterator[None]:
    """What wants to connect gets no answer: a backlog with room for one is full, and the kernel drops the rest."""
    async with closed(engine):
        with socket.socket() as listening, socket.socket() as plug:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", engine.listener.port))
            listening.listen(0)
            plug.connect(listening.getsockname())
            yield


def raw(answer: bytes) -> Arm:
    """Something else stands at its port, and answers this to whatever it is asked."""
    connections = set[asyncio.StreamWriter]()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(size)
        writer.write(answer)
        await writer.drain()
        writer.close()

    @asynccontextmanager
    async def arm(engine: SimEngine) -> AsyncIterator[None]:
        async with closed(engine):
            server = await asyncio.start_server(handle, "127.0.0.1", engine.listener.port)
            try:
                yield
            finally:
                await stop_listening(server)
                while connections:  # a spare one would be taken for the worker's own
                    connections.pop().transport.abort()
                await asyncio.sleep(0.01)  # until the proxy knows

    return arm


@asynccontextmanager
async def well(_: SimEngine) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def wedged(engine: SimEngine) -> AsyncIterator[None]:
    """No KV comes from any P, while it goes on answering /health."""
    engine.faults = Faults(wedge=["*"])
    try:
        yield
    finally:
        engine.faults = Faults()


# -- what happens at which moment


async def leaves(strike: Strike) -> None:
    """The client closes its connection."""
    strike.asking.cancel()
    await asyncio.wait({strike.asking})


async def is_found_dead(strike: Strike) -> None:  # as the prober finds out
    strike.field.proxy.upstream.hang_up(strike.field.worker(strike.name))


async def is_late(strike: Strike) -> None:
    await strike.field.outlast(strike.asking, strike.name, strike.case.leg)


async def revive(field: FaultFleet, name: str) -> None:
    """An engine that was killed is started again at its address, and a probe has seen that."""
    before = field.view(name).incarnation
    await field.start_again(name)
    field.proxy.prober.nudge()
    await field.until(lambda: field.view(name).incarnation != before and field.states()[name] == "up")


def begun(strike: Strike) -> bool:
    return strike.is_at_work()


def asked(strike: Strike) -> bool:
    return strike.is_at_work() and len(strike.engine.received) > strike.received


def head(strike: Strike) -> bool:
    return strike.is_at_work() and strike.record is not None and strike.record.status is not None


def announced(strike: Strike) -> bool:
    """P has computed the prompt and pins it; its answer is on its way."""
    return strike.engine.pinned > 0


def first_bytes(strike: Strike) -> bool:
    return bool(strike.seen.text) if strike.seen.is_stream else False


def done(strike: Strike) -> bool:
    return b"[DONE]" in strike.seen.body


# -- the failures


ORDERED = json.dumps(openai_error(OrderedError(422)))


def error(status: int) -> str:
    return json.dumps({"error": {"message": "no", "type": "x", "param": None, "code": status}})


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n"
NOT_HTTP = b"SSH-2.0-OpenSSH_9.6\r\n\r\n"
ENDLESS = _HEAD % b"application/json" + b"Content-Length: 1000000000000\r\n\r\n{"
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
_LACKS = b'{"error":{"message":"no such thing","type":"NotFoundError","param":"%s","code":404}}'
UNKNOWN = {Cause.UNKNOWN_MODEL: b"model", Cause.UNKNOWN_RESPONSE: b"response_id"}
ODD_EVENT = "data: {odd\n\n"
_CHUNK = 'data: {"id": "x", "choices": [{"index": 0, "delta": {"content": "%s"}, "finish_reason": %s}]}\n\n'
_USAGE = 'data: {"id": "x", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\n'
ODD_TEXT = "ab"  # around an event that cannot be read
ODD_STREAM = _CHUNK % ("a", "null") + ODD_EVENT + _CHUNK % ("b", '"stop"') + _USAGE + "data: [DONE]\n\n"

_P, _D, _REST = (Leg.PREFILL,), (Leg.DECODE,), (Leg.LOCAL, Leg.REPLICA)
_ANSWERING, _EVERY = _D + _REST, _P + _D + _REST
_BOTH, _STREAMED, _WHOLE = (True, False), (True,), (False,)
_Where = tuple[tuple[Leg, ...], tuple[bool, ...], Phase]


def _connect() -> Iterator[tuple[_Where, Cause, Provocation]]:
    where = (_EVERY, _BOTH, Phase.CONNECT)
    # The clock is read as P is asked, before D is sent the handoff, and after.
    yield (_D, _BOTH, Phase.CONNECT), Cause.STALE_HANDOFF, Provocation(well, leaps_s=(0.0, HANDOFF_MAX_AGE_S))
    yield where, Cause.REFUSED, Provocation(closed, is_death=True)
    yield where, Cause.TIMEOUT, Provocation(deaf, begun, is_late)
    yield where, Cause.WORKER_GONE, Provocation(deaf, begun, is_found_dead, is_death=True)
    yield where, Cause.CLIENT_GONE, Provocation(deaf, begun, leaves)


def _sent() -> Iterator[tuple[_Where, Cause, Provocation]]:
    where, hung = (_EVERY, _BOTH, Phase.SENT), ordered(FaultKind.HANG)
    yield (_D, _BOTH, Phase.SENT), Cause.STALE_HANDOFF, Provocation(hung, leaps_s=(0.0, 0.0, 1.4 * HANDOFF_MAX_AGE_S))
    yield where, Cause.RESET, Provocation(ordered(FaultKind.RESET))
    yield where, Cause.TIMEOUT, Provocation(hung, asked, is_late)
    yield (_D, _WHOLE, Phase.SENT), Cause.TIMEOUT, Provocation(wedged, asked, is_late, variant="wedged")
    yield where, Cause.MALFORMED, Provocation(raw(NOT_HTTP))
    yield where, Cause.WORKER_GONE, Provocation(hung, asked, is_found_dead, is_death=True)
    # An engine that was never told of the request has nothing to free.
    yield (_P, _BOTH, Phase.SENT), Cause.CLIENT_GONE, Provocation(hung, asked, leaves)
    yield (_ANSWERING, _BOTH, Phase.SENT), Cause.CLIENT_GONE, Provocation(hung, asked, leaves, is_freed=False)


def _headers() -> Iterator[tuple[_Where, Cause, Provocation]]:
    where, hung = (_EVERY, _BOTH, Phase.HEADERS), ordered(FaultKind.HANG, FaultPhase.HEAD)
    yield where, Cause.RESET, Provocation(ordered(FaultKind.RESET, FaultPhase.HEAD))
    yield where, Cause.TIMEOUT, Provocation(hung, head, is_late)
    yield (_D, _STREAMED, Phase.HEADERS), Cause.TIMEOUT, Provocation(wedged, head, is_late, variant="wedged")
    yield where, Cause.WORKER_GONE, Provocation(hung, head, is_found_dead, is_death=True)
    yield where, Cause.CLIENT_GONE, Provocation(hung, head, leaves)
    yield where, Cause.SERVER, Provocation(ordered(FaultKind.ERROR, status=500))
    yield where, Cause.SERVER, Provocation(ordered(FaultKind.PAGE, status=502), variant="page")
    for status in (429, 503):
        busy = ordered(FaultKind.ERROR, status=status, retry_after_s=RETRY_AFTER_S)
        yield where, Cause.OVERLOADED, Provocation(busy, variant=str(status))
    yield where, Cause.REQUEST, Provocation(ordered(FaultKind.ERROR, status=422), own=ORDERED)
    for cause, param in UNKNOWN.items():
        yield where, cause, Provocation(raw(_NOT_FOUND + _LACKS % param), is_freed=False)
    yield (_P, _BOTH, Phase.HEADERS), Cause.MALFORMED, Provocation(raw(ENDLESS))
    yield (_ANSWERING, _WHOLE, Phase.HEADERS), Cause.MALFORMED, Provocation(raw(ENDLESS))


def _first_event() -> Iterator[tuple[_Where, Cause, Provocation]]:
    prefill, whole = (_P, _BOTH, Phase.FIRST_EVENT), (_ANSWERING, _WHOLE, Phase.FIRST_EVENT)
    streamed = (_ANSWERING, _STREAMED, Phase.FIRST_EVENT)
    for member in ("", "remote_block_ids", "remote_engine_id"):
        incomplete = ordered(FaultKind.HANDOFF, member=member)
        yield prefill, Cause.NO_HANDOFF, Provocation(incomplete, is_freed=False, variant=f"without-{member}")
    yield prefill, Cause.CLIENT_GONE, Provocation(ordered(FaultKind.SLOW, delay_s=0.03), announced, leaves)
    for where in (prefill, whole):
        yield where, Cause.MALFORMED, Provocation(ordered(FaultKind.BODY, body="\x00garbage"))
        yield where, Cause.MALFORMED, Provocation(ordered(FaultKind.ABORT), variant="aborted")
        yield where, Cause.MALFORMED, Provocation(raw(_HEAD % b"application/json" + b"\r\n"), variant="empty")
        yield where, Cause.OVERLOADED, Provocation(ordered(FaultKind.BODY, body=error(503)))
        yield where, Cause.REQUEST, Provocation(ordered(FaultKind.BODY, body=error(422)), own=error(422))
        yield where, Cause.ERROR_EVENT, Provocation(ordered(FaultKind.BODY, body=error(500)))
    yield streamed, Cause.MALFORMED, Provocation(ordered(FaultKind.BODY, body="data: \x00garbage\n\n"))
    yield streamed, Cause.MALFORMED, Provocation(ordered(FaultKind.ABORT), variant="aborted")
    yield streamed, Cause.OVERLOADED, Provocation(ordered(FaultKind.ERROR, FaultPhase.HEAD, status=503))
    yield streamed, Cause.REQUEST, Provocation(ordered(FaultKind.ERROR, FaultPhase.HEAD, status=422), own=ORDERED)
    yield streamed, Cause.ERROR_EVENT, Provocation(ordered(FaultKind.ERROR, FaultPhase.HEAD, status=500))
    # The opening, or half of a body, is here.
    part = (_ANSWERING, _BOTH, Phase.FIRST_EVENT)
    yield part, Cause.CLIENT_GONE, Provocation(ordered(FaultKind.HANG, FaultPhase.EVENTS), head, leaves)


def _mid_stream() -> Iterator[tuple[_Where, Cause, Provocation]]:
    where = (_ANSWERING, _STREAMED, Phase.STREAM)
    hung = ordered(FaultKind.HANG, FaultPhase.EVENTS, SOME_EVENTS)
    yield where, Cause.RESET, Provocation(ordered(FaultKind.RESET, FaultPhase.EVENTS, SOME_EVENTS))
    yield where, Cause.RESET, Provocation(ordered(FaultKind.CLOSE, FaultPhase.EVENTS, SOME_EVENTS), variant="closed")
    yield where, Cause.TIMEOUT, Provocation(hung, first_bytes, is_late)
    failing = ordered(FaultKind.ERROR, FaultPhase.EVENTS, SOME_EVENTS, status=500)
    yield where, Cause.ERROR_EVENT, Provocation(failing, own=json.dumps(openai_error(OrderedError(500))))
    odd = raw(_HEAD % b"text/event-stream" + b"\r\n" + ODD_STREAM.encode())
    yield where, Cause.MALFORMED, Provocation(odd, is_freed=False)
    yield where, Cause.CLIENT_GONE, Provocation(hung, first_bytes, leaves)


def _after() -> Iterator[tuple[_Where, Cause, Provocation]]:
    where, hung = (_ANSWERING, _STREAMED, Phase.AFTER), ordered(FaultKind.HANG, FaultPhase.END)
    yield where, Cause.RESET, Provocation(ordered(FaultKind.RESET, FaultPhase.END))
    yield where, Cause.TIMEOUT, Provocation(hung, done, is_late)
    yield where, Cause.WORKER_GONE, Provocation(hung, done, is_found_dead)
    yield where, Cause.CLIENT_GONE, Provocation(hung, done, leaves)


def _provocations() -> dict[Case, tuple[Provocation, ...]]:
    found: dict[Case, tuple[Provocation, ...]] = {}
    for entries in (_connect(), _sent(), _headers(), _first_event(), _mid_stream(), _after()):
        for (legs, forms, phase), cause, provocation in entries:
            for leg, stream in product(legs, forms):
                case = Case(leg, phase, cause, stream)
                found[case] = (*found.get(case, ()), provocation)
    return found


PROVOCATIONS = _provocations()
"""For every case that a spoilt worker or a leaving client brings about: how, once or in several variants."""


def _kills() -> Iterator[tuple[Case, Provocation]]:
    """As `kill -9` at some phase. Before the first byte the proxy looks at once whether the port is still open."""
    for leg, stream in product(_EVERY, _BOTH):
        at_once = Provocation(ordered(FaultKind.KILL))
        yield Case(leg, Phase.SENT, Cause.WORKER_GONE, stream), at_once
        later = Provocation(ordered(FaultKind.KILL, FaultPhase.HEAD))
        yield Case(leg, Phase.HEADERS, Cause.WORKER_GONE, stream), later
    for leg in _ANSWERING:
        late = ordered(FaultKind.KILL, FaultPhase.EVENTS, SOME_EVENTS)
        yield Case(leg, Phase.STREAM, Cause.RESET, stream=True), Provocation(late)


KILLED = dict(_kills())
"""For which a worker must die; each needs a fleet of its own, as the proxy forgets what it held against the dead."""


def not_provoked(case: Case) -> str | None:
    """Why a case cannot be provoked from outside; None where it can."""
    if case.phase in (Phase.STREAM, Phase.AFTER) and not case.stream:
        return "an answer that is not streamed goes to the client only when all of it is there"
    if case.phase is Phase.HEADERS and case.cause is Cause.MALFORMED and case.stream and case.leg is not Leg.PREFILL:
        return "a stream has no limit of length, and one whose framing breaks is awaited until its time is over"
    return None


QUEUED = [case for case in EVERY_CASE if case.phase is Phase.QUEUE]
"""For which the fleet must be full."""

_STOPPED = [case for case in EVERY_CASE if case.cause is Cause.DRAINING and case not in QUEUED]
DRAINED = [case for case in _STOPPED if not_provoked(case) is None]
"""For which the proxy must be stopped."""
