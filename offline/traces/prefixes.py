"""Which request continues which, by the ids of their prompts' blocks, and how much of its prompt is new."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_BLOCKS = 2
"""Fewer complete blocks are a system prompt that many conversations begin with, not a history."""

KEPT_SHARE = 0.5
"""A prompt that keeps less of the one before has been compacted, or is another conversation's."""


class PrefixTree:
    """Requests by the complete blocks of their prompts."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}  # (node, block id) -> node; the root is 0
        self._requests: dict[int, int] = {}  # node -> the latest request whose complete blocks end there

    def add(self, request: int, complete: Sequence[int]) -> None:
        node = 0
        for block in complete:
            node = self._children.setdefault((node, block), len(self._children) + 1)
        if len(complete) >= LEAST_BLOCKS:
            self._requests[node] = request

    def parent(self, blocks: Sequence[int]) -> int | None:
        """The request whose complete blocks are the longest prefix of `blocks`; of equal ones the latest."""
        node, found = 0, None
        for block in blocks:
            step = self._children.get((node, block))
            if step is None:
                break
            node = step
            found = self._requests.get(node, found)
        return found


def shared_tokens(before: Sequence[int], blocks: Sequence[int], block_tokens: int, before_tokens: int) -> int:
    """How many tokens of the prompt before this one begins with.

    before, blocks: block ids of the two prompts. Where all complete blocks are shared, the rest of the last block
    counts as shared too: its id changes with what follows it.
    """
    complete = min(before_tokens // block_tokens, len(before))
    same = next((at for at in range(min(complete, len(blocks))) if before[at] != blocks[at]), None)
    if same is None and len(blocks) >= complete:
        return before_tokens
    return block_tokens * (len(blocks) if same is None else same)


def added_tokens(shared: int, before_tokens: int, before_output: int, tokens: int) -> int | None:
    """Tokens that a turn adds after the answer before it, at least one; None where its prompt is not a continuation.

    History that the client rewrote counts as added, because it has to be computed again.
    """
    if shared < KEPT_SHARE * before_tokens or tokens < KEPT_SHARE * before_tokens:
        return None
    return max(1, tokens - shared - before_output)
