from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.servers.sim.core.tokens import (
    TURN_END,
    TURN_START,
    VOCABULARY_SIZE,
    Tokenizer,
    decode,
    digest_of_numbers,
    encode,
    is_token,
    media_digest,
    media_numbers,
    media_tokens,
)

PIECES = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_"])
TEXTS = st.lists(PIECES).map("".join)


@given(TEXTS)
def test_text_comes_back_from_its_tokens(text: str) -> None:
    assert decode(encode(text)) == text


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", []),
        ("ab", [97, 98]),
        ("é中😀", [0xE9, 0x4E2D, 0x1F600]),
        ("<|im_start|>a<|im_end|>", [TURN_START, 97, TURN_END]),
    ],
)
def test_one_character_is_one_token_and_one_marker_is_one_token(text: str, tokens: list[int]) -> None:
    assert encode(text) == tokens


def test_media_are_known_by_their_content() -> None:
    cat, dog = media_tokens(media_digest(b"cat")), media_tokens(media_digest(b"dog"))
    assert cat == media_tokens(media_digest(b"cat")) != dog
    assert media_tokens(digest_of_numbers(media_numbers(cat)) or b"") == cat
    assert len(cat) == 16
    assert all(TURN_END < token < VOCABULARY_SIZE for token in cat + dog)


def test_tokens_without_text_are_silent() -> None:
    assert decode([97, *media_tokens(media_digest(b"cat")), 0xD800, 98]) == "ab"


PROSE = "The quick brown fox jumps over the lazy dog. Nobody had seen the old man since the morning; he had left. "
JSON = (
    '{"name":"get_weather","parameters":{"type":"object","properties":{"city":{"type":"string"}}},"required":["city"]}'
)
CHINESE = "模型把提示分成片段再把片段变成数字每个片段都有自己的号码"
SOME = st.sampled_from(
    [PROSE, JSON, CHINESE, "\n", "<think>", "</tool_call>", "<|user|>", "<thi", "é", "aa ", "{{", "日"]
)


def pieces(text: str) -> list[int]:
    return Tokenizer.PIECES.tokens(text)


@given(st.lists(PIECES | SOME).map("".join))
def test_text_comes_back_from_its_pieces(text: str) -> None:
    assert decode(pieces(text)) == text
    assert all(is_token(token) for token in pieces(text))


@given(st.lists(PIECES | SOME).map("".join), st.lists(PIECES | SOME).map("".join))
def test_pieces_of_what_ends_with_a_line_or_marker_do_not_change(text: str, more: str) -> None:
    for end in ("\n", "<|im_end|>", "</think>"):
        assert pieces(text + end + more) == pieces(text + end) + pieces(more)


@given(st.lists(PIECES | SOME, min_size=1).map("".join), st.data())
def test_equal_beginnings_have_equal_pieces_but_for_the_last(text: str, data: st.DataObject) -> None:
    beginning = pieces(text[: data.draw(st.integers(0, len(text)))].rpartition("<")[0])
    assert pieces(text)[: len(beginning) - 1] == beginning[:-1] or not beginning


@pytest.mark.parametrize(
    ("text", "least", "most"), [(PROSE * 9, 3.8, 4.4), (JSON, 2.7, 3.3), (CHINESE * 9, 1.4, 1.6), ("<think>", 7, 7)]
)
def test_pieces_are_as_long_as_those_of_real_models(text: str, least: float, most: float) -> None:
    assert least <= len(text) / len(pieces(text)) <= most


@pytest.mark.parametrize(
    ("value", "is_id"),
    [(0, True), (-1, False), (VOCABULARY_SIZE, False), (2**30, True), (2**32 - 1, True), (2**32, False), (True, False)],
)
def test_ids_are_those_of_characters_markers_media_and_packed_pieces(value: int, is_id: bool) -> None:
    assert is_token(value) is is_id
    if is_id:
        decode([value]).encode()
