"""The head of a prompt, tools and the system's text, hashed so that either may be the first.

Some chat templates render the tools first (GLM, Kimi), others the system's text (Qwen, Llama). What two prompts have in
common depends on that, and the order is learned while sessions live (`templates`). So a tool's digest depends on the
tools before it only, and is joined by XOR to the key of what is rendered before the tools: the seed, or the system's
text. The last key of the head is then the same in both orders, and so are all keys after it: conversations outlive a
change of the order. 20,000 tools that many requests have are hashed once.

What follows the head is hashed as if there were none, and the head's key is joined to each key of it in the same way
(`Chain.head_mask`). So a conversation is found again when its head has changed.

XOR keeps keys apart, as all its operands are digests of different kinds under a secret, and no client sees any of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from .hasher import NO_UNITS, Units
from .prefix_chain import Chain, Marks
from .text_cuts import Cut


class Head(msgspec.Struct, frozen=True, gc=False):
    """What is known of a prompt before its system's text and its messages are read."""

    seed: int
    size: int = 0  # bytes of what the seed holds and the template renders
    tools: Units = NO_UNITS
    tools_first: bool | None = None  # see `Marks`

    def chain(self, system: tuple[int, int] | None) -> tuple[list[int], list[int], int]:
        """Keys and ends from the seed to the head's end, and the bytes up to there.

        system: key, chained to the seed, and bytes of the system's text; None: there is none.
        """
        seed, size, tools = self.seed, self.size, self.tools
        keys, ends = [seed], [0]
        if system is None and not tools.keys:
            return keys, ends, size
        if system is None or (self.tools_first and tools.keys):
            keys += map(seed.__xor__, tools.keys)
            ends += map(size.__add__, tools.ends)
            if system is not None:
                key, text_size = system
                keys.append(key ^ tools.keys[-1])
                ends.append(ends[-1] + text_size)
        else:
            key, text_size = system
            size += text_size
            keys.append(key)
            ends.append(size)
            keys += map(key.__xor__, tools.keys)
            ends += map(size.__add__, tools.ends)
        return keys, ends, ends[-1]

    def marks(
        self,
        first_user: int = 0,
        last_user: int = 0,
        last_reply: int = 0,
        *,
        has_system: bool,
        reasons: bool = False,
    ) -> Marks:
        """Of a prompt with this head, and with these messages where they are known."""
        tools, first = len(self.tools.keys), self.tools_first
        system = 0
        if has_system:
            tools, system = (tools, tools + 1) if first and tools else (tools + 1 if tools else 0, 1)
        return Marks(tools, system, first_user, last_user, last_reply, reasons, first)


class CommonHead(NamedTuple):
    """Bytes from the start on that two heads have in common, in each order."""

    tools_first: int
    system_first: int


def common_head(chain: Chain, points: Sequence[Cut]) -> CommonHead:
    """Of a prompt's head and another one. points: keys inside of the other one and at its end, in either order.

    All keys of the other one after its first part have the key of that in them, by XOR. It is this prompt's own, or
    what the last key has beside this prompt's other part.
    """
    tools, system = _parts(chain)
    known, seed, end = {key for key, _ in points}, chain.keys[0], points[-1][0]
    tools_end, system_end = (part[-1][0] if part else seed for part in (tools, system))
    of_tools, tools_after = _reached(tools, 0, known), _reached(tools, seed ^ system_end, known)
    of_system, system_after = _reached(system, 0, known), _reached(system, seed ^ tools_end, known)
    is_before_tools, is_before_text = (end ^ key ^ seed in known for key in (tools_end, system_end))  # something else
    if tools:
        same_tools = system_after > 0 or is_before_tools
    else:
        same_tools = end == system_end or not (system_end in known or is_before_text)
    if system:
        same_system = tools_after > 0 or is_before_text
    else:
        same_system = end == tools_end or not (tools_end in known or is_before_tools)
    of_tools = tools[-1][1] if tools and same_tools else max(of_tools, tools_after)
    of_system = system[-1][1] if system and same_system else max(of_system, system_after)
    return CommonHead(of_tools + of_system * same_tools, of_system + of_tools * same_system)


def _parts(chain: Chain) -> tuple[list[Cut], list[Cut]]:
    """The tools, and the system's text with its cuts, as if each were the whole head."""
    keys, ends, tools, system = chain.keys, chain.ends, chain.marks.tools, chain.marks.system
    before_tools, before_system = system if system < tools else 0, tools if tools < system else 0
    change, start = keys[0] ^ keys[before_tools], ends[before_tools]
    of_tools = [(keys[at] ^ change, ends[at] - start) for at in range(before_tools + 1, tools + 1)]
    if not system:
        return of_tools, []
    change, start, end = keys[0] ^ keys[before_system], ends[before_system], ends[system]
    cuts = [] if chain.long_texts is None else [cut for cut in chain.long_texts.known if start < cut[1] < end]
    return of_tools, [(key ^ change, at - start) for key, at in (*cuts, (keys[system], end))]


def _reached(part: Sequence[Cut], change: int, known: Collection[int]) -> int:
    return next((size for key, size in reversed(part) if key ^ change in known), 0)
