"""What was sent to each server, as llm-d remembers it: blocks of prompts, the least recently used out.

It hears of no answer, no eviction and no other router, so it is worse than the proxy's own beliefs (`beliefs`); it is
here for those who move from llm-d and want its decisions first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ...fleet.view import WorkerView
from ...fleet.worker import WorkerId
from .prompt_blocks import PromptBlocks

MOST_SERVERS = 4096


class ServerBlocks:
    """Of one server, at most `capacity` blocks.

    What is used moves to the newer half; when that is full, the older one is dropped whole. A prompt is used from its
    start on, so what is there of it has no gaps.
    """

    __slots__ = ("_blocks", "_capacity", "_newer", "_older", "incarnation")

    def __init__(self, incarnation: str, capacity: int) -> None:
        self.incarnation = incarnation
        self._capacity = capacity
        self._newer: dict[int, None] = {}
        self._older: dict[int, None] = {}
        self._blocks = 0  # in the newer half

    def use(self, prompt: PromptBlocks) -> None:
        newer, before, room = self._newer, 0, max(1, self._capacity // 2)
        if self._blocks + self._new(prompt) > room:
            self._older, self._newer, self._blocks = newer, {}, 0
            newer = self._newer
        last = len(prompt.keys) - 1
        for at in (*prompt.kept, *(() if prompt.kept and prompt.kept[-1] == last else (last,))):
            if (end := prompt.ends[at]) > room:
                break
            key = prompt.keys[at]
            if key not in newer:
                newer[key] = None
                self._blocks += end - before
            before = end

    def _new(self, prompt: PromptBlocks) -> int:
        """Blocks of the prompt that are not in the newer half; those that are there lie at its start."""
        newer = self._newer
        there = bisect_left(prompt.kept, True, key=lambda at: prompt.keys[at] not in newer)
        return prompt.count - (prompt.ends[prompt.kept[there - 1]] if there else 0)

    def matched(self, prompt: PromptBlocks) -> int:
        """Blocks at the prompt's start that are there."""
        keys, kept, newer, older = prompt.keys, prompt.kept, self._newer, self._older
        if not keys or (kept and not kept[0] and keys[0] not in newer and keys[0] not in older):
            return 0  # nearly always so, as a prompt is known by few servers
        low, high = 0, len(kept)
        while low < high:  # not `bisect`, as this is asked of every server
            middle = (low + high) // 2
            key = keys[kept[middle]]
            if key in newer or key in older:
                low = middle + 1
            else:
                high = middle
        begin = kept[low - 1] if low else -1
        for at in range((kept[low] if low < len(kept) else len(keys)) - 1, begin, -1):
            if keys[at] in newer or keys[at] in older:  # an earlier prompt ended there
                return prompt.ends[at]
        return prompt.ends[begin] if low else 0


class PrefixIndex:
    def __init__(self, capacity: int) -> None:
        """capacity: blocks of a server."""
        self._capacity = capacity
        self._servers: dict[WorkerId, ServerBlocks] = {}  # the longest unused first

    def matched(self, prompt: PromptBlocks, views: Sequence[WorkerView]) -> list[int]:
        """Blocks at the prompt's start, for each view."""
        servers, found = self._servers, list[int]()
        for view in views:
            server = servers.get(view.worker.address)  # type: ignore[call-overload]  # as `view.id`, without its call
            if server is None or server.incarnation != view.incarnation:
                found.append(0)
            else:
                found.append(server.matched(prompt))
        return found

    def is_known(self, prompt: PromptBlocks) -> bool:
        """Whether any server has the prompt's beginning."""
        return any(server.matched(prompt) for server in self._servers.values()) if prompt.keys else False

    def sent(self, prompt: PromptBlocks, view: WorkerView) -> None:
        server = self._servers.pop(view.id, None)
        if server is None or server.incarnation != view.incarnation:  # another engine: its cache is empty
            server = ServerBlocks(view.incarnation, self._capacity)
        if len(self._servers) >= MOST_SERVERS:
            del self._servers[next(iter(self._servers))]
        self._servers[view.id] = server
        if prompt.keys:
            server.use(prompt)
