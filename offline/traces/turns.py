"""A conversation as a trace records it. A prompt is the history, answers included, and what the turn adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CHARACTERS_PER_TOKEN = 4  # of a text, where nobody counts its tokens


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a prompt begins. Equal ids in one scope are equal text, and so one entry of a prefix cache."""

    ids: tuple[int, ...]
    tokens: int  # in each block; the prompt may end inside the last one
    scope: str = ""  # "": ids mean the same in the whole file


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """A whole prompt by its blocks. Two prompts of a scope begin alike as far as their ids are the same."""

    tokens: int
    runs: tuple[tuple[int, int], ...]  # of successive ids: the first, and how many; they may cover less than all tokens
    block_tokens: int
    scope: str = ""  # "": ids mean the same in the whole file


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTurn:
    """A turn waits until both `think_s` and `gap_s` have passed; a trace that records one of them leaves the other at
    0.
    """

    new_tokens: int | None = None  # that it adds to the prompt; None: it has messages instead
    output_tokens: int | None = None  # None: not recorded, or only as text
    think_s: float = 0.0  # from the end of the answer before
    gap_s: float = 0.0  # from the sending of the turn before
    messages: tuple[Message, ...] = ()  # none: its text was not recorded
    images: int = 0  # that come with what it adds
    reply: str = ""  # the answer as recorded
    blocks: Blocks | None = None  # of a prompt that does not continue an earlier turn
    restarts: bool = False  # a later turn whose prompt is new from the start, as after a compaction
    prompt: RecordedPrompt | None = None  # None: the trace does not say what it is made of


@dataclass(frozen=True, slots=True)
class TracedConversation:
    name: str
    arrival_s: float | None  # since the trace began; None: not recorded
    turns: tuple[TracedTurn, ...]


def runs_of(ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Successive ids as runs: where each begins, and how many they are."""
    runs: list[tuple[int, int]] = []
    begin = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or ids[at] != ids[at - 1] + 1:
            runs.append((ids[begin], at - begin))
            begin = at
    return tuple(runs)


def fresh_turn(
    tokens: int, output_tokens: int, blocks: Blocks, *, think_s: float = 0.0, gap_s: float = 0.0, restarts: bool = False
) -> TracedTurn:
    return TracedTurn(
        new_tokens=max(1, tokens),
        output_tokens=max(1, output_tokens),
        think_s=think_s,
        gap_s=gap_s,
        blocks=blocks if blocks.ids else None,
        restarts=restarts,
    )
