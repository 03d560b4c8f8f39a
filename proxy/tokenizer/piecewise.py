"""Texts in tokens, of which most was tokenised before: a conversation only grows, and many begin alike.

A text is cut where no token can span: at special tokens, and before a line that begins with a letter. Whether the
second holds for a tokenizer is tried out when it is loaded. The tokens of each piece are kept, the least used out.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from ..kv_events.block_tokens import packed
from .tokenizer_folder import TokenizerFolder

KEPT_BYTES = 64 * 1024 * 1024  # of tokens; with their keys it is half as much again
PIECE = 1024  # characters; a piece is at least as long, and ends with a line
_LINE = re.compile(r"\n(?=[A-Za-z])")
_KEY_BYTES = 16

# A token that spans a cut, or depends on what stands beyond, shows in one of these.
_SAMPLES = (
    *("One line.", "a\n", "b: 1\n\n", "  indented\n", "x = {\n", "end;\n", "tab\t\n", "trailing \n", "1234567\n"),
    *("CamelCase\r\n", "äöü\n", "中文\n", "!!!\n", "\n\n\n", '{"key": "value"}\n', "it's\n", "\u00a0\n", "e\u0301\n"),
)
_NEXT = ("Then", "a", "Zulu 1", "i'm", "HTTP")


class Piecewise:
    """Not for two threads at once."""

    def __init__(self, folder: TokenizerFolder, kept_bytes: int = KEPT_BYTES, piece: int = PIECE) -> None:
        self._folder = folder
        self._kept_bytes = kept_bytes
        self._held_bytes = 0
        self._kept = OrderedDict[bytes, bytes]()
        self._piece = piece
        self._specials = _specials(folder.encoder)
        parts_at_specials = self._specials is not None and all(map(self._parts_at_special, self._texts()))
        self._cuts_specials = parts_at_specials
        self._cuts_lines = parts_at_specials and self._parts_at_lines()
        self._before, self._after, self._adds = _added(folder)

    def tokens(self, text: str, salt: str = "", *, add_special_tokens: bool = False) -> bytes:
        """As `packed`. salt: prompts with different ones share no piece, or its time would tell of the other."""
        if add_special_tokens and not self._adds:
            return packed(self._folder.ids(text, add_special_tokens=True))
        own = blake2b(salt.encode(), digest_size=_KEY_BYTES).digest()
        found = b"".join([self._of_piece(piece, own) for piece in self._pieces(text)])
        return self._before + found + self._after if add_special_tokens else found

    def _of_piece(self, piece: str, own: bytes) -> bytes:
        key = blake2b(piece.encode(), digest_size=_KEY_BYTES, key=own).digest()
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found
        found = packed(self._folder.ids(piece))
        self._kept[key] = found
        self._held_bytes += len(found)
        while self._held_bytes > self._kept_bytes:
            self._held_bytes -= len(self._kept.popitem(last=False)[1])
        return found

    def _pieces(self, text: str) -> Iterator[str]:
        if not self._cuts_specials or self._specials is None:
            yield text
            return
        for segment in filter(None, self._specials.split(text)):
            if self._cuts_lines and len(segment) > self._piece:
                yield from self._lines(segment)
            else:
                yield segment

    def _lines(self, segment: str) -> Iterator[str]:
        """Cut by what is before the cut alone, so that texts which begin alike have the same pieces."""
        start = 0
        while (end := _LINE.search(segment, start + self._piece)) is not None:
            yield segment[start : end.end()]
            start = end.end()
        yield segment[start:]

    # -- trying out

    def _texts(self) -> Iterator[str]:
        names = [token.content for token in self._folder.encoder.get_added_tokens_decoder().values()]
        for name in names[:64]:
            for before, after in zip(_SAMPLES, (*_NEXT, " b", "\nc", "1", "!"), strict=False):
                yield f"{before}{name}{after}"
                yield f"{before}{name}{name}{after}{name}"

    def _parts_at_special(self, text: str) -> bool:
        assert self._specials is not None, "it was looked at"
        return self._is_joined(text, list(filter(None, self._specials.split(text))))

    def _parts_at_lines(self) -> bool:
        texts = [f"{before}{one}{after}" for before, one in pairwise(_SAMPLES) for after in _NEXT]
        return all(self._is_joined(text, _cut(text)) for text in texts) and self._is_joined(
            whole := "\n".join(texts), _cut(whole)
        )

    def _is_joined(self, text: str, pieces: list[str]) -> bool:
        ids: Callable[[str], list[int]] = partial(self._folder.ids, add_special_tokens=False)
        return ids(text) == [one for piece in pieces for one in ids(piece)]


def _cut(text: str) -> list[str]:
    ends = [0, *(one.end() for one in _LINE.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


def _specials(encoder: Any) -> re.Pattern[str] | None:
    """Splits at special tokens; None where they take in the spaces around them, or are found in changed text."""
    added = list(encoder.get_added_tokens_decoder().values())
    if not added or any(token.lstrip or token.rstrip or token.single_word or token.normalized for token in added):
        return None
    names = sorted({token.content for token in added}, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, names)) + ")")


def _added(folder: TokenizerFolder) -> tuple[bytes, bytes, bool]:
    """What `add_special_tokens` puts before and after a text, and whether it is always that."""
    found = [(folder.ids(text), folder.ids(text, add_special_tokens=True)) for text in ("a", "two words\n")]
    ends = []
    for plain, whole in found:
        at = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), None)
        ends.append(None if at is None or not plain else (packed(whole[:at]), packed(whole[at + len(plain) :])))
    first = ends[0]
    return (b"", b"", False) if first is None or ends[1] != first else (*first, True)
