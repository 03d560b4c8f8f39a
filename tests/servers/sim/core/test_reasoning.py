from __future__ import annotations

import pytest

from ppd.servers.sim.core.answer_text import AnswerChain
from ppd.servers.sim.core.reasoning import Thinking, Thoughts
from ppd.servers.sim.core.tokens import Tokenizer, decode, encode
from tests.support.stepped_engine import Engine, alone

ALWAYS = Thoughts("<think>\n", "\n</think>\n\n", none="\n", share=1.0)


def thoughts(thoughts: Thoughts, prompt: str, tokenizer: Tokenizer = Tokenizer.CHARACTERS) -> tuple[str, int]:
    """All that comes before the answer, and how many tokens of it there were."""
    chain, thinking = AnswerChain(b"weights", encode(prompt), tokenizer), Thinking(thoughts, tokenizer)
    tokens: list[int] = []
    while (token := thinking.next_token(chain)) is not None:
        chain.append(token)
        tokens.append(token)
    assert thinking.tokens == len(tokens)
    assert tokenizer.tokens(decode(tokens)) == tokens
    return decode(tokens), len(tokens)


@pytest.mark.parametrize(("tokenizer", "marks"), [(Tokenizer.CHARACTERS, 19), (Tokenizer.PIECES, 6)])
def test_reasoning_stands_between_its_marks(tokenizer: Tokenizer, marks: int) -> None:
    text, tokens = thoughts(ALWAYS, "hi", tokenizer)
    assert text.startswith("<think>\n") and text.endswith("\n</think>\n\n")
    assert 24 <= tokens - marks < 96


def test_a_share_of_the_answers_begins_with_it() -> None:
    half = Thoughts("<think>", "</think>", none="\n", share=0.5)
    begun = [thoughts(half, str(number))[0] for number in range(200)]
    assert 70 < sum(text.startswith("<think>") for text in begun) < 130
    assert {text for text in begun if not text.startswith("<think>")} == {"\n"}


def test_preempted_reasoning_goes_on_where_it_was() -> None:
    settings = {"max_tokens": 80, "thoughts": ALWAYS, "ignore_eos": False}
    engine = Engine(blocks=24)
    for number in range(3):
        engine.add(f"s{number}", f"{number}" * 4, **settings)
    engine.run()
    assert engine.counters.preemptions > 0
    assert engine.texts == {f"s{number}": alone(f"{number}" * 4, **settings) for number in range(3)}
