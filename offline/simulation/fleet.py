"""The simulated fleet: engines by role, their network, and the legs of a turn.

A leg begins with the request's host work (`request_time_s`), which delays that request only. A handoff keeps P's KV in
use until it has arrived on D or its lease has expired; in the second case D computes the prompt itself. Connectors that
pull (NIXL) start when D has room and move the blocks that D lacks. Connectors that push (P2pNccl) move the whole prompt
as soon as it is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ppd.proxy.fleet.worker import Role
from ppd.proxy.laws.profile_file import Transfers
from ppd.proxy.laws.step_time import EngineProfile, request_time_s
from ppd.servers.fleet.topology import Topology

from .engine import Engine, SimulatedSequence
from .kv_cache import KvCache, Span
from .setup import Setup
from .timeline import Timeline


@dataclass(slots=True)
class Port:
    """One direction of a worker's network. It carries one transfer at a time."""

    free_at_s: float = 0.0
    bytes: float = 0.0  # moved so far


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """Named as the proxy names it."""

    name: str
    role: Role
    engine: Engine
    x: float | None = None  # of later turns on this D, the share that is LOCAL; None: the run's
    sends: Port = field(default_factory=Port)
    receives: Port = field(default_factory=Port)


@dataclass(slots=True, eq=False)
class SimulatedLeg:
    """What one worker does for a turn, and whom to tell."""

    prompt: tuple[Span, ...]
    prompt_tokens: int
    reply: tuple[Span, ...]
    output_tokens: int
    first_token: Callable[[], None]
    finished: Callable[[], None]


@dataclass(slots=True, eq=False)
class FinishedPrefill:
    worker: SimulatedWorker
    job: SimulatedSequence
    deadline_s: float
    arrives_s: float | None = None  # of KV that was pushed
    is_open: bool = True


class SimulatedFleet:
    def __init__(self, timeline: Timeline, topology: Topology, setup: Setup) -> None:
        self._timeline = timeline
        self._setup = setup
        self._topology = topology
        roles = ((Role.PREFILL, topology.prefills), (Role.DECODE, topology.decodes), (Role.REPLICA, topology.replicas))
        self.workers = [self._worker(role, number + 1) for role, count in roles for number in range(count)]
        self.expired_handoffs = 0

    def of(self, role: Role) -> list[SimulatedWorker]:
        return [worker for worker in self.workers if worker.role is role]

    def fits(self, tokens: int) -> bool:
        return tokens <= self._setup.profile.kv_capacity_tokens

    def ask(self, worker: SimulatedWorker, leg: SimulatedLeg) -> SimulatedSequence:
        job = SimulatedSequence(leg.prompt, leg.reply, leg.output_tokens, leg.first_token, leg.finished)
        self._timeline.after(_host_work_s(worker, leg), worker.engine.add, job)
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
            handoff = FinishedPrefill(worker, job, self._timeline.now_s + self._setup.lease_s)
            if self._setup.profile.transfers is Transfers.WHOLE:
                handoff.arrives_s = self._transfer(handoff, decode, leg.prompt_tokens)
            self._timeline.at(handoff.deadline_s, self._expire, handoff)
            handed_over(handoff)

        job = SimulatedSequence(leg.prompt, (), 1, _nothing, finished, keeps_kv=True)
        self._timeline.after(_host_work_s(worker, leg), worker.engine.add, job)

    def decode(self, worker: SimulatedWorker, leg: SimulatedLeg, handoff: FinishedPrefill) -> SimulatedSequence:
        def pull(missing: int) -> None:
            if handoff.arrives_s is not None:
                self._timeline.at(handoff.arrives_s, arrived)
            elif handoff.is_open:
                self._timeline.at(self._transfer(handoff, worker, missing), arrived)
            else:
                self._timeline.after(0.0, worker.engine.pull_lost, job)

        def arrived() -> None:
            self._close(handoff)
            worker.engine.pulled(job)

        job = SimulatedSequence(leg.prompt, leg.reply, leg.output_tokens, leg.first_token, leg.finished, pull)
        delay_s = request_time_s(worker.engine.profile, leg.prompt_tokens, 0)
        self._timeline.after(delay_s, worker.engine.add, job)
        return job

    def _transfer(self, handoff: FinishedPrefill, to: SimulatedWorker, tokens: int) -> float:
        sender = handoff.worker
        return transfer(sender.sends, to.receives, sender.engine.profile, tokens, self._timeline.now_s)

    def _expire(self, handoff: FinishedPrefill) -> None:
        if handoff.is_open:
            self.expired_handoffs += 1
            self._close(handoff)

    def _close(self, handoff: FinishedPrefill) -> None:
        if handoff.is_open:
            handoff.is_open = False
            handoff.worker.engine.let_go(handoff.job)

    def _worker(self, role: Role, number: int) -> SimulatedWorker:
        profile = self._setup.profile
        cache = KvCache(profile.kv_capacity_tokens, profile.block_size)
        name = f"{role}{number}"
        costs = self._setup.costs(role, self._topology.name, name)
        engine = Engine(self._timeline, costs, cache, max_num_seqs=profile.max_num_seqs)
        x = self._topology.x_of_decodes[number - 1] if role is Role.DECODE else None
        return SimulatedWorker(name, role, engine, x)


def _host_work_s(worker: SimulatedWorker, leg: SimulatedLeg) -> float:
    new_tokens = leg.prompt_tokens - worker.engine.cache.hit_tokens(leg.prompt)
    has_connector = worker.role is not Role.REPLICA
    return request_time_s(worker.engine.profile, leg.prompt_tokens, new_tokens, has_connector=has_connector)


def _nothing() -> None:
    """P's own token is not for the client."""


def transfer(sender: Port, receiver: Port, profile: EngineProfile, tokens: int, now_s: float) -> float:
    """Queues a transfer of the KV of `tokens` tokens on both ports. Returns when it arrives, in s.

    `transfer_s` occupies neither port, `send_s` the sender, the bytes both. A transfer of no token takes no time.
    """
    if tokens == 0:
        return now_s
    kv_bytes = tokens * profile.kv_bytes_per_token
    bytes_from_s = max(max(now_s, sender.free_at_s) + profile.send_s, receiver.free_at_s)
    end_s = bytes_from_s + kv_bytes / profile.transfer_bytes_per_s
    for port in (sender, receiver):
        port.free_at_s = end_s
        port.bytes += kv_bytes
    return end_s + profile.transfer_s
