"""A request (`Generation`) and its sequences: their tokens, the blocks that hold their KV, and when each ends. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum

from .answer_text import AnswerChain, StopText
from .block_pool import Block, BlockHash, Namespace, chain_hash
from .embeddings import MediaInput, PlacedMedia
from .handoffs import Transfer
from .reasoning import Thinking, Thoughts
from .structured_text import AnswerForm, Guide
from .tokens import TURN_END, Tokenizer, decode

Ranking = tuple[tuple[int, float], ...]  # likely tokens and their log probabilities; the sampled one leads


class SequenceState(Enum):
    WAITING = "waiting"  # for blocks, or a slot in the batch
    PULLING = "pulling"  # for KV from another engine
    RUNNING = "running"
    FINISHED = "finished"


_MOVES = {
    SequenceState.WAITING: {SequenceState.PULLING, SequenceState.RUNNING, SequenceState.FINISHED},
    SequenceState.PULLING: {SequenceState.WAITING, SequenceState.FINISHED},
    SequenceState.RUNNING: {SequenceState.WAITING, SequenceState.FINISHED},  # back to waiting: preempted
    SequenceState.FINISHED: set[SequenceState](),
}


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """When an answer ends, and what form it has. Every answer is greedy, so there is no temperature."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    form: AnswerForm | None = None  # free text
    thoughts: Thoughts | None = None  # of a model that may reason first
    logprobs: int | None = None  # how many of the most likely tokens are ranked beside each sampled one
    reads_cache: bool = True  # False: all of the prompt is computed

    def first_token(self) -> Sampling:
        """The same answer, cut off after its first token."""
        return replace(self, max_tokens=1, min_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One client request: prompts as token ids, with `choices` answers to each."""

    model: str
    namespace: Namespace
    prompts: tuple[tuple[int, ...], ...]
    choices: int
    sampling: Sampling
    transfers: tuple[Transfer, ...] = ()  # of its sequences, in order; empty: none takes part in one
    media: tuple[MediaInput, ...] = ()  # of all prompts
    session_id: str | None = None  # the client's name of its conversation, which KV events repeat
    stream: bool = False
    include_reasoning: bool = True  # False: it is generated and counted, but not shown
    reasoning_field: str | None = None  # the member that holds it; None: the model does not reason
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """Changed only by the scheduler. Invariant: `computed` <= len(tokens), and `blocks` hold the KV of these tokens."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    namespace: Namespace
    answer_key: bytes = b""  # the weights
    transfer: Transfer = field(default_factory=Transfer)
    media: tuple[PlacedMedia, ...] = ()
    session_id: str | None = None
    tokenizer: Tokenizer = Tokenizer.CHARACTERS
    state: SequenceState = SequenceState.WAITING
    tokens: list[int] = field(default_factory=list)  # the prompt and the answer so far
    blocks: list[Block] = field(default_factory=list)
    computed: int = 0
    local_hits: int = 0  # prompt tokens found in the prefix cache at the first scheduling
    pulled: int = 0  # prompt tokens whose KV came from another engine
    wants_pull: bool = field(init=False)  # until the pull has started
    is_counted: bool = False  # its cache hits are in the counters
    text: StopText = field(init=False)
    logprobs: Ranking | None = None  # of the token sampled last
    _hashes: list[BlockHash] = field(default_factory=list)
    _chain: AnswerChain | None = None
    _natural_length: int = 0
    _thinking: Thinking | None = None
    _guide: Guide | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.wants_pull = self.transfer.remote is not None or self.transfer.trap is not None
        self.text = StopText(self.sampling.stop, include_stop=self.sampling.include_stop)
        if self.sampling.thoughts is not None:
            self._thinking = Thinking(self.sampling.thoughts, self.tokenizer)
        self._guide = self.sampling.form.guide(self.tokenizer) if self.sampling.form is not None else None

    @property
    def answered(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def remote_tokens(self) -> int:
        """Of the prompt, that the peer has which it is pulled from."""
        prompt, read_back = len(self.prompt), self.transfer.read_back
        return prompt if read_back is None else min(read_back, prompt)

    @property
    def cached_tokens(self) -> int:
        """For `usage`. As on vLLM, after a remote prefill this is P's count, not this engine's."""
        remote = self.transfer.remote
        if remote is None or not self.pulled:
            return self.local_hits
        if remote.prefill_cached_tokens is not None:
            return remote.prefill_cached_tokens
        return self.local_hits + self.pulled

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the answer; None for its natural end or its limit."""
        if self.text.matched is not None:
            return self.text.matched
        return self.tokens[-1] if self.answered and self.tokens[-1] in self.sampling.stop_token_ids else None

    def move(self, state: SequenceState) -> None:
        if state not in _MOVES[self.state]:
            raise ValueError(f"{self.id}: {self.state.value} -> {state.value}")
        self.state = state

    def block_hashes(self, block_size: int) -> list[BlockHash]:
        for start in range(len(self._hashes) * block_size, len(self.tokens) - block_size + 1, block_size):
            parent = self._hashes[-1] if self._hashes else None
            self._hashes.append(chain_hash(parent, self.tokens[start : start + block_size], self.namespace))
        return self._hashes

    def media_within(self, tokens: int) -> list[MediaInput]:
        """Items that the next so many tokens to compute begin."""
        ends = self.computed + tokens
        return [placed.media for placed in self.media if self.computed <= placed.at < ends]

    def forget_blocks(self) -> list[Block]:
        """Detaches the blocks, which the caller must release."""
        blocks, self.blocks = self.blocks, []
        self.computed = 0
        self._chain = None
        return blocks

    def sample(self) -> int:
        """Draws the next token from the blocks' contents and adds it to `tokens`."""
        if self._chain is None:
            held = [token for block in self.blocks for token in block.content]
            self._chain = AnswerChain(self.answer_key, held[: len(self.tokens)], self.tokenizer)
            if not self.answered:
                self._natural_length = max(self._chain.natural_length(), self.sampling.min_tokens + 1)
        token = TURN_END if self.transfer.stops else None
        if token is None and self._thinking:
            token = self._thinking.next_token(self._chain)
        if token is None and self._guide:
            token = self._guide.next_token(self._chain)
        if token is None:
            thought = self._thinking.tokens if self._thinking else 0
            is_end = not self.sampling.ignore_eos and self.answered - thought + 1 >= self._natural_length
            token = TURN_END if is_end else self._chain.next_token()
        if self.sampling.logprobs is not None:
            self.logprobs = self._chain.rank(token, self.sampling.logprobs)
        self._chain.append(token)
        self.tokens.append(token)
        return token

    def end(self, token: int) -> tuple[str, Finish | None]:
        """The text to send after the token just sampled, and the reason if the answer ends with it."""
        may_stop = self.answered > self.sampling.min_tokens
        is_end = token == TURN_END or (may_stop and token in self.sampling.stop_token_ids)
        text = self.text.push("" if is_end else decode((token,)), may_stop=may_stop)
        finish = None
        if is_end or self.text.matched is not None:
            finish = Finish.STOP
        elif self.answered >= self.sampling.max_tokens:
            finish = Finish.LENGTH
        return (text + self.text.flush() if finish else text), finish
