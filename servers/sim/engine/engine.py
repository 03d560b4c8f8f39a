"""The asyncio shell of one engine: the step loop, KV pulls, and the delivery of tokens to requests."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ppd.proxy.laws.step_time import request_time_s

from ..core.block_pool import BlockPool
from ..core.config import SimConfig
from ..core.counters import Counters
from ..core.embeddings import EmbeddingStore, MediaInput
from ..core.errors import EngineFailure
from ..core.fault_orders import FaultKind, Faults
from ..core.handoffs import HandoffLedger, Transfer
from ..core.scheduler import EngineDied, Output, Scheduler
from ..core.sequence import Finish, Generation, Sequence
from ..encoding.encoder import Encoder
from ..encoding.media_parts import EmbeddingSource
from ..protocols import PROTOCOLS
from ..protocols.legs import Own
from .arrivals import Arrivals
from .deltas import Delta, DeltaStream, OutputState
from .kv_events import KvEventPublisher
from .meetings import Meetings
from .metrics import MetricsRegistry
from .new_sequences import new_sequences
from .port import Listener
from .pulls import Pulls
from .side_channel import Peers

_log = logging.getLogger(__name__)
_CATCH_UP_S = 0.05  # the most delay that later steps make up for


@dataclass(frozen=True, slots=True)
class Received:
    """A generation request as it arrived, kept for tests."""

    path: str
    headers: Mapping[str, str]  # names in any case
    body: bytes


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
        kill: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.engine_id = config.engine_id or self.new_id()
        self.process = self.new_id()  # another one at each start, whatever the engine's id
        self.address = ""
        self.side_address: tuple[str, int] = (config.host, config.side_channel_port)
        self.started_at = time.time()
        self.counters = Counters()
        self.received: deque[Received] = deque(maxlen=config.keep_requests)
        self.is_dead = False
        self.is_stopping = False
        self.protocol = PROTOCOLS[config.connector]
        self.metrics = MetricsRegistry(self, self.protocol.engine)
        self.meetings = Meetings(self.protocol, self.counters, config.meeting_timeout_s, self._is_pinned)
        self._peers = peers
        self.pulls = Pulls(self, peers, now)
        self.events = events
        self._now = now
        self._kill = kill
        self._faults = Faults()
        self._fault_change = asyncio.Event()  # set when faults change or the engine stops, then replaced by a new one
        self._output_states: dict[str, OutputState] = {}
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
        self.embeddings = EmbeddingStore(config.encoder_cache_items)
        self.encoder = Encoder(config, self.embeddings)
        self.arrivals = Arrivals(self.counters)
        self.scheduler = Scheduler(config, self.pool, self.handoffs, self.counters, self.embeddings)

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

    def _is_pinned(self, request_id: str) -> bool:
        return request_id in self.handoffs

    @property
    def own(self) -> Own:
        config = self.config
        can = config.bidirectional_kv_xfer, config.decode_radix_cache, config.takes_plain
        return Own(config.role, self.engine_id, *self.side_address, *can)

    def new_id(self) -> str:
        return uuid.uuid4().hex

    def wake(self) -> None:
        self._wake.set()

    def start(self) -> None:
        self._spawn(self._run())
        if self.config.transfers_kv:
            self._spawn(self.pulls.heartbeat())

    def stop(self) -> None:
        """Ends every request in flight with finish reason abort; later requests end so at once."""
        self.is_stopping = True
        self._announce_change()
        for sequence in self.scheduler.sequences:
            self.scheduler.abort(sequence)
        for state in self._output_states.values():
            state.deltas.put(Delta(state.choice, "", None, Finish.ABORT))
        self._output_states.clear()
        self.meetings.end()

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

    def until_changed(self) -> Coroutine[Any, Any, Any]:
        return self._fault_change.wait()

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
        sequences = new_sequences(generation, request_id, self.config, self._faults, self.new_id)
        keys = [one.transfer.meeting for one in sequences if one.transfer.hands_over and one.transfer.key]
        deltas = DeltaStream(len(sequences))
        arrived_at = self._now()
        self.meetings.offer(keys)
        try:
            await self.meetings.until_decode(keys)
            await asyncio.gather(*map(self.pulls.borrow, sequences))
            prompt_tokens = sum(map(len, generation.prompts))
            pulled = sequences[0].transfer.remote is not None and sequences[0].transfer.read_back is None
            new_tokens = 0 if pulled else sum(map(self.scheduler.new_tokens, sequences[:: generation.choices]))
            await self.pause(request_time_s(self.config.profile, prompt_tokens, new_tokens))
            for choice, sequence in enumerate(sequences):
                self._submit(sequence, OutputState(deltas, choice, arrived_at, abort_after))
            yield deltas
        finally:
            for sequence in sequences:
                self._abandon(sequence)
            self.meetings.withdraw(keys)

    async def fetch(self, inputs: Iterable[MediaInput], given: Mapping[str, EmbeddingSource]) -> None:
        await self._peers.fetch(inputs, given, self.embeddings)

    def decline(self, transfer: Transfer) -> None:
        """Of a request that ends before its pull: vLLM tells P to free the blocks; others do not, nor is a D told."""
        if self.protocol.engine == "vllm" and transfer.remote and transfer.read_back is None and not transfer.is_sent:
            self._spawn(self.pulls.free(transfer, transfer.remote))

    def _submit(self, sequence: Sequence, state: OutputState) -> None:
        if self.is_dead:
            raise EngineFailure("EngineCore encountered an issue.")
        if self.is_stopping:
            state.deltas.put(Delta(state.choice, "", None, Finish.ABORT))
            return
        self._output_states[sequence.id] = state
        self.scheduler.add(sequence)
        self._abort_on_order(sequence, state)
        self.wake()

    def _abort_on_order(self, sequence: Sequence, state: OutputState) -> None:
        if state.tokens == state.abort_after and sequence.id in self._output_states:
            state.deltas.put(Delta(state.choice, "", None, Finish.ABORT))
            self._abandon(sequence)

    def _abandon(self, sequence: Sequence) -> None:
        if self._output_states.pop(sequence.id, None) is None or self.is_dead:
            return
        if sequence.wants_pull:
            self.decline(sequence.transfer)
        self.pulls.leave(sequence)
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
                    if pull.sequence.transfer.is_sent:
                        await self.pulls.receive(pull)
                    else:
                        self._spawn(self.pulls.run(pull))
                if not step.chunks:
                    self._publish()
                    await self._idle()
                    ends_at = clock()
                    continue
                # From the planned end of the last step, so that this process's own work does not lengthen the steps.
                ends_at = max(ends_at, clock() - _CATCH_UP_S) + step.duration_s * self.config.time_scale
                await asyncio.sleep(max(0.0, ends_at - clock()))
                for output in self.scheduler.complete(step):
                    self.deliver(output)
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

    def deliver(self, output: Output) -> None:
        sequence, handed_over, now = output.sequence, output.handed_over, self._now()
        state = self._output_states.get(sequence.id)
        if state is None:
            return
        if handed_over and sequence.transfer.receiver is None:
            if self._faults.take_of_transfer(FaultKind.EXPIRE):
                self.handoffs.end_lease(handed_over.request_id)
        elif handed_over and not sequence.transfer.is_sent:
            self._spawn(self.pulls.push(sequence, handed_over))
        latencies = self.metrics.latencies
        if output.token is not None:
            first, since = state.last_at is None, state.arrived_at if state.last_at is None else state.last_at
            (latencies.first_token_s if first else latencies.between_tokens_s).observe(now - since)
            state.last_at = now
            state.tokens += 1
        if output.finish is not None:
            latencies.request_s.observe(now - state.arrived_at)
            del self._output_states[sequence.id]
        if output.finish is Finish.ERROR:
            state.deltas.put(EngineFailure(output.error))
            return
        delta = Delta(
            state.choice,
            output.text,
            output.token,
            output.finish,
            stop_reason=sequence.stop_reason if output.finish else None,
            cached_tokens=sequence.cached_tokens,
            transfer_params=self.protocol.answer(handed_over, self.own) if handed_over else None,
            logprobs=output.logprobs,
        )
        if handed_over and (key := sequence.transfer.meeting):
            self.meetings.hand_over(key, handed_over)
            if self.protocol.is_joint:
                self._spawn(self.meetings.put_once_taken(key, delta, state.deltas))
                return
            if sequence.transfer.is_sent:
                self._spawn(self.pulls.put_once_sent(sequence, handed_over, delta, state.deltas))
                return
        state.deltas.put(delta)
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

    async def pause(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s * self.config.time_scale)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
