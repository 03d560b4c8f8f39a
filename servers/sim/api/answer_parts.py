"""Tells reasoning and a tool call in an answer's text from other text, piece by piece, as vLLM's parsers do."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from ..core.reasoning import Thoughts
from ..core.structured_text import CALL_ARGUMENTS, CALL_OPENING

_HEAD = re.compile(re.escape(CALL_OPENING) + r'("(?:[^"\\]|\\.)*")' + re.escape(CALL_ARGUMENTS))


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds: to the reasoning, to the text, or to a call. `name` is set where the call begins."""

    content: str = ""
    name: str | None = None
    arguments: str = ""
    reasoning: str = ""


class AnswerParser:
    """Of one answer. thoughts: None if the answer has no marks of reasoning; `call`: None if nothing can be called."""

    def __init__(self, thoughts: Thoughts | None, *, calls: bool) -> None:
        self.call = CallParser() if calls else None
        self.thoughts = None if thoughts is None else ThoughtsParser(thoughts)

    def push(self, text: str, *, is_last: bool) -> Piece:
        reasoning = ""
        if self.thoughts is not None:
            reasoning, text = self.thoughts.push(text, is_last=is_last)
        piece = self.call.push(text, is_last=is_last) if self.call is not None else Piece(text)
        return replace(piece, reasoning=reasoning) if reasoning else piece


class ThoughtsParser:
    """Parts reasoning from what follows, and drops the marks. Reasoning that is cut has no end."""

    def __init__(self, thoughts: Thoughts) -> None:
        self.has_begun = False
        self._thoughts = thoughts
        self._held = ""
        self._is_over = False

    def push(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """What is added to the reasoning, and to the rest."""
        if self._is_over:
            return "", text
        self._held += text
        if not self.has_begun:
            return self._begin(is_last=is_last)
        return self._go_on(is_last=is_last)

    def _begin(self, *, is_last: bool) -> tuple[str, str]:
        none, opening = self._thoughts.none, self._thoughts.opening
        marks = (none, opening) if self._thoughts.share else (none,)
        if not is_last and any(mark != self._held and mark.startswith(self._held) for mark in marks):
            return "", ""
        if none and self._held.startswith(none):  # before the opening, which it may begin with
            return self._rest(self._held[len(none) :])
        if opening not in marks or not self._held.startswith(opening):
            return self._rest(self._held)
        self.has_begun = True
        self._held = self._held[len(opening) :]
        return self._go_on(is_last=is_last)

    def _go_on(self, *, is_last: bool) -> tuple[str, str]:
        thought, mark, rest = self._held.partition(self._thoughts.closing)
        if mark:
            self._is_over, self._held = True, ""
            return thought, rest
        kept = 0 if is_last else _overlap(self._held, self._thoughts.closing)
        at = len(self._held) - kept
        thought, self._held = self._held[:at], self._held[at:]
        return thought, ""

    def _rest(self, text: str) -> tuple[str, str]:
        self._is_over, self._held = True, ""
        return "", text


def _overlap(text: str, mark: str) -> int:
    """How many of the last characters may begin the mark."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)


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
