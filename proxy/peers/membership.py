"""The other processes of this proxy, as one of them sees them: what they know and do, and questions to them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping

import msgspec

from ..errors import PPDError
from ..fleet.worker import WorkerId
from ..telemetry.merged_metrics import Family, added, decoded, encoded, inherited
from .channels import Mesh
from .events import Added, Caught, Changed, Counted, Event, Forgotten, Greeting, Hello, PeerAnswer, PeerQuestion, Teach
from .member import Member
from .replication import Replica

log = logging.getLogger(__name__)

CATCH_UP_S = 10.0  # for another to tell all that it knows; until then nothing is served
ANSWER_S = 2.0  # of another process: it does nothing that takes time
PACE_BYTES = 1024 * 1024  # of what one that has just begun still has to hear; more waits, and others are served
COUNTED_EVERY_S = 1.0  # what a process that dies has counted since then is lost
_COUNTED = "counted"

Skill = Callable[[bytes], bytes]
"""Answers one kind of question; PPDError goes to the asker."""


class PeerFailure(msgspec.Struct):
    """A PPDError on its way to another process."""

    status: int
    kind: str
    message: str
    param: str | None
    code: str | None


class ProcessSilent(PPDError):
    """Another process of this proxy has just ended, or hangs; its successor can be asked again."""

    status = 503
    kind = "service_unavailable_error"


class Siblings:
    """`skills`: what this process can be asked, by name."""

    def __init__(self, member: Member, replica: Replica, count: Callable[[], list[Family]]) -> None:
        """count: this process's metrics, as they are now."""
        self._member = member
        self._replica = replica
        self._count = count
        self._mesh = Mesh(member.ends, self._hear, self._lost)
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._life = secrets.randbits(62)
        self._numbers = itertools.count(self._life)  # what a predecessor asked is not answered to us
        self._knows = False
        self._teacher: int | None = None
        self._ignorant: set[int] = set()  # peers that have just begun too
        self._caught = asyncio.Event()
        self._teaching: dict[int, asyncio.Task[None]] = {}
        self._counted: dict[int, bytes] = {}  # as they told it last; under our own number our predecessor's
        self.skills: dict[str, Skill] = {_COUNTED: lambda _: encoded(self._own_count())}

    @property
    def leads(self) -> bool:
        return self._member.leads

    @property
    def peers(self) -> list[int]:
        return self._mesh.peers

    async def join(self) -> None:
        """Returns when this process knows what the others know. Nothing may be served before."""
        if not self.peers:
            return
        self._mesh.open()
        self._replica.attach(self._mesh)
        self._mesh.tell(Hello(self._life))
        self._mesh.flush()
        try:
            async with asyncio.timeout(CATCH_UP_S):
                await self._caught.wait()
        except TimeoutError:
            log.warning("no other process of this proxy tells what it knows; this one begins with what it has heard")
        self._knows = True

    async def run(self) -> None:
        """Tells what was counted, until it is cancelled: what this process has counted must outlive it."""
        while self.peers:
            await asyncio.sleep(COUNTED_EVERY_S)
            self._mesh.tell(Counted(self._member.index, encoded(self._own_count())))

    async def close(self) -> None:
        for task in self._teaching.values():
            task.cancel()
        await asyncio.gather(*self._teaching.values(), return_exceptions=True)
        if self.peers:
            self._mesh.tell(Counted(self._member.index, encoded(self._own_count())))
            self._mesh.close()

    def forgot(self, session_id: str) -> None:
        self._tell_now(Forgotten(session_id))

    def changed(self, keys: Mapping[str, object]) -> None:
        self._tell_now(Changed(dict(keys)))

    def added(self, workers: Iterable[WorkerId]) -> None:
        self._tell_now(Added(list(workers)))

    def _tell_now(self, event: Event) -> None:
        """An operator asked for it, and may look for it anywhere as soon as there is an answer."""
        if self.peers:
            self._mesh.tell(event)
            self._mesh.flush()

    def hear_all(self) -> None:
        """What was said until now is known."""
        self._mesh.drain()

    # -- questions

    async def ask_leader(self, what: str, about: bytes) -> bytes:
        """What the process that watches the workers answers; PPDError as it raises it, or where it is silent."""
        if self.leads:
            done = self.skills[what](about)
            self._mesh.flush()
            return done
        return await self._ask(0, what, about)

    async def ask_others(self, what: str, about: bytes = b"") -> dict[int, bytes]:
        """The answers of the others, by process; of those that give one."""
        found = await asyncio.gather(*(self._ask(peer, what, about) for peer in self.peers), return_exceptions=True)
        return {peer: body for peer, body in zip(self.peers, found, strict=True) if isinstance(body, bytes)}

    async def total(self) -> list[Family]:
        """The metrics of all; of one that is silent just now, what it told last."""
        own = self._own_count()
        if not self.peers:
            return own
        shown = await self.ask_others(_COUNTED)
        self._counted |= shown
        # What is shown must not be less with a successor, whoever teaches it.
        for by, counted in (*shown.items(), (self._member.index, encoded(own))):
            self._mesh.tell(Counted(by, counted))
        self._mesh.flush()
        return added([own, *(decoded(self._counted[peer]) for peer in self.peers if peer in self._counted)])

    def _own_count(self) -> list[Family]:
        before = self._counted.get(self._member.index)
        return self._count() if before is None else inherited(self._count(), decoded(before))

    async def _ask(self, peer: int, what: str, about: bytes) -> bytes:
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._mesh.send(peer, [PeerQuestion(number, what, about)])
            return await asyncio.wait_for(answer, ANSWER_S)
        except TimeoutError as exc:
            raise ProcessSilent("a process of this proxy does not answer: try again") from exc
        finally:
            del self._asked[number]

    def _answer(self, ask: PeerQuestion) -> PeerAnswer:
        try:
            return PeerAnswer(ask.number, self.skills[ask.what](ask.about))
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

    # -- what is heard

    def _hear(self, sender: int, event: Event) -> None:
        if self._replica.hear(sender, event):  # which nearly all are for
            return
        match event:
            case Hello(life=life):
                self._replica.begun_anew(sender)
                self._stop_teaching(sender)
                if sender == self._teacher and not self._knows:  # it died, and whoever else knows is to teach
                    self._teacher = None
                    self._mesh.tell(Hello(self._life))
                self._mesh.send(sender, [*self._replica.own(), Greeting(life, self._knows)])
            case Greeting(life=self._life, knows=knows):
                self._greeted(sender, knows)
            case Teach(life=life):
                self._teach(sender, life)
            case Caught(life=self._life):
                self._caught.set()
            case Greeting() | Caught():  # a predecessor's
                pass
            case Counted(by=by, families=families):
                if by != self._member.index or not self._knows:
                    self._counted[by] = families
            case PeerQuestion():
                self._mesh.send(sender, [self._answer(event)])
            case PeerAnswer():
                self._answered(event)

    def _greeted(self, peer: int, knows: bool) -> None:
        if knows and self._teacher is None:
            self._teacher = peer
            self._mesh.send(peer, [Teach(self._life)])
        if not knows:
            self._ignorant.add(peer)
        if len(self._ignorant) == len(self.peers):  # all begin together
            self._caught.set()

    def _lost(self, peer: int) -> None:
        """It did not read for so long that part of what it should know is gone."""
        log.warning("process %d of this proxy was far behind; it is told everything again", peer)
        self._mesh.send(peer, self._replica.own())
        self._teach(peer, 0)

    def _teach(self, pupil: int, life: int) -> None:
        self._stop_teaching(pupil)
        self._teaching[pupil] = asyncio.create_task(self._tell_everything(pupil, life))

    def _stop_teaching(self, pupil: int) -> None:
        if pupil in self._teaching:
            self._teaching.pop(pupil).cancel()

    async def _tell_everything(self, pupil: int, life: int) -> None:
        for batch in self._replica.everything():
            self._mesh.send(pupil, batch)
            while self._mesh.behind(pupil) > PACE_BYTES:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)
        self._mesh.send(pupil, [*(Counted(by, families) for by, families in self._counted.items()), Caught(life)])
