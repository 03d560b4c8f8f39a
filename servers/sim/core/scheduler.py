"""Continuous batching, one step at a time, as vLLM's scheduler does it. Pure: no clock, no await.

    plan -> Step (each sequence's tokens to compute, and the duration) -> complete -> the sampled tokens

A prompt whose KV is on another engine waits outside the batch: `plan` names the blocks to pull, and the caller reports
back with `pull_arrived` or `pull_failed`. Running sequences come first, in order of arrival. When no block is free, the
youngest is preempted and computed again later.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, replace
from typing import NoReturn

from ppd.proxy.laws.step_time import attention_pairs, step_time_s

from .block_pool import Block, BlockPool, BlockStored
from .config import SimConfig
from .counters import Counters, Trap
from .embeddings import EmbeddingStore
from .handoffs import HandedOver, HandoffLedger, RemotePrefill
from .sequence import Finish, Ranking, Sequence, SequenceState


class EngineDied(Exception):
    """An assertion of a real engine's scheduler failed: all its requests are lost."""


@dataclass(frozen=True, slots=True)
class Chunk:
    sequence: Sequence
    tokens: int


READ_BACK_TOKENS = 64  # fewer P computes itself; vLLM's default of `kv_recompute_threshold`


@dataclass(frozen=True, slots=True)
class Pull:
    """Asks the caller to fill `blocks` with the KV of the peer's `remote_ids`, in order; with none, to meet P first.

    Without blocks to fill the peer is only told that it may free its own.
    """

    sequence: Sequence
    remote: RemotePrefill
    remote_ids: tuple[int, ...]
    blocks: tuple[Block, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    chunks: tuple[Chunk, ...] = ()
    pulls: tuple[Pull, ...] = ()
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Output:
    """One token of one sequence; with `finish` also, or only, its end."""

    sequence: Sequence
    text: str = ""
    token: int | None = None
    finish: Finish | None = None
    handed_over: HandedOver | None = None
    logprobs: Ranking | None = None  # if asked for
    error: str = "Internal server error"  # what its client is told, if `finish` is ERROR


class Scheduler:
    """Owns the sequences from `add` until they finish, and releases all their blocks."""

    def __init__(
        self,
        config: SimConfig,
        pool: BlockPool,
        handoffs: HandoffLedger,
        counters: Counters,
        embeddings: EmbeddingStore,
    ) -> None:
        """embeddings: of media."""
        self._config = config
        self._pool = pool
        self._handoffs = handoffs
        self._counters = counters
        self._embeddings = embeddings
        self._waiting: deque[Sequence] = deque()
        self._ready: deque[Sequence] = deque()  # they hold all of their prompt's blocks, so they go first
        self._pulling: dict[str, Sequence] = {}
        self._running: list[Sequence] = []

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """For capacity; sequences that wait for a pull are in `pulling`."""
        return len(self._waiting) + len(self._ready)

    @property
    def pulling(self) -> int:
        return len(self._pulling)

    @property
    def sequences(self) -> list[Sequence]:
        return [*self._running, *self._pulling.values(), *self._ready, *self._waiting]

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """A pull that is under way keeps its blocks until it reports: as on vLLM for good, if it never will."""
        if sequence.state is SequenceState.FINISHED:
            return
        self._counters.finished[Finish.ABORT] += 1
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        elif sequence.state is SequenceState.WAITING:
            (self._waiting if sequence in self._waiting else self._ready).remove(sequence)
        is_pulling = sequence.state is SequenceState.PULLING
        sequence.move(SequenceState.FINISHED)
        if not is_pulling:
            self._pool.release(sequence.forget_blocks())
        elif sequence.transfer.trap is not None:
            del self._pulling[sequence.id]

    def preempt_all(self) -> None:
        """Gives back the blocks of all running sequences, which are computed again later."""
        while self._running:
            self._preempt(self._running.pop())

    def plan(self) -> Step:
        """The next step; EngineDied where a real scheduler's assertion fails."""
        budget = self._config.profile.max_batched_tokens
        cap = self._config.profile.most_of_a_prompt(len(self.sequences))
        chunks, preempted = self._continue_running(budget, cap)
        budget -= sum(chunk.tokens for chunk in chunks)
        pulls: list[Pull] = []
        if not preempted or not chunks:  # preemption may have emptied the batch while a pulled prompt is ready
            chunks += self._admit(budget, cap, pulls)
        return Step(tuple(chunks), tuple(pulls), self._duration_s(chunks) if chunks else 0.0)

    def complete(self, step: Step) -> list[Output]:
        """Writes KV, caches full blocks, and samples a token for each sequence whose tokens are all computed."""
        self._counters.steps += 1
        outputs = []
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.state is not SequenceState.RUNNING:
                continue  # aborted while the step ran
            if not self._embed(chunk):
                self._running.remove(sequence)
                outputs.append(self._finish(sequence, Finish.ERROR))
                continue
            self._write(sequence, chunk.tokens)
            if sequence.computed == len(sequence.tokens):
                outputs.append(self._sample(sequence))
        return outputs

    def _embed(self, chunk: Chunk) -> bool:
        """Makes the embeddings that the chunk needs; False where one is another's, or has nothing to be made of."""
        for media in chunk.sequence.media_within(chunk.tokens):
            if self._embeddings.mistaken(media):
                return False
            if not self._embeddings.holds(media):
                if not media.has_data:
                    return False
                self._counters.encoded_items += 1
                self._embeddings.put(media.name, media.tokens)
        return True

    def _encode_s(self, chunks: list[Chunk]) -> float:
        within = (media for chunk in chunks for media in chunk.sequence.media_within(chunk.tokens))
        new = {media.name for media in within if media.has_data and not self._embeddings.holds(media)}
        return len(new) * self._config.encoder_item_s

    def met(self, pull: Pull, remote: RemotePrefill) -> Pull:
        """The pull of a sequence that only had a key, now that P has said which blocks to read."""
        pull.sequence.transfer = replace(pull.sequence.transfer, remote=remote)
        return replace(pull, remote=remote, remote_ids=_paired(remote, pull.blocks))

    def pull_arrived(self, pull: Pull, contents: list[list[int]]) -> None:
        """The prompt's last token is computed again, for its logits."""
        sequence = self._pulling.pop(pull.sequence.id)
        if sequence.state is SequenceState.FINISHED:
            self._pool.release(sequence.forget_blocks())
            return
        for block, content in zip(pull.blocks, contents, strict=True):
            block.content[:] = array("I", content)
        sequence.computed = min(sequence.computed + pull.tokens, len(sequence.prompt) - 1)
        sequence.pulled = pull.tokens
        self._counters.external_hits += pull.tokens
        self._counters.pulled_blocks += len(pull.blocks)
        self._seal(sequence, sequence.local_hits)
        self._resume(sequence)

    def pull_failed(self, pull: Pull, *, recompute: bool) -> Output | None:
        """`recompute`: the prompt is computed here; else the request ends with an error."""
        sequence = self._pulling.pop(pull.sequence.id)
        if sequence.state is SequenceState.FINISHED:
            self._pool.release(sequence.forget_blocks())
            return None
        if recompute:
            self._resume(sequence)
            return None
        return self._finish(sequence, Finish.ERROR)

    def _continue_running(self, budget: int, cap: int) -> tuple[list[Chunk], bool]:
        """Chunks for the running sequences, and whether a sequence was preempted."""
        chunks: list[Chunk] = []
        preempted = False
        while len(chunks) < len(self._running) and budget > 0:
            sequence = self._running[len(chunks)]
            tokens = min(len(sequence.tokens) - sequence.computed, budget, cap)
            while not self._grow(sequence, sequence.computed + tokens):
                preempted = True
                youngest = self._running.pop()
                self._preempt(youngest)
                if youngest is sequence:
                    return chunks, preempted
            chunks.append(Chunk(sequence, tokens))
            budget -= tokens
        return chunks, preempted

    def _admit(self, budget: int, cap: int, pulls: list[Pull]) -> list[Chunk]:
        chunks: list[Chunk] = []
        while (queue := self._ready or self._waiting) and budget > 0 and len(self._running) < self._config.max_num_seqs:
            sequence = queue[0]
            if queue is self._waiting:
                self._find_prefix(sequence)
            if sequence.wants_pull:
                if not self._start_pull(sequence, pulls):
                    break
                continue
            tokens = min(len(sequence.tokens) - sequence.computed, budget, cap)
            if not self._grow(sequence, sequence.computed + tokens):
                self._pool.release(sequence.forget_blocks())
                break
            queue.popleft()
            self._count_hits(sequence)
            sequence.move(SequenceState.RUNNING)
            self._running.append(sequence)
            chunks.append(Chunk(sequence, tokens))
            budget -= tokens
        return chunks

    def new_tokens(self, sequence: Sequence) -> int:
        """How much of its prompt is not cached now."""
        most = (len(sequence.tokens) - 1) // self._pool.block_size
        hits = self._pool.match(sequence.block_hashes(self._pool.block_size)[:most])
        return len(sequence.tokens) - len(hits) * self._pool.block_size

    def _find_prefix(self, sequence: Sequence) -> None:
        """Shares the cached blocks of the longest prefix; at least one token is left to compute."""
        if sequence.transfer.pulls_all or not sequence.sampling.reads_cache:
            return
        most = (len(sequence.tokens) - 1) // self._pool.block_size
        hits = self._pool.match(sequence.block_hashes(self._pool.block_size)[:most])
        self._pool.share(hits, sequence.session_id)
        sequence.blocks = hits
        sequence.computed = len(hits) * self._pool.block_size

    def _start_pull(self, sequence: Sequence, pulls: list[Pull]) -> bool:
        """Takes the head of the queue out until its prompt is pulled; False, with no change, if blocks are short."""
        if sequence.transfer.trap is Trap.NO_REMOTE_BLOCKS:
            self._die(Trap.NO_REMOTE_BLOCKS)
        held, tokens = len(sequence.blocks), sequence.remote_tokens - sequence.computed
        if sequence.transfer.read_back is not None and tokens < READ_BACK_TOKENS and sequence.transfer.remote:
            pulls.append(Pull(sequence, sequence.transfer.remote, (), (), 0))
            self._pool.release(sequence.forget_blocks())  # it is looked up again
            sequence.wants_pull = False
            return True
        if not self._grow(sequence, len(sequence.prompt)):
            self._pool.release(sequence.forget_blocks())
            return False
        missing = tuple(sequence.blocks[held : -(-sequence.remote_tokens // self._pool.block_size)])
        self._waiting.popleft()
        self._count_hits(sequence)
        sequence.wants_pull = False
        sequence.move(SequenceState.PULLING)
        self._pulling[sequence.id] = sequence
        self._counters.external_queries += tokens
        remote = sequence.transfer.remote
        if remote is None:
            # No load is started, so the request hangs until the client leaves.
            self._counters.traps[sequence.transfer.trap or Trap.NO_REMOTE_ADDRESS] += 1
            return True
        if remote.block_ids is not None and len(remote.block_ids) < len(missing):
            self._die(Trap.TOO_FEW_BLOCKS)
        pulls.append(Pull(sequence, remote, _paired(remote, missing), missing, tokens))
        return True

    def _die(self, trap: Trap) -> NoReturn:
        self._counters.traps[trap] += 1
        raise EngineDied(trap.value)

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Allocates blocks for the first `tokens` tokens; False, with no change, if too few are free."""
        more = self._pool.allocate(max(0, -(-tokens // self._pool.block_size) - len(sequence.blocks)))
        if more is None:
            return False
        sequence.blocks += more
        return True

    def _count_hits(self, sequence: Sequence) -> None:
        # Once per request, even if it is preempted.
        if sequence.is_counted:
            return
        sequence.is_counted = True
        sequence.local_hits = sequence.computed
        self._counters.prefix_queries += len(sequence.prompt)
        self._counters.prefix_hits += sequence.local_hits

    def _preempt(self, sequence: Sequence) -> None:
        self._counters.preemptions += 1
        self._pool.release(sequence.forget_blocks())
        sequence.move(SequenceState.WAITING)
        self._waiting.appendleft(sequence)

    def _resume(self, sequence: Sequence) -> None:
        sequence.move(SequenceState.WAITING)
        self._ready.append(sequence)

    def _write(self, sequence: Sequence, tokens: int) -> None:
        size = self._pool.block_size
        start, sequence.computed = sequence.computed, sequence.computed + tokens
        for at in range(start, sequence.computed):
            sequence.blocks[at // size].content[at % size] = sequence.tokens[at]
        self._seal(sequence, start)

    def _seal(self, sequence: Sequence, start: int) -> None:
        size = self._pool.block_size
        hashes = sequence.block_hashes(size)
        for at in range(start // size, sequence.computed // size):
            tokens = tuple(sequence.tokens[at * size : (at + 1) * size])
            parent = hashes[at - 1] if at else None
            stored = BlockStored(hashes[at], parent, tokens, sequence.namespace, sequence.session_id)
            self._pool.seal(sequence.blocks[at], stored)

    def _sample(self, sequence: Sequence) -> Output:
        token = sequence.sample()
        if sequence.answered == 1:
            self._counters.prompt_tokens += len(sequence.prompt)
            self._counters.local_cache_hit_tokens += sequence.local_hits
            self._counters.external_kv_tokens += sequence.pulled
            self._counters.local_compute_tokens += len(sequence.prompt) - sequence.local_hits - sequence.pulled
        self._counters.generation_tokens += 1
        text, finish = sequence.end(token)
        if finish is None:
            return Output(sequence, text, token, logprobs=sequence.logprobs)
        self._running.remove(sequence)
        return self._finish(sequence, finish, text, token)

    def _finish(self, sequence: Sequence, finish: Finish, text: str = "", token: int | None = None) -> Output:
        self._counters.finished[finish] += 1
        sequence.move(SequenceState.FINISHED)
        computed = sequence.computed
        logprobs = None if token is None else sequence.logprobs
        blocks = sequence.forget_blocks()
        transfer, kept_until = sequence.transfer, None
        is_short = finish is Finish.STOP and transfer.only_at_length
        keeps_s = None if transfer.hands_over or transfer.remote is None else self._config.keeps_s
        if not (transfer.hands_over or keeps_s) or finish is Finish.ERROR or is_short:
            self._pool.release(blocks)
            return Output(sequence, text, token, finish, logprobs=logprobs)
        if keeps_s is None:
            self._handoffs.pin(sequence.id, blocks)
        else:
            kept_until = self._handoffs.keep(sequence.id, blocks, keeps_s)
        ids = tuple(block.id for block in blocks)
        first = sequence.tokens[len(sequence.prompt)]
        handed_over = HandedOver(sequence.id, ids, computed, sequence.local_hits, transfer.key, first, kept_until)
        return Output(sequence, text, token, finish, handed_over, logprobs)

    def _duration_s(self, chunks: list[Chunk]) -> float:
        decoding = [chunk.sequence for chunk in chunks if chunk.tokens == 1]
        prefills = [chunk for chunk in chunks if chunk.tokens > 1]
        return self._encode_s(chunks) + step_time_s(
            self._config.profile,
            decode_sequences=len(decoding),
            decode_context_tokens=sum(sequence.computed + 1 for sequence in decoding),
            prefill_tokens=sum(chunk.tokens for chunk in prefills),
            prefill_attention_pairs=sum(attention_pairs(chunk.tokens, chunk.sequence.computed) for chunk in prefills),
        )


def _paired(remote: RemotePrefill, missing: tuple[Block, ...]) -> tuple[int, ...]:
    """As on vLLM from the end, so wrong blocks are read if P's prompt was another one."""
    return () if remote.block_ids is None else remote.block_ids[-len(missing) :]
