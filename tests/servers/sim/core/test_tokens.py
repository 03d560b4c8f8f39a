from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.servers.sim.core.tokens import TURN_END, TURN_START, VOCABULARY_SIZE, decode, encode, media_tokens

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
    cat, dog = media_tokens(b"cat"), media_tokens(b"dog")
    assert cat == media_tokens(b"cat") != dog
    assert len(cat) == 16
    assert all(TURN_END < token < VOCABULARY_SIZE for token in cat + dog)


def test_tokens_without_text_are_silent() -> None:
    assert decode([97, *media_tokens(b"cat"), 0xD800, 98]) == "ab"
