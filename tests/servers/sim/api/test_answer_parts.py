from __future__ import annotations

import pytest

from ppd.servers.sim.api.answer_parts import CallParser, Piece, parsed_arguments

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
