"""The text of an answer: a deterministic function of every token whose KV the engine holds.

A lost, foreign or stale block changes the chain, so it shows in the text. The words are pronounceable gibberish.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from .tokens import LETTERS_A_PIECE, TURN_START, Tokenizer, decode, encode

VOWELS, CONSONANTS = "aeiou", "bdfgklmnprstvz"
_VOWELS = frozenset(encode(VOWELS))
_OPEN = encode(VOWELS)
_CLOSED = encode(CONSONANTS)
_SPACE = ord(" ")
_SHORTEST, _SPREAD = 24, 72  # natural lengths: 24 to 95 tokens, with the end-of-answer token


class AnswerChain:
    """The state that determines the next token. `key` stands for the weights: equal keys give equal answers."""

    def __init__(self, key: bytes, tokens: Iterable[int], tokenizer: Tokenizer = Tokenizer.CHARACTERS) -> None:
        held = array("I", tokens)
        self._digest = hashlib.blake2b(held.tobytes(), digest_size=8, key=key)
        self._tokenizer = tokenizer
        self._last = _last_letter(held[-1]) if held else 0

    def append(self, token: int) -> None:
        self._digest.update(array("I", (token,)).tobytes())
        self._last = _last_letter(token)

    def natural_length(self) -> int:
        return _SHORTEST + (self._draw() >> 32) % _SPREAD

    def reasoning_length(self, share: float) -> int:
        """In tokens; 0 for all but a `share` of the answers."""
        draw = self._draw(b"reasoning")
        return _SHORTEST + (draw >> 32) % _SPREAD if (draw & 0xFFFF) / 0x10000 < share else 0

    def next_token(self) -> int:
        draw = self._draw()
        if self._tokenizer is Tokenizer.CHARACTERS:
            return _letter_after(self._last, draw)
        letters, last = [], self._last
        for _ in range(LETTERS_A_PIECE):
            last = _letter_after(last, draw)
            letters.append(last)
            draw >>= 12
        (piece,) = self._tokenizer.tokens("".join(map(chr, letters)))
        return piece

    def choose(self, options: Sequence[Any], turn: int) -> Any:
        """One of the options. Draws of different `turn` differ, though no token came between them."""
        return options[(self._draw(b"choice %d" % turn) >> 16) % len(options)]

    def rank(self, token: int, count: int) -> tuple[tuple[int, float], ...]:
        """At least one and at most `count` most likely next tokens with their log probabilities; `token` leads."""
        draw = self._draw(b"rank")
        letters = [_SPACE, *_CLOSED, *_OPEN]
        start = (draw >> 16) % len(letters)
        others = [letter for letter in letters[start:] + letters[:start] if letter != token]
        likely = 0.6 + draw % 1024 / 2600  # below 0.994; each further token has half of what is left
        odds = [likely, *((1 - likely) / 2**place for place in range(1, count))]
        return tuple((one, round(math.log(odd), 6)) for one, odd in zip([token, *others], odds, strict=False))

    def _draw(self, salt: bytes = b"") -> int:
        digest = self._digest.copy()
        digest.update(salt)
        return int.from_bytes(digest.digest())


def _letter_after(last: int, draw: int) -> int:
    """After a vowel a consonant or (three times in eight) a space; after a consonant a vowel."""
    if last in _VOWELS:
        if draw % 8 < 3:
            return _SPACE
        return _CLOSED[(draw >> 8) % len(_CLOSED)]
    if last in _CLOSED:
        return _OPEN[(draw >> 8) % len(_OPEN)]
    letters = _CLOSED + _OPEN
    return letters[(draw >> 8) % len(letters)]


def _last_letter(token: int) -> int:
    if token < TURN_START:
        return token
    text = decode((token,))
    return ord(text[-1]) if text else token


class StopText:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stop = stop
        self._include_stop = include_stop
        self._hold = max((len(text) for text in stop), default=1) - 1
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that may be sent now; once `matched` is set, the answer is complete."""
        self._held += text
        if not may_stop:
            return self.flush()
        if text:
            found = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
            if found:
                at, self.matched = min(found)
                end = at + (len(self.matched) if self._include_stop else 0)
                self._held = self._held[:end]
                return self.flush()
        split = max(0, len(self._held) - self._hold)
        sent, self._held = self._held[:split], self._held[split:]
        return sent

    def flush(self) -> str:
        sent, self._held = self._held, ""
        return sent
