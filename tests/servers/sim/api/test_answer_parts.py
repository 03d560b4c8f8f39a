from __future__ import annotations

from dataclasses import replace

import pytest

from ppd.servers.sim.api.answer_parts import CallParser, Piece, ThoughtsParser, parsed_arguments
from ppd.servers.sim.core.reasoning import Thoughts

CALL = '\n<tool_call>\n{"name":"we\\"ather","arguments":{"a":"}\\"{","b":[{}]}}\n</tool_call>'


def pieces(text: str, step: int) -> tuple[CallParser, list[Piece]]:
    parser = CallParser()
    parts = [text[at : at + step] for at in range(0, len(text), step)]
    return parser, [parser.push(part, is_last=False) for part in parts] + [parser.push("", is_last=True)]


@pytest.mark.parametrize("step", [1, 2, 7, 40, 1000])
def test_a_call_is_its_name_and_then_its_arguments(step: int) -> None:
    parser, seen = pieces(CALL, step)
    assert [piece.name for piece in seen if piece.name is not None] == ['we"ather'] == [parser.name]
    assert "".join(piece.arguments for piece in seen) == parser.arguments == '{"a":"}\\"{","b":[{}]}'
    assert not any(piece.content for piece in seen)


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("text", ["words and words", '{"a":1}', CALL[:20], "\nno call", ""])
def test_other_text_and_a_call_cut_before_its_name_ends_are_content(text: str, step: int) -> None:
    parser, seen = pieces(text, step)
    assert "".join(piece.content for piece in seen) == text
    assert parser.name is None


def test_a_cut_call_has_what_was_there() -> None:
    parser, _ = pieces(CALL[:-30], 1)
    assert parser.name is not None
    assert parser.arguments.startswith('{"a":')
    assert parsed_arguments(parser.arguments) == {}


def test_text_is_not_held_back() -> None:
    assert CallParser().push("w", is_last=False) == Piece("w")


QWEN = Thoughts("<think>\n", "\n</think>\n\n", share=0.5)
GLM = Thoughts("\n<think>", "</think>\n", none="\n<think></think>\n", share=0.5)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("thoughts", "text", "reasoning", "rest"),
    [
        (QWEN, "<think>\nhm <b>\n\n</think>\n\nyes", "hm <b>\n", "yes"),
        (QWEN, "<thinner", "", "<thinner"),
        (QWEN, "<thi", "", "<thi"),
        (QWEN, "<think>\nhm\n</th", "hm\n</th", ""),
        (QWEN, "yes <think>\nno\n</think>\n\n", "", "yes <think>\nno\n</think>\n\n"),
        (GLM, "\n<think>hm</think>\nyes", "hm", "yes"),
        (GLM, "\n<think></think>\nyes", "", "yes"),
        (GLM, "\n<think></think", "</think", ""),
        (GLM, "\n<think>", "", ""),
        (replace(GLM, none="\n", share=0.0), "\nyes", "", "yes"),
        (replace(GLM, share=0.0), "\n<think>no", "", "\n<think>no"),
    ],
)
def test_reasoning_is_parted_from_what_follows(
    thoughts: Thoughts, text: str, reasoning: str, rest: str, step: int
) -> None:
    parser = ThoughtsParser(thoughts)
    parts = [text[at : at + step] for at in range(0, len(text), step)]
    seen = [parser.push(part, is_last=False) for part in parts] + [parser.push("", is_last=True)]
    assert ("".join(thought for thought, _ in seen), "".join(other for _, other in seen)) == (reasoning, rest)
