"""Draws the units of a vocabulary that a prompt consists of.

Each draw is a hash of its place, so any part can be drawn alone. Equal blocks draw equal units, in whatever
conversation they are; everything else is drawn for its conversation and turn only. The hash is the finaliser of
SplitMix64 (Steele et al., 2014).
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from ..traces.turns import TracedTurn

Draws = NDArray[np.int64]
_Words = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCKS, _OWN = 1, 2  # two streams that never overlap


def draw(turn: TracedTurn, place: tuple[int, int], *, seed: int, count: int, choices: int) -> Draws:
    """`count` numbers below `choices` for the text of a turn.

    place: number of the conversation, index of the turn. seed: of the run; runs with other seeds share no text.
    """
    blocks = turn.blocks
    shared = min(count, len(blocks.ids) * blocks.tokens) if blocks else 0
    parts: list[_Words] = []
    if blocks and shared:
        key = _key(seed, _BLOCKS, zlib.crc32(blocks.scope.encode()))
        held = np.asarray(blocks.ids[: -(-shared // blocks.tokens)], dtype=np.uint64)
        streams = np.repeat(_mixed(held ^ key), blocks.tokens)
        inside = np.tile(np.arange(blocks.tokens, dtype=np.uint64), len(held))
        parts.append((streams + inside * _GOLDEN)[:shared])
    if shared < count:
        parts.append(_key(seed, _OWN, *place) + np.arange(count - shared, dtype=np.uint64) * _GOLDEN)
    if not parts:
        return np.zeros(0, dtype=np.int64)
    return (_mixed(np.concatenate(parts)) % np.uint64(choices)).astype(np.int64)


def _key(seed: int, *parts: int) -> _Words:
    key = _mixed(np.asarray([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))
    for part in parts:
        key = _mixed(key ^ np.asarray([part], dtype=np.uint64))
    return key


def _mixed(words: _Words) -> _Words:
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
