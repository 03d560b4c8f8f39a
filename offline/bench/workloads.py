"""What `ppd bench` plays: conversations of one shape, or those of a file, with their arrivals and their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ppd.proxy.errors import ConfigError

from ..load.script import Script
from ..load.server_tokenizer import Tokenizer
from ..traces.turns import CHARACTERS_PER_TOKEN, Blocks, TracedConversation, TracedTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationShape:
    """Identical conversations, in tokens."""

    first: tuple[int, int]  # new tokens of the first turn, and of its answer
    later: tuple[int, int]
    turns: int
    think_s: float = 0.0
    shared_prefix_tokens: int = 0  # of the first turn's
    image_every: int = 0  # one in so many requests of all conversations has an image; 0: none has

    def __post_init__(self) -> None:
        if self.shared_prefix_tokens >= self.first[0]:
            raise ConfigError(f"shared_prefix: must be below the {self.first[0]} tokens of the first turn")

    def __str__(self) -> str:
        text = f"{self.first[0]}:{self.first[1]}"
        if self.turns > 1:
            text += f", then {self.turns - 1} x {self.later[0]}:{self.later[1]}"
        images = f", an image in every {self.image_every}. request" if self.image_every else ""
        extra = (f", {self.think_s:g} s apart" if self.think_s else "", self._shared(), images)
        return text + "".join(extra)

    def conversations(self, count: int) -> list[TracedConversation]:
        blocks = Blocks((0,), self.shared_prefix_tokens) if self.shared_prefix_tokens else None
        first = TracedTurn(new_tokens=self.first[0], output_tokens=self.first[1], blocks=blocks)
        later = TracedTurn(new_tokens=self.later[0], output_tokens=self.later[1], think_s=self.think_s)
        turns = (first, *(later for _ in range(self.turns - 1)))
        return [TracedConversation(str(number), None, self._with_images(turns, number)) for number in range(count)]

    def _with_images(self, turns: tuple[TracedTurn, ...], number: int) -> tuple[TracedTurn, ...]:
        if not self.image_every:
            return turns
        first = number * len(turns) + 1
        return tuple(
            turn if request % self.image_every else replace(turn, images=1) for request, turn in enumerate(turns, first)
        )

    def _shared(self) -> str:
        return f", {self.shared_prefix_tokens} of them shared" if self.shared_prefix_tokens else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When conversations begin: `qps` a second; as recorded, `speed` times as fast; or `concurrency` at a time."""

    qps: float | None = None
    speed: float = 1.0
    concurrency: int | None = None

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"closed loop, {self.concurrency} conversations at a time"
        if self.qps is not None:
            return f"open loop, {self.qps:g} conversations a second"
        return f"open loop, recorded arrivals at {self.speed:g} x"


def scripts_for(conversations: Sequence[TracedConversation], pace: Pace, seed: int) -> list[Script]:
    """In order of arrival. ConfigError where recorded arrivals are needed and missing."""
    arrivals = _arrivals(conversations, pace, seed)
    order = sorted(range(len(conversations)), key=lambda at: arrivals[at])
    return [
        Script(number=number, arrival_s=arrivals[at], turns=tuple(_hastened(conversations[at].turns, pace)))
        for number, at in enumerate(order)
    ]


def within(conversations: Sequence[TracedConversation], limit: int) -> list[TracedConversation]:
    """Each conversation cut where its context, answers included, exceeds `limit` tokens; text is not counted."""
    cut = []
    for conversation in conversations:
        turns: list[TracedTurn] = []
        context = 0
        for turn in conversation.turns:
            context = (0 if turn.restarts else context) + (turn.new_tokens or 0) + (turn.output_tokens or 0)
            if context > limit:
                break
            turns.append(turn)
        if turns:
            cut.append(replace(conversation, turns=tuple(turns)))
    return cut


def with_pauses_of(conversations: Sequence[TracedConversation], most_s: float) -> list[TracedConversation]:
    return [
        replace(
            conversation,
            turns=tuple(
                replace(turn, think_s=min(turn.think_s, most_s), gap_s=min(turn.gap_s, most_s))
                for turn in conversation.turns
            ),
        )
        for conversation in conversations
    ]


async def with_outputs(
    conversations: Sequence[TracedConversation], asked: int | None, usual: int, tokenizer: Tokenizer
) -> list[TracedConversation]:
    """Sets each answer's length: `asked`, else as recorded, else that of its recorded text, else `usual`."""
    counts = {} if asked else await _lengths(conversations, tokenizer)
    return [
        replace(
            conversation,
            turns=tuple(
                replace(turn, output_tokens=asked or turn.output_tokens or counts.get(turn.reply, usual))
                for turn in conversation.turns
            ),
        )
        for conversation in conversations
    ]


async def _lengths(conversations: Sequence[TracedConversation], tokenizer: Tokenizer) -> dict[str, int]:
    turns = [turn for conversation in conversations for turn in conversation.turns]
    texts = dict.fromkeys(turn.reply for turn in turns if turn.output_tokens is None and turn.reply)
    try:
        return {text: max(1, len(await tokenizer.encode(text))) for text in texts}
    except ConfigError:
        return {text: max(1, len(text) // CHARACTERS_PER_TOKEN) for text in texts}


def _arrivals(conversations: Sequence[TracedConversation], pace: Pace, seed: int) -> list[float]:
    if pace.concurrency is not None:
        return [0.0] * len(conversations)
    if pace.qps is not None:
        gaps = np.random.default_rng(seed).exponential(1 / pace.qps, size=len(conversations))
        times: list[float] = np.cumsum(gaps).tolist()
        return times
    recorded = [conversation.arrival_s for conversation in conversations if conversation.arrival_s is not None]
    if len(recorded) < len(conversations):
        raise ConfigError("the file does not say when its conversations arrive: give --qps or --concurrency")
    return [(at_s - min(recorded)) / pace.speed for at_s in recorded]


def _hastened(turns: Sequence[TracedTurn], pace: Pace) -> list[TracedTurn]:
    # Recorded pauses shrink as recorded arrivals do.
    if pace.speed == 1:
        return [*turns]
    return [replace(turn, think_s=turn.think_s / pace.speed, gap_s=turn.gap_s / pace.speed) for turn in turns]
