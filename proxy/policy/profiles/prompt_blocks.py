"""A prompt in blocks of so many bytes, known by the chain of its units.

A block is named by the first unit that ends with it or after it, and by its place. So equal names mean equal prefixes,
and two prompts that part inside of a unit have no block in common from that unit's first on: less than is there, never
more. Names lie on the units' ends, so a prompt has no more than it has units, however small its blocks are.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

BYTES_PER_TOKEN = 4  # as llm-d takes it where no tokenizer counts
LEAST_KEPT = 6  # blocks between names that longer prompts keep: so an index of the smallest messages stays small


class BlockRule(msgspec.Struct, frozen=True):
    """How prompts are cut."""

    block_tokens: int
    most_blocks: int  # of a prompt; what follows is not looked at

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * BYTES_PER_TOKEN


class PromptBlocks(msgspec.Struct, frozen=True, gc=False):
    """The names of one prompt's blocks, shortest prefix first."""

    keys: Sequence[int] = ()
    ends: Sequence[int] = ()  # whole blocks up to there
    kept: Sequence[int] = ()  # places of those that each longer prompt has too
    share: float = 0.0  # of the prompt in each of its blocks

    @property
    def count(self) -> int:
        return self.ends[-1] if self.ends else 0


NO_BLOCKS = PromptBlocks()


def blocks_of(keys: Sequence[int], ends: Sequence[int], size: int, rule: BlockRule) -> PromptBlocks:
    """keys: of a prompt's chain; ends: in bytes, as `size`, which is all of the prompt."""
    block_bytes, most = rule.block_bytes, rule.most_blocks
    named, blocks, kept = list[int](), list[int](), list[int]()
    last = last_kept = 0
    for key, end in zip(keys, ends, strict=True):
        count = min(end // block_bytes, most)
        if count <= last:
            continue
        named.append(key)
        blocks.append(count)
        if count - last_kept >= LEAST_KEPT:
            kept.append(len(named) - 1)
            last_kept = count
        last = count
        if count == most:
            break
    return PromptBlocks(named, blocks, kept, block_bytes / size if size else 0.0)
