"""Requests with the ids of their prompts' blocks but without sessions: the traces of Mooncake and Qwen-Bailian.

Mooncake (`timestamp` in ms, blocks of 512 tokens) does not say who sent a request. A request continues the earlier one
whose complete blocks are the longest prefix of its own. Bailian (`timestamp` in s, blocks of 16) names each request's
parent. A second request that continues the same one begins a new conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from .prefixes import PrefixTree, added_tokens, shared_tokens
from .rows import Count, Rows, Seconds
from .turns import Blocks, RecordedPrompt, TracedConversation, TracedTurn, fresh_turn, runs_of

MOONCAKE_BLOCK = 512
BAILIAN_BLOCK = 16


class _Request(msgspec.Struct):
    timestamp: Seconds  # milliseconds in Mooncake's
    input_length: Count
    output_length: Count
    hash_ids: list[int] = []


class _Bailian(_Request, kw_only=True):
    chat_id: int | str
    parent_chat_id: int | str = -1


R = TypeVar("R", bound=_Request)


@dataclass(slots=True)
class _Growing:
    """`newest`: number of its last request."""

    name: str
    arrival_s: float
    newest: int
    turns: list[TracedTurn] = field(default_factory=list)


def read_mooncake(rows: Rows) -> list[TracedConversation]:
    requests = _in_order(request for _, request in rows.json(_Request))
    tree = PrefixTree()
    parents: list[int | None] = []
    for number, request in enumerate(requests):
        parents.append(tree.parent(request.hash_ids))
        tree.add(number, request.hash_ids[: request.input_length // MOONCAKE_BLOCK])
    times_s = [request.timestamp / 1000 for request in requests]
    return _linked(requests, parents, times_s, MOONCAKE_BLOCK)


def read_bailian(rows: Rows) -> list[TracedConversation]:
    requests = _in_order(request for _, request in rows.json(_Bailian))
    numbers = {request.chat_id: number for number, request in enumerate(requests)}
    found = [numbers.get(request.parent_chat_id) for request in requests]
    parents = [parent if parent is not None and parent < number else None for number, parent in enumerate(found)]
    return _linked(requests, parents, [request.timestamp for request in requests], BAILIAN_BLOCK)


def _in_order(requests: Iterable[R]) -> list[R]:
    return sorted(requests, key=lambda request: request.timestamp)


def _linked(
    requests: Sequence[_Request], parents: Sequence[int | None], times_s: Sequence[float], block_tokens: int
) -> list[TracedConversation]:
    """`parents`: for each request the earlier one that it continues."""
    growing: list[_Growing] = []
    of: dict[int, _Growing] = {}
    for number, request in enumerate(requests):
        parent = parents[number]
        conversation = None if parent is None else of[parent]
        if parent is None or conversation is None or conversation.newest != parent:
            conversation = _Growing(str(number), times_s[number], number)
            growing.append(conversation)
            blocks = Blocks(tuple(request.hash_ids), block_tokens)
            turn = fresh_turn(request.input_length, request.output_length, blocks)
        else:
            turn = _later(requests[parent], request, block_tokens, times_s[number] - times_s[parent])
        conversation.turns.append(replace(turn, prompt=_recorded(request, block_tokens)))
        conversation.newest = number
        of[number] = conversation
    return [TracedConversation(one.name, one.arrival_s, tuple(one.turns)) for one in growing]


def _recorded(request: _Request, block_tokens: int) -> RecordedPrompt | None:
    runs = runs_of(request.hash_ids)
    return RecordedPrompt(max(1, request.input_length), runs, block_tokens) if runs else None


def _later(before: _Request, request: _Request, block_tokens: int, gap_s: float) -> TracedTurn:
    shared = before.input_length  # without blocks only the trace's `parent` is known
    if before.hash_ids and request.hash_ids:
        shared = shared_tokens(before.hash_ids, request.hash_ids, block_tokens, before.input_length)
    new = added_tokens(shared, before.input_length, before.output_length, request.input_length)
    if new is None:
        blocks = Blocks(tuple(request.hash_ids), block_tokens)
        return fresh_turn(request.input_length, request.output_length, blocks, gap_s=gap_s, restarts=True)
    return TracedTurn(new_tokens=new, output_tokens=max(1, request.output_length), gap_s=gap_s)
