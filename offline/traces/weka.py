"""WEKA's traces of coding agents: sessions whose requests follow each other, with the client's pauses.

Block ids are valid inside one session only. Nested sub-agents are left out: they run beside their session, and only the
session's clock says when they began, which a replay does not keep.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from .prefixes import added_tokens, shared_tokens
from .rows import Count, Rows, Tokens
from .turns import Blocks, RecordedPrompt, TracedConversation, TracedTurn, fresh_turn, runs_of

_SUBAGENT = "subagent"


class _Request(msgspec.Struct):
    type: str = "n"
    tokens: Count = msgspec.field(name="in", default=0)
    out: Count = 0
    think_time: float | None = None
    hash_ids: list[int] = []
    hash_ids_rle: list[tuple[int, Count]] = []  # (first id, how many), in the file of sessions

    def blocks(self) -> tuple[int, ...]:
        return tuple(self.hash_ids or [first + at for first, count in self.hash_ids_rle for at in range(count)])

    def recorded(self, session: _Session) -> RecordedPrompt | None:
        runs = runs_of(self.hash_ids) if self.hash_ids else tuple(self.hash_ids_rle)
        return RecordedPrompt(max(1, self.tokens), runs, session.block_size, session.id) if runs else None


class _Session(msgspec.Struct):
    id: str
    requests: list[_Request]
    block_size: Tokens = 64


def read_weka(rows: Rows) -> list[TracedConversation]:
    return [TracedConversation(session.id, None, _turns(session)) for _, session in rows.json(_Session)]


def _turns(session: _Session) -> tuple[TracedTurn, ...]:
    turns: list[TracedTurn] = []
    before, held = _Request(), tuple[int, ...]()
    for request in session.requests:
        if request.type == _SUBAGENT:
            continue
        think_s = max(0.0, request.think_time or 0.0) if turns else 0.0
        blocks = request.blocks()
        shared = shared_tokens(held, blocks, session.block_size, before.tokens)
        new = added_tokens(shared, before.tokens, before.out, request.tokens) if turns else None
        if new is None:
            prompt = Blocks(blocks, session.block_size, session.id)
            turn = fresh_turn(request.tokens, request.out, prompt, think_s=think_s, restarts=bool(turns))
        else:
            turn = TracedTurn(new_tokens=new, output_tokens=max(1, request.out), think_s=think_s)
        turns.append(replace(turn, prompt=request.recorded(session)))
        before, held = request, blocks
    return tuple(turns)
