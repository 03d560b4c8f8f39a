"""Text and token ids. By default one character is one token, whose id is its code point.

A tokeniser of pieces has lengths like those of real models: about four characters a token in prose, three in JSON, one
and a half in Chinese and Japanese. A piece's characters are packed into its id. Where a piece ends depends only on the
text since the last change between letters, signs and other characters, so equal beginnings have equal ids but for the
last piece, and a line's end or a marker ends every piece.

The chat templates' markers are single ids above Unicode. A picture is 16 ids from the hash of its content. Text encodes
to the ids that it was decoded from, so D's own output is a prefix-cache hit on the next turn.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from typing import Any

TURN_START = 0x110000
TURN_END = 0x110001  # also the end-of-answer token
_MEDIA = 0x110100
MEDIA_TOKENS = 16  # of any item
VOCABULARY_SIZE = _MEDIA + 0x10000  # without packed pieces
LETTERS_A_PIECE = 5  # at most

_MARKERS = (
    *("<|im_start|>", "<|im_end|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
_MARKER_TEXTS = dict(enumerate(_MARKERS, start=TURN_START))
_MARKER_IDS = {text: token for token, text in _MARKER_TEXTS.items()}
_TURN_MARKERS = re.compile(r"(<\|im_(?:start|end)\|>)")
_ALL_MARKERS = re.compile("(" + "|".join(map(re.escape, _MARKERS)) + ")")

_ALPHABET = " abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGITS = {letter: digit for digit, letter in enumerate(_ALPHABET, start=1)}
_BASE = len(_ALPHABET) + 1
_IDEOGRAPHS = 0x3040  # kana too; 15 bits from here
_PIECES = re.compile(r"[A-Za-z ]{1,5}|[!-@\[-`{-~]{1,3}|[\u3040-\u9fff]+|.", re.DOTALL)
_LETTERS, _SIGNS, _PAIR = 1 << 30, 3 << 29, 1 << 31  # what a packed id begins with
_LIMIT = 1 << 32


class Tokenizer(StrEnum):
    CHARACTERS = "characters"
    PIECES = "pieces"

    def tokens(self, text: str) -> list[int]:
        return encode(text) if self is Tokenizer.CHARACTERS else _encode_pieces(text)


def encode(text: str) -> list[int]:
    """One token a character."""
    if "<|im_" not in text:
        return [ord(character) for character in text]
    tokens: list[int] = []
    for piece in _TURN_MARKERS.split(text):
        marker = _MARKER_IDS.get(piece)
        tokens.extend(map(ord, piece) if marker is None else (marker,))
    return tokens


def decode(tokens: Iterable[int]) -> str:
    """Of either tokeniser. Media tokens and lone surrogates have no text."""
    return "".join(map(_text, tokens))


def is_token(value: Any) -> bool:
    is_id = isinstance(value, int) and not isinstance(value, bool)
    return is_id and (0 <= value < VOCABULARY_SIZE or _LETTERS <= value < _LIMIT)


def media_digest(content: bytes) -> bytes:
    """What a picture or sound is known by; equal contents have equal digests."""
    return hashlib.sha256(content).digest()


def media_tokens(digest: bytes) -> list[int]:
    return [_MEDIA + int.from_bytes(digest[at : at + 2]) for at in range(0, len(digest), 2)]


def is_media(token: int) -> bool:
    return _MEDIA <= token < VOCABULARY_SIZE


def media_numbers(tokens: Iterable[int]) -> list[int]:
    """What an encoder tells of an item, so that an engine without its data knows its tokens."""
    return [token - _MEDIA for token in tokens]


def digest_of_numbers(numbers: Any) -> bytes | None:
    """None for what no encoder tells."""
    if not isinstance(numbers, list) or len(numbers) != MEDIA_TOKENS:
        return None
    if not all(isinstance(number, int) and 0 <= number < 0x10000 for number in numbers):
        return None
    return b"".join(number.to_bytes(2) for number in numbers)


def _encode_pieces(text: str) -> list[int]:
    tokens: list[int] = []
    for part in _ALL_MARKERS.split(text):
        if (marker := _MARKER_IDS.get(part)) is not None:
            tokens.append(marker)
            continue
        for piece in _PIECES.findall(part):
            if _IDEOGRAPHS <= ord(piece[0]) <= 0x9FFF:
                tokens += _ideographs(piece)
            else:
                tokens.append(_packed(piece))
    return tokens


def _ideographs(run: str) -> Iterable[int]:
    """Every other character, by its code point, takes the next one into its piece."""
    at = 0
    while at < len(run):
        first = ord(run[at])
        if first % 2 and at + 1 < len(run):
            yield _PAIR | (first - _IDEOGRAPHS) << 15 | ord(run[at + 1]) - _IDEOGRAPHS
            at += 2
        else:
            yield first
            at += 1


@lru_cache(maxsize=65_536)
def _packed(piece: str) -> int:
    if len(piece) == 1:
        return ord(piece)
    packed = 0
    if piece[0] in _DIGITS:
        for letter in piece:
            packed = packed * _BASE + _DIGITS[letter]
        return _LETTERS | packed
    for sign in piece:
        packed = packed << 7 | ord(sign)
    return _SIGNS | packed


def _text(token: int) -> str:
    if token in _MARKER_TEXTS:
        return _MARKER_TEXTS[token]
    if token >= _LETTERS:
        return _unpacked(token)
    if token >= TURN_START or 0xD800 <= token < 0xE000:
        return ""
    return chr(token)


def _unpacked(token: int) -> str:
    text = ""
    if token >= _PAIR:
        return chr((token >> 15 & 0x7FFF) + _IDEOGRAPHS) + chr((token & 0x7FFF) + _IDEOGRAPHS)
    if token >= _SIGNS:
        packed = token - _SIGNS
        while packed:
            packed, sign = packed >> 7, packed & 0x7F
            text = chr(sign) + text
        return text
    packed = token - _LETTERS
    while packed:
        packed, digit = divmod(packed, _BASE)
        text = (_ALPHABET[digit - 1] if digit else "") + text
    return text
