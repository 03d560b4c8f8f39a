"""Hides what a recorded client says of its own, and of the machine that it ran on, but not the form of what it sends.

Each word becomes another of the same length and kind of letters, drawn at random and known to no one. In one recording
equal words stay equal and different ones different, so that equal texts stay equal and common beginnings common.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable
from typing import Any

from ppd.proxy.openai.prompts.shapes import BILLING

_WORD = re.compile(r"[A-Za-z0-9]+")
_HEX = re.compile(r"(?=.*[0-9])(?=.*[a-f])[0-9a-f]{4,}")
_ALPHABETS = (string.ascii_lowercase, string.ascii_uppercase, string.digits)
_OF_THE_API = frozenset(
    "$schema effort display enum format include keep maximum minimum model name pattern required role status summary"
    " tool_choice type".split()
)
_ID = re.compile(r"(?:.*[_-])?id")
_KIND = re.compile(r"(?![a-f]{4,}$)[A-Za-z]+")  # what an id is of, as in call_0a1b, but no part of a UUID
_TIME = 10**9  # numbers from here on are times


class Disguise:
    """Of one recording. draw: a letter of an alphabet."""

    def __init__(self, draw: Callable[[str], str] = secrets.choice) -> None:
        self._draw = draw
        self._words: dict[str, str] = {}
        self._taken: set[str] = set()

    def value(self, value: Any, member: str = "") -> Any:
        """Of any JSON. Members keep their names, and what belongs to the API its words."""
        if isinstance(value, dict):
            return {name: self.value(held, name) for name, held in value.items()}
        if isinstance(value, list):
            return [self.value(held, member) for held in value]
        if member in _OF_THE_API:
            return value
        if isinstance(value, str):
            return self.id(value) if _ID.fullmatch(member) else self.text(value)
        if type(value) is int and value >= _TIME:
            return int("1" + _WORD.sub(self._word, str(value)[1:]))
        return value

    def reply(self, piece: list[Any]) -> list[Any]:
        """As `record.Reply` has it."""
        match piece:
            case ["text", text]:
                return ["text", self.text(text)]
            case ["call", index, id, name, arguments]:
                return ["call", index, self.id(id), name, self.text(arguments)]
        return piece

    def id(self, text: str) -> str:
        return _WORD.sub(lambda word: word[0] if _KIND.fullmatch(word[0]) else self._word(word), text)

    def text(self, text: str) -> str:
        if text.startswith(BILLING):
            return BILLING + self.text(text.removeprefix(BILLING))
        if text.startswith("{") and (held := _read(text)) is not None:
            return _compact(self.value(held))
        return _WORD.sub(self._word, text)

    def _word(self, found: re.Match[str]) -> str:
        word = found[0]
        while word not in self._words:
            made = "".join(map(self._draw, _alphabets(word)))
            if made not in self._taken:
                self._words[word] = made
                self._taken.add(made)
        return self._words[word]


def _alphabets(word: str) -> list[str]:
    if _HEX.fullmatch(word):
        return ["0123456789abcdef"] * len(word)
    return [next(letters for letters in _ALPHABETS if letter in letters) for letter in word]


def _read(text: str) -> Any:
    """None if it is no JSON, or could not be written again as it was."""
    try:
        held = json.loads(text)
    except json.JSONDecodeError:
        return None
    return held if _compact(held) == text else None


def _compact(held: Any) -> str:
    return json.dumps(held, separators=(",", ":"), ensure_ascii=False)
