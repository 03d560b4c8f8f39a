"""The traces, by name: recorded sessions, and made-up ones of one shape.

- `weka-32k`, `weka-64k`, `weka-128k`: coding agents, each session up to where its context outgrows that.
- `mooncake`: conversations of one hour of Kimi, which share their beginnings.
- `chats`: MT-Bench-101, dialogues of few and short turns. Users read and type for as long as made-up pauses say.
- `mix`: as many sessions of each of `weka-32k`, `mooncake` and `chats`.
- `m512-8k`: sessions of made-up turns that add 512 tokens, beginning at a context of 8,000.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from random import Random

from ppd.offline.simulation.traced_prompts import TracedPrompts, traced_prompts
from ppd.offline.traces.formats import read
from ppd.offline.traces.turns import TracedConversation, TracedTurn
from ppd.proxy.errors import ConfigError

WEKA = Path("weka-agentic-coding/sessions.jsonl.gz")
MOONCAKE = Path("mooncake-conversation/trace.jsonl.gz")
CHATS = Path("mt-bench-101/conversations.jsonl.gz")

LONGEST_PAUSE_S = 60.0  # longer ones are cut: else most of a run would be warm-up
READING_S = 10.0  # mean of a user's pauses, where the data has none
MIXED = 200  # sessions of each kind in the mix
SHAPED = re.compile(r"m(\d+)-(\d+)k")
SHAPED_SESSIONS, SHAPED_TURNS, SHAPED_OUTPUT = 64, 4, 128

TRACES: tuple[str, ...] = ("weka-32k", "weka-64k", "weka-128k", "mooncake", "chats", "mix")
SHAPES = tuple(f"m{new}-{context}k" for new in (128, 512, 1024, 4096) for context in (1, 8, 32, 100))


@lru_cache(maxsize=8)
def load(name: str, data: Path) -> TracedPrompts:
    """ConfigError for a name that is none of these."""
    if shape := SHAPED.fullmatch(name):
        return shaped(int(shape[1]), int(shape[2]) * 1000)
    if name not in _READERS:
        raise ConfigError(f"trace = {name!r}: must be {', '.join(TRACES)}, or as {SHAPES[0]}", param="trace")
    return _READERS[name](data)


def shaped(new_tokens: int, context_tokens: int) -> TracedPrompts:
    later = [
        TracedTurn(new_tokens=new_tokens, output_tokens=SHAPED_OUTPUT, think_s=READING_S)
        for _ in range(SHAPED_TURNS - 1)
    ]
    first = TracedTurn(new_tokens=context_tokens, output_tokens=SHAPED_OUTPUT)
    return traced_prompts([TracedConversation(str(at), None, (first, *later)) for at in range(SHAPED_SESSIONS)])


def _weka(limit_k: int) -> Callable[[Path], TracedPrompts]:
    return lambda data: _made(_file(data, WEKA), limit_k * 1024)


def _mooncake(data: Path) -> TracedPrompts:
    return _made(_file(data, MOONCAKE), None)


def _chats(data: Path) -> TracedPrompts:
    return _made(_chatting(data), None)


def _mix(data: Path) -> TracedPrompts:
    limit = 32 * 1024
    agents = [one for one in _file(data, WEKA) if _first_tokens(one) <= limit]
    random, kinds = Random("mix"), (agents, _file(data, MOONCAKE), _chatting(data))
    drawn = [one for kind in kinds for one in random.sample(list(kind), min(MIXED, len(kind)))]
    return _made([replace(one, arrival_s=None) for one in drawn], limit)


_READERS: Mapping[str, Callable[[Path], TracedPrompts]] = {
    "weka-32k": _weka(32),
    "weka-64k": _weka(64),
    "weka-128k": _weka(128),
    "mooncake": _mooncake,
    "chats": _chats,
    "mix": _mix,
}


@lru_cache(maxsize=3)
def _file(data: Path, name: Path) -> Sequence[TracedConversation]:
    return read(data / name)


def _made(conversations: Sequence[TracedConversation], most_tokens: int | None) -> TracedPrompts:
    return traced_prompts(conversations, most_tokens=most_tokens, most_pause_s=LONGEST_PAUSE_S)


def _chatting(data: Path) -> Sequence[TracedConversation]:
    random = Random("reading")
    return [
        replace(
            one,
            turns=(one.turns[0], *(replace(turn, think_s=random.expovariate(1 / READING_S)) for turn in one.turns[1:])),
        )
        for one in _file(data, CHATS)
    ]


def _first_tokens(one: TracedConversation) -> int:
    prompt = one.turns[0].prompt
    return one.turns[0].new_tokens or 0 if prompt is None else prompt.tokens
