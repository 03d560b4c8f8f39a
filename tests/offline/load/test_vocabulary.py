from __future__ import annotations

from collections.abc import Sequence

import pytest

from ppd.offline.load.vocabulary import learn_ids, learn_vocabulary
from ppd.offline.traces.turns import Message
from ppd.proxy.errors import ConfigError


class Characters:
    """A token a character; 3 before each message's text, 1 behind, 2 that ask for the answer."""

    async def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    async def render(self, messages: Sequence[Message]) -> list[int]:
        tokens: list[int] = []
        for message in messages:
            tokens += [1, 2, 3, *await self.encode(message.content), 4]
        return [*tokens, 5, 6]


class Words(Characters):
    """A token a word, but for those it knows nothing of, which are two."""

    def __init__(self, unknown: frozenset[str] = frozenset()) -> None:
        self._unknown = unknown

    async def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for word in text.split(" "):
            tokens += [hash(word)] * (2 if word in self._unknown or len(word) > 12 else 1)
        return tokens


class Chatty(Characters):
    """A template that adds more to longer messages."""

    async def render(self, messages: Sequence[Message]) -> list[int]:
        return [*await super().render(messages), *([7] * (len(messages[-1].content) > 100))]


class Pairs(Characters):
    """No word is one token, and no letter."""

    async def encode(self, text: str) -> list[int]:
        return [0] * (2 * len(text))


class Missing(Characters):
    async def encode(self, text: str) -> list[int]:
        raise ConfigError("/tokenize: answered 404")


@pytest.mark.parametrize("tokenizer", [Characters(), Words(), Words(frozenset(("time", "river", "war")))])
async def test_text_of_the_vocabulary_has_a_token_a_unit(tokenizer: Characters) -> None:
    learnt = await learn_vocabulary(tokenizer)
    text = learnt.opening + "".join(learnt.units)
    first = await tokenizer.render([Message("user", text)])
    assert len(first) == learnt.first_overhead + len(learnt.units)
    answer = learnt.opening + learnt.units[0]
    second = await tokenizer.render([Message("user", text), Message("assistant", answer), Message("user", text)])
    added = len(second) - len(first) - len(await tokenizer.encode(answer))
    assert added == learnt.later_overhead + len(learnt.units)


async def test_the_head_is_what_all_first_prompts_begin_with() -> None:
    assert (await learn_vocabulary(Characters())).head == 3 + len("So")
    assert (await learn_vocabulary(Words())).head == 3 + 1


async def test_words_of_more_tokens_are_left_out() -> None:
    units = (await learn_vocabulary(Words(frozenset(("time", "river"))))).units
    assert " year" in units
    assert not {" time", " river"} & set(units)


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        (Pairs(), "only 0 are single tokens"),
        (Chatty(), "depends on the text"),
        (Missing(), "/tokenize: answered 404"),
    ],
)
async def test_a_model_whose_texts_cannot_be_counted_is_refused(tokenizer: Characters, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        await learn_vocabulary(tokenizer)


async def test_ids_are_those_of_plain_text() -> None:
    assert set(await learn_ids(Characters())) == {ord(letter) for letter in "abcdefghijklmnopqrstuvwxy "}
