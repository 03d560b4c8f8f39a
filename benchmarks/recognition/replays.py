"""Recorded sessions as requests. The traces hold hashes of blocks, no text: each block becomes words of its own.

- `weka`: sessions of Claude Code (blocks of 64 tokens, known within a session).
- `mooncake`: conversations of Kimi (blocks of 512 tokens, known everywhere; sessions as the data's authors infer them).

A request goes on from that earlier one of its session with which it shares most blocks. The blocks after those are the
answer that it repeats, as long as that one's output was, and the new message. Where it shares less than all of the
earlier one (histories that were compacted, cut or edited), the message that it leaves in the middle has another end.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import shake_128
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from .requests import Asked, said

LONGEST_TOKENS = 256_000  # of a prompt: more than most engines are started for
LONGEST_THINK_S = 60.0
_SINGLE = 20  # most conversations of mooncake are a single request, so that many stand for one session
_RELATED = 8  # earlier requests of a session that may be gone on from

_LETTERS = bytes(ord("a") + code % 26 for code in range(256))

Blocks = Sequence[int]


class TracedRequest(msgspec.Struct, kw_only=True):
    blocks: Blocks
    output_blocks: int
    think_s: float = 0.0


def weka(data: Path, *, scale: int, limit: int, seed: int) -> Iterator[Iterator[Asked]]:
    known = _lines(data / "weka-agentic-coding" / "sessions.jsonl.gz")
    sessions = [one for one in known if _longest(one) <= LONGEST_TOKENS]
    Random(seed).shuffle(sessions)
    for session in sessions[:limit]:
        size = session["block_size"]
        head = round((session["tool_tokens"] + session["system_tokens"]) / size)
        traced = [
            TracedRequest(
                blocks=[first + at for first, count in one["hash_ids_rle"] for at in range(count)],
                output_blocks=round(one["out"] / size),
                think_s=min(LONGEST_THINK_S, one.get("think_time") or 0.0),
            )
            for one in session["requests"]
            if one["type"] != "subagent" and one["hash_ids_rle"]
        ]
        yield requests(traced, head, Text(size // scale, session["id"]))


def _longest(session: Mapping[str, Any]) -> int:
    return max(one.get("in") or 0 for one in session["requests"])


def mooncake(data: Path, *, scale: int, limit: int, seed: int) -> Iterator[Iterator[Asked]]:
    """In the order of the trace, whatever the seed."""
    folder = data / "mooncake-conversation"
    rows = _lines(folder / "trace.jsonl.gz")
    by_session: dict[str, list[int]] = {}
    with gzip.open(folder / "inferred_sessions.csv.gz", "rt") as listed:
        for line in csv.DictReader(listed):
            by_session.setdefault(line["session"], []).append(int(line["row"]))
    size, text = 512, Text(512 // scale, "mooncake")
    for numbers in list(by_session.values())[: limit * _SINGLE]:
        traced, before_ms = list[TracedRequest](), rows[numbers[0]]["timestamp"]
        for row in (rows[number] for number in numbers):
            think_s = min(LONGEST_THINK_S, (row["timestamp"] - before_ms) / 1000)
            full = max(1, row["input_length"] // size)  # the last block of a prompt grows, and gets another hash
            output_blocks = round(row["output_length"] / size)
            traced.append(TracedRequest(blocks=row["hash_ids"][:full], output_blocks=output_blocks, think_s=think_s))
            before_ms = row["timestamp"]
        yield requests(traced, 1, text)


REPLAYS: Mapping[str, Callable[..., Iterator[Iterator[Asked]]]] = {"weka": weka, "mooncake": mooncake}


class Text:
    """The words of a run of blocks; the words of one block depend on its number alone."""

    def __init__(self, tokens: int, name: str) -> None:
        self._tokens = tokens
        self._name = name
        self._of = lru_cache(maxsize=65_536)(self._words)

    def __call__(self, blocks: Iterable[int]) -> str:
        return "".join(map(self._of, blocks))

    def _words(self, block: int) -> str:
        digest = shake_128(f"{self._name} {block}".encode()).digest(4 * self._tokens)
        letters = digest.translate(_LETTERS).decode()
        return "".join([" " + letters[at : at + 4] for at in range(0, len(letters), 4)])


class History(msgspec.Struct, kw_only=True):
    """One request's messages, each with the blocks that it is made of."""

    blocks: Blocks
    parts: list[tuple[str, Blocks]]  # role and blocks
    follows: bool = False
    reply: Blocks = ()


def requests(traced: Sequence[TracedRequest], head: int, text: Text) -> Iterator[Asked]:
    """head: blocks of tools and system, before the first message."""
    histories = _histories(traced, head)
    for number, (one, history) in enumerate(zip(traced, histories, strict=True)):
        messages = [said(role, text(blocks)) for role, blocks in history.parts]
        # What no later request repeats is a text of its own.
        reply = text(history.reply) if history.reply else text(range(-number - 2, -number - 1))
        yield Asked(
            messages=messages,
            reply=said("assistant", reply),
            think_s=one.think_s,
            follows=history.follows,
        )


def _histories(traced: Sequence[TracedRequest], head: int) -> list[History]:
    histories = list[History]()
    for one in traced:
        latest = range(max(0, len(histories) - _RELATED), len(histories))
        related = [(_common(one.blocks, histories[at].blocks), at) for at in latest]
        shared, at = max(related, default=(0, -1))
        if not shared:
            parts = [("system", one.blocks[:head]), ("user", one.blocks[head:])]
            histories.append(History(blocks=one.blocks, parts=[part for part in parts if part[1]]))
            continue
        parent = histories[at]
        if shared < len(parent.blocks):
            parts = _cut(parent, one.blocks, shared)
        else:
            parts = _grown(parent, one.blocks, traced[at].output_blocks)
        histories.append(History(blocks=one.blocks, parts=parts, follows=shared > head))
    return histories


def _grown(parent: History, blocks: Blocks, output_blocks: int) -> list[tuple[str, Blocks]]:
    """All of the parent's messages, its reply, and a message of what is left."""
    start = len(parent.blocks)
    reply = blocks[start : start + output_blocks]
    if not parent.reply:
        parent.reply = reply
    elif list(parent.reply) != list(reply):  # another request has gone on from it with another answer
        reply = ()
    said_after = [("assistant", reply)] if reply else []
    return [*parent.parts, *said_after, ("user", blocks[start + len(reply) :])]


def _cut(parent: History, blocks: Blocks, shared: int) -> list[tuple[str, Blocks]]:
    parts, end = list[tuple[str, Blocks]](), 0
    for role, own in parent.parts:
        if end + len(own) > shared:
            parts.append((role, blocks[end : end + len(own)] if role == "system" else blocks[end:]))
            end += len(parts[-1][1])
            break
        parts.append((role, own))
        end += len(own)
    return [*parts, ("user", blocks[end:])] if end < len(blocks) else parts


def _common(one: Blocks, other: Blocks) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:  # the first `low` are equal
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@lru_cache
def _lines(path: Path) -> list[Any]:
    with gzip.open(path) as file:
        return [json.loads(line) for line in file]
