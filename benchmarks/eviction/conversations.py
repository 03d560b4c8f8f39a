"""Conversations that return to engines too small for all of them, and the text that each of their turns has to get."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from random import Random

Message = dict[str, str]
Ask = Callable[[list[Message]], Awaitable[str]]

_RECENT = 0.3  # the larger, the more often one speaks that spoke lately
_LINE = "{} more friends agreed to join us in bus {}; does this change our mode of transportation, and how? "


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens are bytes, as in the tiny model."""

    conversations: int
    turns: int
    first_tokens: tuple[int, int] = (250, 450)  # of the first question: least, most
    later_tokens: tuple[int, int] = (60, 240)
    answer_tokens: int = 32


@dataclass(frozen=True, slots=True)
class Script:
    """What the user of one conversation says, turn by turn."""

    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """One turn of a conversation whose earlier answers were right."""

    conversation: int
    number: int  # from 0
    messages: tuple[Message, ...]
    right: str  # the answer of one engine alone that has nothing cached


def scripts(shape: Shape, seed: int) -> tuple[Script, ...]:
    """No two begin alike."""
    random = Random(seed)

    def question(name: str, sizes: tuple[int, int]) -> str:
        size, text = random.randint(*sizes), f"{name}: "
        while len(text) < size:
            text += _LINE.format(random.randint(2, 999), random.randint(1, 99))
        return text[:size]

    return tuple(
        Script(
            tuple(
                question(f"{number}.{turn}", shape.later_tokens if turn else shape.first_tokens)
                for turn in range(shape.turns)
            )
        )
        for number in range(shape.conversations)
    )


def visits(shape: Shape, seed: int) -> Iterator[int]:
    """Which conversation speaks next: often one that spoke lately, and at times one that did long ago."""
    random, said = Random(seed), [0] * shape.conversations
    order = list(range(shape.conversations))
    while order:
        place = int(random.expovariate(_RECENT)) % len(order)
        number = order.pop(place)
        said[number] += 1
        if said[number] < shape.turns:
            order.insert(0, number)
        yield number


async def asked_turns(shape: Shape, seed: int, ask: Ask) -> tuple[AskedTurn, ...]:
    """In the order in which they are to be asked. ask: one engine, which must know nothing of any prompt."""
    written = scripts(shape, seed)
    histories: list[list[Message]] = [[] for _ in written]
    turns = []
    for number in visits(shape, seed):
        history = histories[number]
        place = len(history) // 2
        history.append({"role": "user", "content": written[number].questions[place]})
        right = await ask(history)
        turns.append(AskedTurn(number, place, tuple(history), right))
        history.append({"role": "assistant", "content": right})
    return tuple(turns)
