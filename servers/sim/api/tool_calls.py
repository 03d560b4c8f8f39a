"""Tells a tool call in an answer's text from other text, piece by piece, as vLLM's tool parsers do."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from ..core.structured_text import CALL_ARGUMENTS, CALL_OPENING

_HEAD = re.compile(re.escape(CALL_OPENING) + r'("(?:[^"\\]|\\.)*")' + re.escape(CALL_ARGUMENTS))


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds: to the text, or to a call. `name` is set where the call begins."""

    content: str = ""
    name: str | None = None
    arguments: str = ""


class CallParser:
    """Of one answer. Text that ends within the head of a call is content."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = ""
        self._held = ""
        self._is_text = False
        self._depth = 0
        self._in_string = self._is_escaped = self._is_over = False

    def push(self, text: str, *, is_last: bool) -> Piece:
        if self._is_text:
            return Piece(text)
        if self.name is not None:
            return Piece(arguments=self._argue(text))
        self._held += text
        if (head := _HEAD.match(self._held)) is not None:
            self.name = json.loads(head[1])
            return Piece(name=self.name, arguments=self._argue(self._held[head.end() :]))
        if is_last or (self._held and not self._held.startswith(CALL_OPENING[0])):
            self._is_text = True
            return Piece(self._held)
        return Piece()

    def _argue(self, text: str) -> str:
        """The part of the text that belongs to the arguments, which end with their outermost brace."""
        for at, letter in enumerate(text):
            if self._is_over:
                text = text[:at]
                break
            self._scan(letter)
        self.arguments += text
        return text

    def _scan(self, letter: str) -> None:
        if self._in_string:
            closes = letter == '"' and not self._is_escaped
            self._is_escaped = letter == "\\" and not self._is_escaped
            self._in_string = not closes
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            self._is_over = self._depth == 0


def parsed_arguments(text: str) -> dict[str, Any]:
    """Empty for arguments that were cut."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
