"""One process among those of its proxy: how it joins them, what it asks and answers, and their metrics added up."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping

import msgspec

from ..errors import PPDError
from ..fleet.worker import WorkerId
from ..runtime.loop_watch import time_limit
from ..telemetry.merged_metrics import Family, added, decoded, encoded, inherited
from .channels import ROUND_S, Channels, Member
from .events import (
    AnyEvent,
    Appliers,
    ConfigChanged,
    ConfigRead,
    Joined,
    JoinReply,
    MetricsCounted,
    PeerAnswer,
    PeerQuestion,
    SessionDropped,
    SnapshotEnd,
    SnapshotRequest,
    TurnReported,
    WorkersAdded,
)
from .replication import Replication

log = logging.getLogger(__name__)

REPLY_S = 1.0  # for any other process to react to a newcomer, which takes it no time; else all of them hang
SNAPSHOT_S = 1.0  # for the one that is asked to send the snapshot; until then nothing is served
ANSWER_S = 2.0  # for another process's answer, which takes it no time
PACE_BYTES = 1024 * 1024  # of a snapshot under way that the peer has not read; the rest waits, and turns are served
COUNTED_EVERY_S = 1.0  # a process that dies loses what it has counted since then
_COUNTED = "counted"

Handler = Callable[[bytes], bytes]
"""Answers one kind of question; its PPDError is raised at the asker."""


class PeerFailure(msgspec.Struct):
    """A PPDError on its way to another process."""

    status: int
    kind: str
    message: str
    param: str | None
    code: str | None


class ProcessSilent(PPDError):
    """Another process of this proxy has just ended, or hangs: the question can be asked again."""

    status = 503
    kind = "service_unavailable_error"


class Membership:
    """`handlers`: what this process can be asked, by name."""

    def __init__(self, member: Member, replication: Replication, count: Callable[[], list[Family]]) -> None:
        """count: this process's metrics, as they are now."""
        self._member = member
        self._replication = replication
        self._count = count
        pending, drained = replication.turns.pending, replication.drained
        self._channels = Channels(member.ends, self._appliers(), self._lost, pending, drained)
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._has_joined = False
        self._life = secrets.randbits(62)
        self._numbers = itertools.count(self._life)  # answers to a predecessor's questions have other numbers
        self._has_state = False
        self._knows_before = False  # what its predecessors had counted
        self._source: int | None = None
        self._stateless: set[int] = set()  # peers that have just started too
        self._caught_up = asyncio.Event()
        self._is_replied = asyncio.Event()
        self._sending: dict[int, asyncio.Task[None]] = {}
        self._counted: dict[int, bytes] = {}  # by process, as sent last; under our own index, our predecessors'
        self.on_report: Callable[[bytes], None] = lambda report: None  # a picker's: of a turn that may be its own
        self.handlers: dict[str, Handler] = {_COUNTED: lambda _: self._asked_count()}

    @property
    def leads(self) -> bool:
        return self._member.leads

    @property
    def peers(self) -> list[int]:
        return self._channels.peers

    async def join(self) -> None:
        """Returns when this process knows what the others do, or all but old sessions. Nothing may be served before."""
        if not self.peers:
            return
        self._channels.open()
        self._replication.attach(self._channels)
        self._channels.queue(Joined(self._life))
        self._channels.flush()
        rest = ""
        try:
            async with time_limit(REPLY_S):
                await self._is_replied.wait()
        except TimeoutError:
            log.warning("no other process of this proxy reacts; this one begins with what it has heard")
            self._completed()
        try:
            await asyncio.wait_for(self._caught_up.wait(), SNAPSHOT_S)
        except TimeoutError:
            rest = "; it is still told of old sessions"
        self._has_joined = True
        log.info("process %d of this proxy serves%s", self._member.index, rest)

    async def run(self) -> None:
        """Sends this process's counts, which must outlive it, until it is cancelled."""
        while self.peers:
            await asyncio.sleep(COUNTED_EVERY_S)
            self._tell_count(self._own_count())

    async def close(self) -> None:
        for task in self._sending.values():
            task.cancel()
        await asyncio.gather(*self._sending.values(), return_exceptions=True)
        if self.peers:
            self._tell_count(self._own_count())
            self._channels.close()

    def session_dropped(self, session_id: str) -> None:
        self._send_now(SessionDropped(session_id))

    def config_changed(self, keys: Mapping[str, object]) -> None:
        self._send_now(ConfigChanged(dict(keys)))

    def config_read(self, in_force: Mapping[str, object], in_file: Mapping[str, object]) -> None:
        self._send_now(ConfigRead(dict(in_force), dict(in_file)))

    def report(self, report: bytes) -> None:
        """A sidecar's, of a turn of another process."""
        self._send_now(TurnReported(report))

    def workers_added(self, workers: Iterable[WorkerId], overruled: Iterable[WorkerId]) -> None:
        self._send_now(WorkersAdded(list(workers), list(overruled)))

    def _send_now(self, event: AnyEvent) -> None:
        """Before the operator who asked for it is answered: the next request may reach any process."""
        if self.peers:
            self._channels.queue(event)
            self._channels.flush()

    def catch_up(self) -> None:
        """Applies what the others have sent until now."""
        self._channels.drain()

    # -- questions

    async def ask_leader(self, what: str, about: bytes) -> bytes:
        """The leader's answer; PPDError as the leader raises it, or ProcessSilent."""
        if self.leads:
            done = self.handlers[what](about)
            self._channels.flush()
            return done
        return await self._ask(0, what, about)

    async def ask_others(self, what: str, about: bytes = b"") -> dict[int, bytes]:
        """The others' answers, by process; those that fail or are silent are left out."""
        found = await asyncio.gather(*(self._ask(peer, what, about) for peer in self.peers), return_exceptions=True)
        return {peer: body for peer, body in zip(self.peers, found, strict=True) if isinstance(body, bytes)}

    async def total(self) -> list[Family]:
        """The metrics of all; of a process that is silent just now, what it sent last."""
        own = self._own_count()
        if not self.peers:
            return own
        shown = await self.ask_others(_COUNTED)
        self._counted |= shown
        # A scrape after a restart must not show less, whichever process sends the successor its snapshot.
        for by, counted in shown.items():
            self._channels.queue(MetricsCounted(by, counted))
        self._tell_count(own)
        self._channels.flush()
        return added([own, *(decoded(self._counted[peer]) for peer in self.peers if peer in self._counted)])

    def _own_count(self) -> list[Family]:
        before = self._counted.get(self._member.index)
        return self._count() if before is None else inherited(self._count(), decoded(before))

    def _asked_count(self) -> bytes:
        """Others keep it in place of what predecessors had sent them; until it has those counts too, it has none."""
        if not self._knows_before:
            raise ProcessSilent("this process has not received its predecessor's counts yet")
        return encoded(self._own_count())

    def _tell_count(self, own: list[Family]) -> None:
        if self._knows_before:
            self._channels.queue(MetricsCounted(self._member.index, encoded(own)))

    async def _ask(self, peer: int, what: str, about: bytes) -> bytes:
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._channels.send(peer, [PeerQuestion(number, what, about)])
            return await asyncio.wait_for(answer, ANSWER_S)
        except TimeoutError as exc:
            raise ProcessSilent("a process of this proxy does not answer: try again") from exc
        finally:
            del self._asked[number]

    def _answer(self, ask: PeerQuestion) -> PeerAnswer:
        """A process that does not know yet what the others do answers nothing: the question was its predecessor's, and
        may be an operator's, who was told meanwhile to try again. What it would tell of its own fleet then, all would
        take for theirs."""
        try:
            if not self._has_joined:
                raise ProcessSilent("a process of this proxy has just started: try again")
            return PeerAnswer(ask.number, self.handlers[ask.what](ask.about))
        except PPDError as exc:
            failure = PeerFailure(exc.status, exc.kind, exc.message, exc.param, exc.code)
            return PeerAnswer(ask.number, error=msgspec.msgpack.encode(failure))

    def _answered(self, answer: PeerAnswer) -> None:
        waiting = self._asked.get(answer.number)
        if waiting is None or waiting.done():
            return
        if not answer.error:
            waiting.set_result(answer.body)
            return
        failure = msgspec.msgpack.decode(answer.error, type=PeerFailure)
        error = PPDError(failure.message, param=failure.param, code=failure.code)
        error.status, error.kind = failure.status, failure.kind
        waiting.set_exception(error)

    # -- events

    def _appliers(self) -> Appliers:
        return {
            **self._replication.appliers,
            Joined: self._joined,
            JoinReply: self._replied,
            SnapshotRequest: lambda sender, event: self._start_snapshot(sender, event.life),
            SnapshotEnd: self._snapshot_ended,
            MetricsCounted: self._metrics_counted,
            TurnReported: lambda _, event: self.on_report(event.report),
            PeerQuestion: lambda sender, event: self._channels.send(sender, [self._answer(event)]),
            PeerAnswer: lambda _, event: self._answered(event),
        }

    def _joined(self, sender: int, event: Joined) -> None:
        self._replication.turns.restarted(sender)
        self._stop_snapshot(sender)
        if sender == self._source and not self._has_state:  # it died: ask another for a snapshot
            self._source = None
            self._channels.queue(Joined(self._life))
        counted = self._counted.get(sender)
        before = () if counted is None else (MetricsCounted(sender, counted),)
        self._channels.send(sender, [*self._replication.turns.own(), *before, JoinReply(event.life, self._has_state)])

    def _replied(self, peer: int, event: JoinReply) -> None:
        if event.life != self._life:  # to a predecessor
            return
        self._is_replied.set()
        self._knows_before |= event.has_state
        if event.has_state and self._source is None:
            self._source = peer
            self._channels.send(peer, [SnapshotRequest(self._life)])
        if not event.has_state:
            self._stateless.add(peer)
        if len(self._stateless) == len(self.peers):  # all start together
            self._completed()

    def _snapshot_ended(self, _: int, event: SnapshotEnd) -> None:
        if event.life == self._life:  # else it was for a predecessor
            self._completed()

    def _metrics_counted(self, _: int, event: MetricsCounted) -> None:
        if event.by != self._member.index or not self._knows_before:  # else its own counts would be added to themselves
            self._counted[event.by] = event.families

    def _completed(self) -> None:
        """Others may ask this process for a snapshot."""
        self._has_state = self._knows_before = True
        self._caught_up.set()

    def _lost(self, peer: int) -> None:
        """The peer did not read for so long that events for it were dropped."""
        log.warning("process %d of this proxy was far behind; it is told everything again", peer)
        self._channels.send(peer, self._replication.turns.own())
        self._start_snapshot(peer, 0)

    def _start_snapshot(self, peer: int, life: int) -> None:
        self._stop_snapshot(peer)
        self._sending[peer] = asyncio.create_task(self._send_snapshot(peer, life))

    def _stop_snapshot(self, peer: int) -> None:
        if peer in self._sending:
            self._sending.pop(peer).cancel()

    async def _send_snapshot(self, peer: int, life: int) -> None:
        for batch in self._replication.snapshot():
            self._channels.send(peer, batch)
            while self._channels.backlog_bytes(peer) > PACE_BYTES:
                await asyncio.sleep(0.001)
            await asyncio.sleep(ROUND_S)  # a peer that always finds another packet would do nothing else
        self._channels.send(
            peer, [*(MetricsCounted(by, families) for by, families in self._counted.items()), SnapshotEnd(life)]
        )
