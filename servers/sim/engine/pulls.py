"""D's end of KV transfers: from a pull that the scheduler asks for until the KV has come or has not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from ppd.proxy.laws.step_time import transfer_time_s

from ..core.block_pool import BlockPool
from ..core.config import LoadFailurePolicy, SimConfig
from ..core.counters import Counters, Trap
from ..core.fault_orders import FaultKind, Faults
from ..core.handoffs import HandedOver, HandoffLedger, RemotePrefill, Transfer
from ..core.scheduler import Output, Pull, Scheduler
from ..core.sequence import Sequence, SequenceState
from ..protocols.legs import KvProtocol, Own
from .arrivals import ArrivalFailed, Arrivals
from .deltas import Delta, DeltaStream
from .metrics import MetricsRegistry
from .side_channel import MetPrefill, Peers, SideChannelError, StoredPrompt

KEPT_MARGIN_S = 5.0  # before D gives up what it keeps, P does not read it

_log = logging.getLogger(__name__)


class PullingEngine(Protocol):
    """What pulls need of their engine."""

    config: SimConfig
    counters: Counters
    handoffs: HandoffLedger
    metrics: MetricsRegistry
    pool: BlockPool
    protocol: KvProtocol
    scheduler: Scheduler
    arrivals: Arrivals

    @property
    def faults(self) -> Faults: ...

    @property
    def own(self) -> Own: ...

    def deliver(self, output: Output) -> None: ...

    def kill(self) -> None: ...

    async def pause(self, duration_s: float) -> None: ...

    async def stalls(self, engine_id: str) -> bool: ...

    def until_changed(self) -> Coroutine[Any, Any, Any]:
        """From this call on: until faults are set anew, or the engine stops."""

    def wake(self) -> None: ...


class Pulls:
    def __init__(self, engine: PullingEngine, peers: Peers, now: Callable[[], float]) -> None:
        self._engine = engine
        self._peers = peers
        self._now = now
        self._meeting: dict[str, asyncio.Future[MetPrefill]] = {}  # by the id of the sequence that waits

    @property
    def meeting(self) -> int:
        """Sequences that wait for P to have computed their prompt; the others that pull are reading it."""
        return len(self._meeting)

    async def run(self, pull: Pull) -> None:
        engine, sequence = self._engine, pull.sequence
        begun = self._now()
        if not pull.blocks:
            await self._notify(pull.remote)
            return
        try:
            kept_until = pull.remote.kept_until
            if kept_until is not None and begun + KEPT_MARGIN_S > kept_until:
                raise SideChannelError("D gives up what it keeps too soon")
            if pull.remote.block_ids is None:
                pull = engine.scheduler.met(pull, await self._meet(pull))
            if await engine.stalls(pull.remote.engine_id) or engine.faults.take_of_transfer(FaultKind.LOAD):
                raise SideChannelError("a fault was ordered")
            contents = await self._peers.read(pull.remote, pull.remote_ids)
        except SideChannelError as failure:
            _log.warning("KV load failed: %s", failure)
            engine.counters.failed_transfers += sequence.state is not SequenceState.FINISHED
            policy, transfer = engine.config.load_failure_policy, sequence.transfer
            recompute = policy is LoadFailurePolicy.RECOMPUTE and engine.protocol.engine == "vllm"
            if recompute and transfer.read_back is not None and _begins_again(sequence):
                engine.counters.traps[Trap.READ_AGAIN] += 1
                sequence.transfer = replace(transfer, trap=Trap.READ_AGAIN)
                return
            output = engine.scheduler.pull_failed(pull, recompute=recompute or transfer.recomputes)
            if output is not None:
                engine.deliver(replace(output, error=f"KV transfer: {failure}") if sequence.transfer.key else output)
        else:
            profile, latencies = engine.config.profile, engine.metrics.latencies
            await engine.pause(transfer_time_s(profile, pull.tokens))
            await self._notify(pull.remote)
            latencies.transfer_s.observe(self._now() - begun)
            latencies.transfer_bytes.observe(pull.tokens * profile.kv_bytes_per_token)
            engine.scheduler.pull_arrived(pull, contents)
        engine.wake()

    async def borrow(self, sequence: Sequence) -> None:
        """Takes into P's own cache what the source of its transfer holds of the prompt, and P does not."""
        engine, source, size = self._engine, sequence.transfer.source, self._engine.pool.block_size
        if source is None:
            return
        hashes = sequence.block_hashes(size)[: len(sequence.prompt) // size]
        held = len(engine.pool.match(hashes))
        try:
            found = await self._peers.find(source, hashes)
        except SideChannelError as failure:
            _log.warning("nothing is found at the KV source: %s", failure)
            engine.counters.failed_transfers += 1
            return
        tokens = max(0, len(found) - held) * size
        await engine.pause(transfer_time_s(engine.config.profile, tokens))
        engine.pool.store(found, sequence.namespace)
        engine.counters.external_queries += (len(hashes) - held) * size
        engine.counters.external_hits += tokens

    async def receive(self, pull: Pull) -> None:
        """Of a prompt that P sends: all of D waits, as on vLLM without a time-out. A change of faults ends that too."""
        engine, sequence = self._engine, pull.sequence
        arrival = asyncio.ensure_future(engine.arrivals.take(sequence.transfer.meeting, len(sequence.prompt)))
        change = asyncio.ensure_future(engine.until_changed())
        try:
            await asyncio.wait({arrival, change}, return_when=asyncio.FIRST_COMPLETED)
            if not arrival.done():
                raise ArrivalFailed("P has not sent it")
            blocks = arrival.result().blocks[-len(pull.blocks) :]
        except ArrivalFailed as failure:
            engine.counters.failed_transfers += 1
            if (output := engine.scheduler.pull_failed(pull, recompute=False)) is not None:
                engine.deliver(replace(output, error=f"KV transfer: {failure}"))
        else:
            engine.scheduler.pull_arrived(pull, blocks)
        finally:
            arrival.cancel()
            change.cancel()
        engine.wake()

    def leave(self, sequence: Sequence) -> None:
        """The sequence is aborted: it waits for P no longer, unless P writes into its blocks."""
        if sequence.state is not SequenceState.PULLING:
            return
        leaks = self._engine.faults.take_of_transfer(FaultKind.LEAK)
        if leaks:
            sequence.forget_blocks()
        meeting = self._meeting.get(sequence.id)
        if meeting is not None and (leaks or not self._engine.protocol.is_written):
            meeting.cancel()

    def expire(self) -> None:
        """Gives up what aborted sequences keep for a P that has not written, as at the end of `meeting_timeout_s`."""
        for sequence in self._engine.scheduler.sequences:
            if sequence.state is SequenceState.FINISHED and sequence.id in self._meeting:
                self._meeting[sequence.id].cancel()

    async def free(self, transfer: Transfer, remote: RemotePrefill) -> None:
        """P may free the blocks of a prompt that nobody pulls; of a keyed one, once P has computed it."""
        if remote.block_ids is None:
            try:
                async with asyncio.timeout(self._engine.config.meeting_timeout_s):
                    remote = (await self._peers.meet(remote, transfer.meeting)).remote(remote)
            except (SideChannelError, TimeoutError):
                return
        await self._notify(remote)

    async def put_once_sent(
        self, sequence: Sequence, handed_over: HandedOver, delta: Delta, deltas: DeltaStream
    ) -> None:
        """P's answer, where it is due when the KV has left."""
        await self._engine.stalls(self._engine.own.engine_id)
        await self.push(sequence, handed_over)
        deltas.put(delta)

    async def push(self, sequence: Sequence, handed_over: HandedOver) -> None:
        """Sends P's prompt to the peer that it was told, which P holds until then: full blocks, or all for one leg.

        By a fault it sends nothing; what is for one leg it then sends under a name that nobody asks for.
        """
        engine, transfer, receiver = self._engine, sequence.transfer, sequence.transfer.receiver
        assert receiver is not None, "somebody takes it"
        if engine.faults.take_of_transfer(FaultKind.EXPIRE):
            transfer = replace(transfer, is_absent=True)
        tokens = handed_over.tokens
        sent = handed_over.block_ids if transfer.is_sent else handed_over.block_ids[: tokens // engine.pool.block_size]
        contents = [list(engine.pool[block_id].content) for block_id in sent]
        await engine.pause(transfer_time_s(engine.config.profile, len(contents) * engine.pool.block_size))
        if engine.faults.take_of_transfer(FaultKind.KILL_AT_TRANSFER):
            engine.kill()  # which ends this at its next await
        prompt = StoredPrompt(
            "", engine.config.model, sequence.namespace, contents, transfer.meeting if transfer.is_sent else "", tokens
        )
        try:
            if transfer.is_sent or not transfer.is_absent:
                await self._peers.store(receiver, prompt)
        except SideChannelError as failure:
            _log.warning("KV could not be sent: %s", failure)
            engine.counters.failed_transfers += 1
        engine.handoffs.close(handed_over.request_id)
        engine.wake()

    async def _notify(self, remote: RemotePrefill) -> None:
        try:
            await self._peers.close(remote)
        except SideChannelError:
            self._engine.counters.failed_notifications += 1

    async def heartbeat(self) -> None:
        """Extends the leases of prompts that are queued here for a pull, six times per lease."""
        while True:
            await asyncio.sleep(self._engine.config.lease_s / 6)
            for sequence in self._engine.scheduler.sequences:
                remote = sequence.transfer.remote
                if sequence.wants_pull and remote is not None and remote.has_heartbeat and not sequence.transfer.key:
                    with suppress(SideChannelError):
                        await self._peers.extend(remote)

    async def _meet(self, pull: Pull) -> RemotePrefill:
        """P's blocks. SideChannelError if P does not come in time, or has computed a prompt of another length."""
        sequence, engine = pull.sequence, self._engine
        if sequence.state is SequenceState.FINISHED and not engine.protocol.is_written:
            raise SideChannelError("the request was aborted")
        meeting = asyncio.ensure_future(self._peers.meet(pull.remote, sequence.transfer.meeting))
        self._meeting[sequence.id] = meeting
        try:
            await asyncio.wait({meeting}, timeout=engine.config.meeting_timeout_s)
            if meeting.cancelled():
                raise SideChannelError("the request was aborted")
            if not meeting.done():
                raise SideChannelError(f"nobody came to {sequence.transfer.key} in time")
            prefill = meeting.result()
        finally:
            meeting.cancel()
            del self._meeting[sequence.id]
        if prefill.tokens != len(sequence.prompt):
            engine.counters.traps[Trap.OTHER_PROMPT] += 1
            raise SideChannelError(f"P's prompt has {prefill.tokens} tokens, this one {len(sequence.prompt)}")
        return prefill.remote(pull.remote)


def _begins_again(sequence: Sequence) -> bool:
    """Whether vLLM looks once more for what others hold of this prompt: it does where nothing of it is computed."""
    return sequence.state is SequenceState.PULLING and not sequence.computed
