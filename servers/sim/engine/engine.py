"""The asyncio shell of one engine: the step loop, KV pulls, and the delivery of tokens to requests."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ppd.proxy.laws.step_time import request_time_s, transfer_time_s

from ..core.block_pool import BlockPool
from ..core.config import LoadFailurePolicy, SimConfig
from ..core.counters import Counters
from ..core.errors import EngineFailure
from ..core.fault_orders import Faults
from ..core.handoffs import HandoffLedger, RemotePrefill, Transfer, read_transfer
from ..core.scheduler import EngineDied, Output, Pull, Scheduler
from ..core.sequence import Finish, Generation, Sequence
from .deltas import Delta, DeltaStream
from .kv_events import KvEventPublisher
from .metrics import MetricsRegistry
from .port import Listener
from .side_channel import Peers, SideChannelError

_log = logging.getLogger(__name__)
_CATCH_UP_S = 0.05  # the most delay that later steps make up for


@dataclass(frozen=True, slots=True)
class Received:
    """A generation request as it arrived, kept for tests."""

    path: str
    headers: Mapping[str, str]  # names in any case
    body: bytes


@dataclass(slots=True)
class _OutputState:
    """Of one sequence: where its tokens go, and their times for the latency metrics."""

    deltas: DeltaStream
    choice: int
    arrived_at: float
    abort_after: int | None = None  # tokens, by a fault
    tokens: int = 0
    last_at: float | None = None


class SimEngine:
    """One engine's state and its tasks. The pure parts are public for tests.

    address: host:port of the HTTP server; side_address: host and port that peers are told to pull from; listener,
    side_listener: their sockets. `running_engine` sets all four.
    """

    listener: Listener
    side_listener: Listener | None = None

    def __init__(
        self,
        config: SimConfig,
        peers: Peers,
        *,
        events: KvEventPublisher | None = None,
        now: Callable[[], float] = time.monotonic,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
        kill: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.engine_id = config.engine_id or new_id()
        self.address = ""
        self.side_address: tuple[str, int] = (config.host, config.side_channel_port)
        self.started_at = time.time()
        self.counters = Counters()
        self.received: deque[Received] = deque(maxlen=config.keep_requests)
        self.metrics = MetricsRegistry(self)
        self.is_dead = False
        self.is_stopping = False
        self._peers = peers
        self.events = events
        self._now = now
        self._new_id = new_id
        self._kill = kill
        self._faults = Faults()
        self._fault_change = asyncio.Event()  # set when faults change or the engine stops, then replaced by a new one
        self._output_states: dict[str, _OutputState] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._start_empty()

    def _start_empty(self) -> None:
        config = self.config
        self.pool = BlockPool(
            config.num_blocks,
            config.block_size,
            records_events=self.events is not None,
            announces_hits=self.events is not None and self.events.announces_hits,
        )
        self.handoffs = HandoffLedger(self.pool, self.counters, lease_s=config.lease_s, now=self._now)
        self.scheduler = Scheduler(
            self.pool, self.handoffs, self.counters, config.profile, max_num_seqs=config.max_num_seqs
        )

    @property
    def faults(self) -> Faults:
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._faults = faults
        self._announce_change()
        if faults.restart_events and self.events is not None:
            self.pool.restart()
            self.events.restart()
        if faults.deaf_s:
            self.listener.close()
            self._spawn(self._listen_again(faults.deaf_s, self._fault_change))

    @property
    def pinned(self) -> int:
        return len(self.handoffs)

    def new_id(self) -> str:
        return self._new_id()

    def wake(self) -> None:
        self._wake.set()

    def start(self) -> None:
        self._spawn(self._run())
        if self.config.transfers_kv:
            self._spawn(self._heartbeat())

    def stop(self) -> None:
        """Ends every request in flight with finish reason abort; later requests end so at once."""
        self.is_stopping = True
        self._announce_change()
        for sequence in self.scheduler.sequences:
            self.scheduler.abort(sequence)
        for state in self._output_states.values():
            state.deltas.put(Delta(state.choice, "", None, Finish.ABORT))
        self._output_states.clear()

    def reset_prefix_cache(self, *, preempts: bool) -> bool:
        """False while a block is in use, which running sequences no longer do if they are preempted first."""
        if preempts:
            self.scheduler.preempt_all()
            self.wake()
        return self.pool.clear()

    def kill(self) -> None:
        """As by SIGKILL: no client or peer is told, and the memory is gone."""
        if self._kill is not None:
            self._kill()
        self.is_dead = True
        for task in self._tasks:
            task.cancel()
        self.listener.sever()
        if self.side_listener is not None:
            self.side_listener.sever()
        self._start_empty()

    async def until_stopped(self) -> None:
        while not self.is_stopping:
            await self._fault_change.wait()

    async def stalls(self, engine_id: str) -> bool:
        """Waits while a wedge keeps that engine's KV from moving; returns whether it had to wait."""
        stalled = False
        while self._faults.wedges(engine_id) and not self.is_stopping:
            stalled = True
            await self._fault_change.wait()
        return stalled

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @asynccontextmanager
    async def generate(
        self, generation: Generation, request_id: str, *, abort_after: int | None = None
    ) -> AsyncIterator[DeltaStream]:
        """The answers to a request; leaving the block early aborts it. EngineFailure if the engine is or gets dead.

        abort_after: tokens of each choice after which the engine aborts it, by a fault.
        """
        transfer = self._transfer(generation.transfer_params)
        sequences = self._sequences(generation, request_id, transfer)
        deltas = DeltaStream(len(sequences))
        arrived_at = self._now()
        try:
            prompt_tokens = sum(map(len, generation.prompts))
            pulled = transfer.remote is not None
            new_tokens = 0 if pulled else sum(map(self.scheduler.new_tokens, sequences[:: generation.choices]))
            await self._pause(request_time_s(self.config.profile, prompt_tokens, new_tokens))
            for choice, sequence in enumerate(sequences):
                self._submit(sequence, _OutputState(deltas, choice, arrived_at, abort_after))
            yield deltas
        finally:
            for sequence in sequences:
                self._abandon(sequence)

    def decline(self, params: Any) -> None:
        """For a request that is refused before it is scheduled: tells P, if it names one, to free its blocks."""
        remote = self._transfer(params).remote if isinstance(params, dict) else None
        if remote is not None:
            self._spawn(self._notify(remote))

    def _transfer(self, params: dict[str, Any] | None) -> Transfer:
        return read_transfer(params) if self.config.transfers_kv else Transfer()

    def _sequences(self, generation: Generation, request_id: str, transfer: Transfer) -> list[Sequence]:
        model = generation.model if generation.model in self.config.loras else self.config.model
        key = hashlib.sha256(f"{model}:{self.config.seed}".encode()).digest()
        return [
            Sequence(
                id=f"{request_id}-{self._new_id()[:8]}",
                prompt=prompt,
                sampling=generation.sampling,
                namespace=generation.namespace,
                session_id=generation.session_id,
                tokenizer=self.config.tokenizer,
                answer_key=key,
                transfer=transfer,
            )
            for prompt in generation.prompts
            for _ in range(generation.choices)
        ]

    def _submit(self, sequence: Sequence, state: _OutputState) -> None:
        if self.is_dead:
            raise EngineFailure("EngineCore encountered an issue.")
        if self.is_stopping:
            state.deltas.put(Delta(state.choice, "", None, Finish.ABORT))
            return
        self._output_states[sequence.id] = state
        self.scheduler.add(sequence)
        self._abort_on_order(sequence, state)
        self.wake()

    def _abort_on_order(self, sequence: Sequence, state: _OutputState) -> None:
        if state.tokens == state.abort_after and sequence.id in self._output_states:
            state.deltas.put(Delta(state.choice, "", None, Finish.ABORT))
            self._abandon(sequence)

    def _abandon(self, sequence: Sequence) -> None:
        if self._output_states.pop(sequence.id, None) is None or self.is_dead:
            return
        remote = sequence.transfer.remote
        if sequence.wants_pull and remote is not None:
            self._spawn(self._notify(remote))
        self.scheduler.abort(sequence)
        self.wake()

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        ends_at = clock()
        try:
            while True:
                self._wake.clear()
                self.handoffs.expire()
                step = self.scheduler.plan()
                for pull in step.pulls:
                    self._spawn(self._pull(pull))
                if not step.chunks:
                    self._publish()
                    await self._idle()
                    ends_at = clock()
                    continue
                # From the planned end of the last step, so that this process's own work does not lengthen the steps.
                ends_at = max(ends_at, clock() - _CATCH_UP_S) + step.duration_s * self.config.time_scale
                await asyncio.sleep(max(0.0, ends_at - clock()))
                for output in self.scheduler.complete(step):
                    self._deliver(output)
                self._publish()
        except EngineDied as death:
            _log.error("engine died: %s", death)
            self._die()
        except Exception:
            _log.exception("engine died")
            self._die()

    def _die(self) -> None:
        self.is_dead = True
        for state in self._output_states.values():
            state.deltas.put(EngineFailure("EngineCore encountered an issue."))
        self._output_states.clear()

    async def _idle(self) -> None:
        """Until `wake` is called, or a lease ends and its blocks come free."""
        deadline = self.handoffs.next_deadline
        timeout = None if deadline is None else max(0.0, deadline - self._now())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout)

    async def _pull(self, pull: Pull) -> None:
        profile, latencies = self.config.profile, self.metrics.latencies
        begun = self._now()
        try:
            if await self.stalls(pull.remote.engine_id) or self._faults.take_load():
                raise SideChannelError("a fault was ordered")
            contents = await self._peers.read(pull.remote, pull.remote_ids)
        except SideChannelError as failure:
            _log.warning("KV load failed: %s", failure)
            self.counters.failed_transfers += 1
            recompute = self.config.load_failure_policy is LoadFailurePolicy.RECOMPUTE
            output = self.scheduler.pull_failed(pull, recompute=recompute)
            if output is not None:
                self._deliver(output)
        else:
            await self._pause(transfer_time_s(profile, pull.tokens))
            await self._notify(pull.remote)
            latencies.transfer_s.observe(self._now() - begun)
            latencies.transfer_bytes.observe(pull.tokens * profile.kv_bytes_per_token)
            self.scheduler.pull_arrived(pull, contents)
        self.wake()

    async def _notify(self, remote: RemotePrefill) -> None:
        try:
            await self._peers.close(remote)
        except SideChannelError:
            self.counters.failed_notifications += 1

    async def _heartbeat(self) -> None:
        """Extends the leases of prompts that are queued here for a pull, six times per lease."""
        while True:
            await asyncio.sleep(self.config.lease_s / 6)
            for sequence in self.scheduler.sequences:
                remote = sequence.transfer.remote
                if sequence.wants_pull and remote is not None and remote.has_heartbeat:
                    with suppress(SideChannelError):
                        await self._peers.extend(remote)

    def _deliver(self, output: Output) -> None:
        sequence, handed_over, now = output.sequence, output.handed_over, self._now()
        state = self._output_states.get(sequence.id)
        if state is None:
            return
        latencies = self.metrics.latencies
        if output.token is not None:
            if state.last_at is None:
                latencies.first_token_s.observe(now - state.arrived_at)
            else:
                latencies.between_tokens_s.observe(now - state.last_at)
            state.last_at = now
            state.tokens += 1
        if output.finish is not None:
            latencies.request_s.observe(now - state.arrived_at)
            del self._output_states[sequence.id]
        if output.finish is Finish.ERROR:
            state.deltas.put(EngineFailure("Internal server error"))
            return
        state.deltas.put(
            Delta(
                state.choice,
                output.text,
                output.token,
                output.finish,
                stop_reason=sequence.stop_reason if output.finish else None,
                cached_tokens=sequence.cached_tokens,
                transfer_params=handed_over.params(self.engine_id, self.side_address) if handed_over else None,
                logprobs=output.logprobs,
            )
        )
        self._abort_on_order(sequence, state)

    async def _listen_again(self, after_s: float, change: asyncio.Event) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(change.wait(), after_s)
        if change is self._fault_change or not self._faults.deaf_s:
            await self.listener.open()

    def _announce_change(self) -> None:
        change, self._fault_change = self._fault_change, asyncio.Event()
        change.set()

    def _publish(self) -> None:
        """As on vLLM only while it steps: a cleared cache is announced with what the next request stores."""
        if self.events is not None and self.pool.events:
            self.events.publish(self.pool.events, self._faults.take_batch())

    async def _pause(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s * self.config.time_scale)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
