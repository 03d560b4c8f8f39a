"""Words for texts of exact token counts: each word is one token wherever it stands."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ppd.proxy.errors import ConfigError

from ..traces.turns import Message
from .server_tokenizer import Tokenizer

ORDINARY_IDS = tuple(range(1000, 2000))
"""Ids that are plain text in every vocabulary of some size, for endpoints that encode nothing for others."""

_OPENING = "So"  # templates strip the space before a text's first word, which may change its tokens
_LETTERS = "bcdfghjklmnpqrstvwxz"
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body back parent face level office door
health person art war history party result change morning reason research girl guy moment air teacher force education
foot boy age policy music market sense nation plan college interest death experience effect use class control field
care role effort rate heart drug show leader light voice wife police mind price report decision son view relationship
town road arm difference value building action season society tax director position player record paper space ground
form event official matter center couple site project activity star table need court oil situation cost industry figure
street image phone data picture practice piece land product doctor wall news test movie north love step garden river
"""
_WORDS = tuple(dict.fromkeys(_TEXT.split()))
_FEWEST = 32
_CHUNK = 8


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`units` follow the opening without anything between them."""

    units: tuple[str, ...]
    head: int  # tokens before a conversation's first unit: the template's, and the opening
    first_overhead: int  # tokens of the first prompt beside the units: the head, and the template's end
    later_overhead: int  # the same of a later turn
    opening: str = _OPENING


async def learn_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """ConfigError where the model has too few words of one token, or the chat template depends on the text."""
    units = await _units(tokenizer)
    short, long, answer = _sample(units, 0, 40), _sample(units, 1, 160), _sample(units, 2, 8)
    first, other = await tokenizer.render([short]), await tokenizer.render([long])
    if len(first) - 40 != len(other) - 160:
        raise ConfigError("what the chat template adds depends on the text")
    head = next(at for at, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1])
    second = await tokenizer.render([short, Message("assistant", answer.content), short])
    later = len(second) - len(first) - len(await tokenizer.encode(answer.content)) - 40
    return Vocabulary(units, head, len(first) - 40, later)


async def learn_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = sorted(set(await tokenizer.encode(" ".join(_WORDS))))
    return tuple(ids) or ORDINARY_IDS


async def _units(tokenizer: Tokenizer) -> tuple[str, ...]:
    opening = len(await tokenizer.encode(_OPENING))
    letters = tuple(_LETTERS)
    if await _adds_up(tokenizer, letters, opening):
        return letters
    words = [f" {word}" for word in _WORDS]
    chunks = [words[at : at + _CHUNK] for at in range(0, len(words), _CHUNK)]
    try:
        async with asyncio.TaskGroup() as group:
            found = [group.create_task(_single(tokenizer, chunk, opening)) for chunk in chunks]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    units = tuple(unit for task in found for unit in task.result())
    if len(units) < _FEWEST:
        raise ConfigError(f"of {len(words)} common words only {len(units)} are single tokens of this model")
    return units


async def _single(tokenizer: Tokenizer, words: Sequence[str], opening: int) -> list[str]:
    if await _adds_up(tokenizer, words, opening):
        return [*words]
    if len(words) == 1:
        return []
    half = len(words) // 2
    return [
        *await _single(tokenizer, words[:half], opening),
        *await _single(tokenizer, words[half:], opening),
    ]


async def _adds_up(tokenizer: Tokenizer, units: Sequence[str], opening: int) -> bool:
    return len(await tokenizer.encode(_OPENING + "".join(units))) == opening + len(units)


def _sample(units: Sequence[str], first: int, count: int) -> Message:
    return Message("user", _OPENING + "".join(units[(first + at * 7) % len(units)] for at in range(count)))
