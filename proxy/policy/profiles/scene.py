"""One turn as plugins see it: what workers hold of it, where its session was, and its draws, which are always the same.

What plugins remember of earlier turns is in `Memory`, which changes between decisions only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Protocol

from ...beliefs.held import BeliefEvidence, Held
from ...fleet.view import WorkerView
from ...fleet.worker import Role, WorkerId
from .prefix_index import PrefixIndex
from .prompt_blocks import BlockRule, PromptBlocks


class AskedTurn(Protocol):
    """What plugins read of a turn."""

    @property
    def session_id(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def blocks(self) -> PromptBlocks: ...
    @property
    def held(self) -> Mapping[WorkerId, Held]: ...
    @property
    def decode(self) -> WorkerId | None: ...
    @property
    def affinity(self) -> WorkerId | None: ...
    def held_by(self, view: WorkerView) -> int: ...


class Memory:
    """What plugins remember of the turns before; each of the proxy's processes has its own."""

    def __init__(self, rule: BlockRule | None = None, capacity: int = 0, cold_kept: int = 0) -> None:
        """rule, capacity: of an index of what was sent; None: there is none. cold_kept: workers that are remembered."""
        self.rule = rule
        self.index = None if rule is None else PrefixIndex(capacity)
        self._cold_kept = cold_kept
        self.cold: OrderedDict[WorkerId, None] = OrderedDict()  # that got turns which nobody knew; the oldest first

    def is_cold(self, turn: AskedTurn) -> bool:
        """Whether no worker holds anything of the prompt."""
        if self.index is not None:
            return not self.index.is_known(turn.blocks)
        return not any(held.tokens for held in turn.held.values())

    def sent(self, turn: AskedTurn, views: Iterable[WorkerView]) -> None:
        """A turn goes to these workers."""
        views = tuple(views)
        if self._cold_kept and self.is_cold(turn):
            for view in views:
                self.cold[view.id] = None
                self.cold.move_to_end(view.id)
            while len(self.cold) > self._cold_kept:
                self.cold.popitem(last=False)
        if self.index is not None:
            for view in views:
                self.index.sent(turn.blocks, view)


class Scene:
    def __init__(self, turn: AskedTurn, memory: Memory) -> None:
        self.turn = turn
        self.memory = memory
        self._draws = b""

    def matched_tokens(self, view: WorkerView) -> int:
        """Of the prompt, that the worker is taken to hold: by the index of what was sent, else as it is believed."""
        index, turn = self.memory.index, self.turn
        if index is None:
            return turn.held_by(view)
        return round(index.matched(turn.blocks, (view,))[0] * turn.blocks.share * turn.prompt_tokens)

    def matched_shares(self, views: Sequence[WorkerView]) -> list[float]:
        """Of what is looked at of the prompt, by each of them."""
        index, turn = self.memory.index, self.turn
        if index is None:
            whole = max(1, turn.prompt_tokens)
            return [turn.held_by(view) / whole for view in views]
        whole = max(1, turn.blocks.count)
        return [matched / whole for matched in index.matched(turn.blocks, views)]

    def pinned(self, views: Sequence[WorkerView]) -> WorkerView | None:
        """Where the session's last turn was; of P, the one that holds most of the session."""
        turn = self.turn
        last = turn.decode or turn.affinity
        best, most = None, 0
        for view in views:
            if view.id == last:
                return view
            held = turn.held.get(view.id)
            if view.role is Role.PREFILL and held is not None and held.evidence is not BeliefEvidence.SHARED_PREFIX:
                best, most = (view, held.tokens) if held.tokens > most else (best, most)
        return best

    def draw(self, number: int) -> float:
        """At random below 1, and the same for a turn whenever it is decided. number: which of its draws, below 8."""
        if not self._draws:
            self._draws = sha256(f"{self.turn.session_id} {self.turn.number}".encode()).digest()
        return int.from_bytes(self._draws[4 * number : 4 * number + 4]) / 2**32
