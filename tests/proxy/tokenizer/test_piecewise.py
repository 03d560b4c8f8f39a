from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd.proxy.kv_events.block_tokens import packed
from ppd.proxy.tokenizer.piecewise import Piecewise
from ppd.proxy.tokenizer.tokenizer_folder import TokenizerFolder
from ppd.servers.vllm.tiny_model import tokenizer as bytes_tokenizer
from tests.proxy.tokenizer.tokenizer_folders import characters, write_tokenizer

BEGIN, END = "<|im_start|>", "<|im_end|>"
LINES = "".join(f"Line {number} of a document, as long as the others.\n" for number in range(60))


def loaded(folder: Path, tokenizer: dict[str, Any] | None = None) -> TokenizerFolder:
    return TokenizerFolder.load(write_tokenizer(folder, tokenizer=tokenizer))


def merged() -> dict[str, Any]:
    """A BPE that merges words as real ones do, and line ends with the spaces before them."""
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    known = bytes_tokenizer()
    vocabulary = known["model"]["vocab"]
    merges = ["L i", "Li n", "Lin e", "Ġ o", "Ġo f", "Ġ d", "Ċ Ċ", ". Ċ", "a s"]
    for merge in merges:
        vocabulary[merge.replace(" ", "")] = len(vocabulary)
    known["model"]["merges"] = merges
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    known["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, known["pre_tokenizer"]]}
    return known


@pytest.mark.slow
@pytest.mark.parametrize("piece", [1, 40])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_pieces_have_the_tokens_of_the_whole(tmp_path_factory: Any, piece: int, data: st.DataObject) -> None:
    folder = loaded(tmp_path_factory.mktemp("bpe"), merged())
    texts = Piecewise(folder, kept_bytes=200, piece=piece)
    assert texts._cuts_lines
    parts = st.sampled_from([BEGIN, END, "Line of a.", "\n", "\n\n", " ", "as", "Li", "\r\n", "ä", "1", "\u0301", "中"])
    for _ in range(3):
        text = "".join(data.draw(st.lists(parts | st.text(max_size=4), max_size=25)))
        assert texts.tokens(text) == packed(folder.ids(text))


class Counting:
    """How often a folder is asked."""

    def __init__(self, folder: TokenizerFolder) -> None:
        self.encoder, self.asked, self._folder = folder.encoder, list[str](), folder

    def ids(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self.asked.append(text)
        return self._folder.ids(text, add_special_tokens=add_special_tokens)


def test_what_was_tokenised_before_is_not_again(tmp_path: Path) -> None:
    folder: Any = Counting(loaded(tmp_path))
    texts = Piecewise(folder)
    begins = f"{BEGIN}system\n{LINES}{END}\n{BEGIN}user\n"
    texts.tokens(f"{begins}one{END}")
    folder.asked.clear()
    texts.tokens(f"{begins}other{END}")
    assert folder.asked == ["user\nother"]
    folder.asked.clear()
    texts.tokens(f"{BEGIN}user\n{LINES}And now?")
    texts.tokens(f"{BEGIN}user\n{LINES}Or later?")
    assert sum(map(len, folder.asked)) < len(LINES) + 2 * 1200, "a document that texts share is read once"
    folder.asked.clear()
    salted = texts.tokens(f"{BEGIN}user\n{LINES}Or later?", "ann")
    assert "".join(folder.asked) == f"{BEGIN}user\n{LINES}Or later?", "what others sent saves a salted prompt nothing"
    assert salted == texts.tokens(f"{BEGIN}user\n{LINES}Or later?")


def test_what_is_kept_is_bounded(tmp_path: Path) -> None:
    texts = Piecewise(loaded(tmp_path), kept_bytes=4000)
    for number in range(50):
        texts.tokens(f"{BEGIN}{number} {LINES}")
    assert texts._held_bytes == sum(map(len, texts._kept.values())) <= 4000


def test_a_tokenizer_whose_tokens_span_lines_is_not_cut_at_them(tmp_path: Path) -> None:
    folder = loaded(tmp_path, characters(piece="\\.?\\nThen"))
    texts = Piecewise(folder)
    assert not texts._cuts_lines
    text = f"{BEGIN}" + "One line.\nThen more. " * 200
    assert texts.tokens(text) == packed(folder.ids(text))


@pytest.mark.parametrize("change", [{"lstrip": True}, {"rstrip": True}, {"normalized": True}])
def test_special_tokens_that_take_in_more_do_not_cut(tmp_path: Path, change: dict[str, Any]) -> None:
    told = characters()
    told["added_tokens"][0] |= change
    folder = loaded(tmp_path, told)
    text = f"a  {BEGIN}  b"
    assert Piecewise(folder).tokens(text) == packed(folder.ids(text))


@pytest.mark.parametrize("begins", ["", BEGIN])
def test_tokens_that_are_added_to_raw_texts(tmp_path: Path, begins: str) -> None:
    folder = loaded(tmp_path, characters(begins=begins))
    for text in ("", "Once", LINES):
        found = Piecewise(folder).tokens(text, add_special_tokens=True)
        assert found == packed(folder.ids(text, add_special_tokens=True))
    assert json.loads(folder.encoder.to_str())["truncation"] is None
