"""The simulated fleet: engines by role, their network, and the legs of a turn.

A leg begins with the request's host work (`request_time_s`), which delays that request only. A handoff keeps P's KV in
use until it has arrived on D or its lease has expired; in the second case D computes the prompt itself. Connectors that
pull (NIXL) start when D has room and move the blocks that D lacks. Connectors that push (P2pNccl) move the whole prompt
as soon as it is computed.

The worker that computes a prompt may first fetch the beginning of it from the cache of any other worker: when it has
room, whole blocks, what the other holds then and it lacks itself. They stay in use there until they have arrived.

A worker may be lost: all that it does fails at once, what it was sending is computed where it was to arrive, and what
it holds is gone. When it is back, it is another engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ppd.proxy.fleet.worker import Role
from ppd.proxy.laws.profile_file import Transfers
from ppd.proxy.laws.step_time import request_time_s
from ppd.servers.fleet.topology import Topology

from ..setup import Setup
from ..timeline import Timeline
from .encoder import PlacedItem, SimulatedEncoder
from .engine import Engine, SimulatedSequence
from .kv_cache import KvCache, Span, first_of
from .links import Move, Port, Work, transfer


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """Named as the proxy names it."""

    name: str
    role: Role
    engine: Engine
    x: float | None = None  # of later turns on this D, the share that is LOCAL; None: the run's
    sends: Port = field(default_factory=Port)
    receives: Port = field(default_factory=Port)
    incarnation: int = 0
    # What is to happen if it is lost: to those who wait for its KV, and to what it keeps for others.
    sending: dict[SimulatedSequence, Callable[[], None]] = field(default_factory=dict)
    handoffs: dict[FinishedPrefill, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class SimulatedLeg:
    """What one worker does for a turn, and whom to tell."""

    prompt: tuple[Span, ...]
    prompt_tokens: int
    reply: tuple[Span, ...]
    output_tokens: int
    first_token: Callable[[], None]
    finished: Callable[[], None]
    source: SimulatedWorker | None = None  # whose cache the worker that computes the prompt asks first
    reach_tokens: int = 0  # of the prompt's start, that it wants to have by that
    work: Work = field(default_factory=Work)
    failed: Callable[[], None] = lambda: None  # a worker was lost that computed it, or was to
    media: tuple[PlacedItem, ...] = ()


@dataclass(slots=True, eq=False)
class FinishedPrefill:
    worker: SimulatedWorker
    job: SimulatedSequence
    arrives_s: float | None = None  # of KV that was pushed
    is_open: bool = True


class SimulatedFleet:
    def __init__(self, timeline: Timeline, topology: Topology, setup: Setup) -> None:
        self._timeline = timeline
        self._setup = setup
        self._topology = topology
        roles = ((Role.PREFILL, topology.prefills), (Role.DECODE, topology.decodes), (Role.REPLICA, topology.replicas))
        self.workers = [self._worker(role, number + 1) for role, count in roles for number in range(count)]
        self.encoders = [
            SimulatedEncoder(timeline, f"{Role.ENCODE}{number + 1}", setup.encoder_item_s * setup.encoder_slowness)
            for number in range(topology.encoders)
        ]
        self.restarted: Callable[[SimulatedWorker], None] = lambda worker: None

    def of(self, role: Role) -> list[SimulatedWorker]:
        return [worker for worker in self.workers if worker.role is role]

    def fits(self, tokens: int) -> bool:
        return tokens <= self._setup.profile.kv_capacity_tokens

    def ask(self, worker: SimulatedWorker, leg: SimulatedLeg) -> SimulatedSequence:
        job = _answer(leg)
        self._compute(worker, leg, job)
        return job

    def prefill(
        self,
        worker: SimulatedWorker,
        leg: SimulatedLeg,
        decode: SimulatedWorker,
        handed_over: Callable[[FinishedPrefill], None],
    ) -> None:
        """Computes a prompt and its first token on P, and keeps the KV for `decode`."""

        def finished() -> None:
            handoff = FinishedPrefill(worker, job)
            if self._setup.profile.transfers is Transfers.WHOLE:
                handoff.arrives_s = self._transfer(worker, decode, leg.prompt_tokens, leg.work)
            self._timeline.after(self._setup.lease_s, self._close, handoff)
            worker.handoffs[handoff] = None
            handed_over(handoff)

        job = SimulatedSequence(
            leg.prompt,
            (),
            1,
            _nothing,
            finished,
            keeps_kv=True,
            work=leg.work,
            media=leg.media,
            failed=leg.failed,
        )
        self._compute(worker, leg, job, hands_over=True)

    def decode(self, worker: SimulatedWorker, leg: SimulatedLeg, handoff: FinishedPrefill) -> SimulatedSequence:
        engine, sender = worker.engine, handoff.worker

        def pull(missing: int) -> bool:
            arrives_s = handoff.arrives_s
            if arrives_s is None and not handoff.is_open:
                self._timeline.after(0.0, engine.pull_lost, job)
                return True
            if arrives_s is None:
                arrives_s = self._transfer(sender, worker, missing, leg.work)
            sender.sending[job] = lambda: engine.pull_lost(job)
            self._timeline.at(arrives_s, arrived)
            return True

        def arrived() -> None:
            if sender.sending.pop(job, None) is not None:
                self._close(handoff)
                engine.pulled(job)

        job = _answer(leg, pull)
        engine.arrive(job, request_time_s(engine.profile, leg.prompt_tokens, 0))
        return job

    def lose(self, worker: SimulatedWorker) -> None:
        if worker.engine.is_lost:
            return
        for handoff in worker.handoffs:
            handoff.is_open = False
            if handoff.arrives_s is not None and handoff.arrives_s > self._timeline.now_s:
                handoff.arrives_s = None  # D has not got all of it
        waiting = [*worker.sending.values()]
        worker.handoffs.clear()
        worker.sending.clear()
        worker.engine.lose()
        for lost in waiting:
            lost()

    def restart(self, worker: SimulatedWorker) -> None:
        """With an empty cache; only one that is lost."""
        if not worker.engine.is_lost:
            return
        worker.engine = self._engine(worker.role, worker.name)
        worker.incarnation += 1
        worker.sends.free_at_s = worker.receives.free_at_s = self._timeline.now_s
        self.restarted(worker)

    def _compute(
        self, worker: SimulatedWorker, leg: SimulatedLeg, job: SimulatedSequence, *, hands_over: bool = False
    ) -> None:
        """The prompt, less what is cached, or can be fetched."""
        source = leg.source
        if source is not None and source is not worker:
            job.pull = lambda _: self._fetch(source, worker, leg, job)
        has_connector = hands_over or source is not None or worker.role is not Role.REPLICA
        worker.engine.arrive(job, _host_work_s(worker, leg, has_connector=has_connector))

    def _fetch(self, source: SimulatedWorker, to: SimulatedWorker, leg: SimulatedLeg, job: SimulatedSequence) -> bool:
        """False if the source has nothing that the job lacks."""
        tokens = _found(source, leg) - job.computed
        if tokens <= 0:
            return False
        holder, engine = source.engine, to.engine
        pinned = holder.pin(first_of(leg.prompt, job.computed + tokens))

        def arrived() -> None:
            if source.sending.pop(job, None) is not None:
                holder.unpin(pinned)
                leg.work.fetched_tokens += tokens
                engine.fetched(job, tokens)

        source.sending[job] = lambda: engine.pull_lost(job)
        self._timeline.at(self._transfer(source, to, tokens, leg.work), arrived)
        return True

    def _transfer(self, sender: SimulatedWorker, to: SimulatedWorker, tokens: int, work: Work) -> float:
        if tokens:
            work.moves.append(Move(sender.name, to.name, tokens))
        return transfer(sender.sends, to.receives, sender.engine.profile, tokens, self._timeline.now_s)

    def _close(self, handoff: FinishedPrefill) -> None:
        """It was read, or has expired."""
        if handoff.is_open:
            handoff.is_open = False
            del handoff.worker.handoffs[handoff]
            handoff.worker.engine.let_go(handoff.job)

    def _worker(self, role: Role, number: int) -> SimulatedWorker:
        name = f"{role}{number}"
        x = self._topology.x_of_decodes[number - 1] if role is Role.DECODE else None
        return SimulatedWorker(name, role, self._engine(role, name), x)

    def _engine(self, role: Role, name: str) -> Engine:
        profile = self._setup.profile
        cache = KvCache(profile.kv_capacity_tokens, profile.block_size)
        costs = self._setup.costs(role, self._topology.name, name)
        return Engine(
            self._timeline,
            costs,
            cache,
            max_num_seqs=profile.max_num_seqs,
            encoder_item_s=self._setup.encoder_item_s,
        )


def _answer(leg: SimulatedLeg, pull: Callable[[int], bool] | None = None) -> SimulatedSequence:
    return SimulatedSequence(
        leg.prompt,
        leg.reply,
        leg.output_tokens,
        leg.first_token,
        leg.finished,
        pull,
        failed=leg.failed,
        work=leg.work,
        media=leg.media,
    )


def _host_work_s(worker: SimulatedWorker, leg: SimulatedLeg, *, has_connector: bool) -> float:
    cached = max(worker.engine.cache.hit_tokens(leg.prompt), 0 if leg.source is None else _found(leg.source, leg))
    return request_time_s(
        worker.engine.profile, leg.prompt_tokens, leg.prompt_tokens - cached, has_connector=has_connector
    )


def _found(source: SimulatedWorker, leg: SimulatedLeg) -> int:
    """How much of what is asked for it holds, in whole blocks."""
    if source.engine.is_lost:
        return 0
    tokens = min(leg.reach_tokens, source.engine.cache.hit_tokens(leg.prompt))
    return tokens - tokens % source.engine.cache.block_size


def _nothing() -> None:
    """P's own token is not for the client."""
