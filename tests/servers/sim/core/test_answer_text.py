from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.servers.sim.core.answer_text import AnswerChain, StopText
from ppd.servers.sim.core.tokens import Tokenizer, decode, encode


def answer(prompt: list[int], key: bytes = b"weights", length: int = 60) -> str:
    chain = AnswerChain(key, prompt)
    tokens = []
    for _ in range(length):
        tokens.append(chain.next_token())
        chain.append(tokens[-1])
    return decode(tokens)


PROMPT = encode("what is the capital of France?")


def test_the_same_prompt_has_the_same_answer() -> None:
    assert answer(PROMPT) == answer(list(PROMPT))
    assert AnswerChain(b"k", PROMPT).natural_length() == AnswerChain(b"k", PROMPT).natural_length()


@pytest.mark.parametrize("at", [0, 7, len(PROMPT) - 1])
def test_any_changed_token_changes_the_answer(at: int) -> None:
    changed = [token + (place == at) for place, token in enumerate(PROMPT)]
    assert answer(changed) != answer(PROMPT)


@pytest.mark.parametrize("other", [PROMPT[1:], PROMPT[:-1], [*PROMPT, 0], []])
def test_a_lost_or_added_token_changes_the_answer(other: list[int]) -> None:
    assert answer(other) != answer(PROMPT)


def test_other_weights_have_other_answers() -> None:
    assert answer(PROMPT, b"a") != answer(PROMPT, b"b")


def test_a_chain_may_start_anywhere() -> None:
    whole = answer(PROMPT, length=20)
    assert whole[:5] + answer(PROMPT + encode(whole[:5]), length=15) == whole


def test_answers_are_words() -> None:
    text = answer(PROMPT, length=400)
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz ")
    assert 40 < len(text.split()) < 200


@pytest.mark.parametrize("prompt", ["a", "b", "a longer one", "x" * 500])
def test_natural_lengths_are_bounded(prompt: str) -> None:
    assert 24 <= AnswerChain(b"k", encode(prompt)).natural_length() < 96


@pytest.mark.parametrize(
    ("stop", "include", "pieces", "text", "matched"),
    [
        ((), False, "abc", "abc", None),
        (("b",), False, "abc", "a", "b"),
        (("b",), True, "abc", "ab", "b"),
        (("bc",), False, "abxbc!", "abx", "bc"),
        (("cd", "bcd"), False, "abcd", "a", "bcd"),
        (("zz",), False, "abcz", "abcz", None),
    ],
)
def test_stop_strings(stop: tuple[str, ...], include: bool, pieces: str, text: str, matched: str | None) -> None:
    out, sent = StopText(stop, include_stop=include), ""
    for piece in pieces:
        sent += out.push(piece)
        if out.matched:
            break
    assert (sent + out.flush(), out.matched) == (text, matched)


def test_only_what_may_be_a_stop_string_is_held_back() -> None:
    out = StopText(("xyz",))
    assert [out.push(letter) for letter in "abcd"] == ["", "", "a", "b"]
    assert out.flush() == "cd"


def test_before_the_least_length_nothing_stops() -> None:
    out = StopText(("b",))
    assert out.push("b", may_stop=False) == "b"
    assert out.matched is None


@given(st.text(max_size=40), st.integers(1, 40))
def test_an_answer_in_pieces_is_what_a_prompt_with_its_text_holds(prompt: str, count: int) -> None:
    chain = AnswerChain(b"k", Tokenizer.PIECES.tokens(prompt + "\n"), Tokenizer.PIECES)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(chain.next_token())
        chain.append(tokens[-1])
    assert Tokenizer.PIECES.tokens(decode(tokens)) == tokens
    assert len(decode(tokens)) == 5 * count
