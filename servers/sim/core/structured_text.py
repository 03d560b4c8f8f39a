"""Answers that keep to a form: a tool call, or JSON of a schema.

The steps of a form are texts to write and choices to make. Every choice is a draw of the answer's chain, so that a
structured answer depends on the KV held as free text does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from .answer_text import AnswerChain
from .json_steps import Steps, json_text, value_steps
from .tokens import TURN_END, Tokenizer, decode

CALL_OPENING, CALL_ARGUMENTS, CALL_CLOSING = '\n<tool_call>\n{"name":', ',"arguments":', "}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class Tool:
    """parameters: a JSON schema of an object."""

    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """A call of one of the tools, or text; the text is JSON if there is a schema.

    must_call: never text; is_named: the client chose the tool.
    """

    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    is_named: bool = False
    schema: Any = None

    def guide(self, tokenizer: Tokenizer = Tokenizer.CHARACTERS) -> Guide:
        return Guide(self._steps(), tokenizer)

    def _steps(self) -> Generator[Any, Any, bool]:
        """Returns whether free text follows."""
        if self.tools and (self.must_call or (yield (True, False))):
            tool = yield self.tools
            yield f"{CALL_OPENING}{json_text(tool.name)}{CALL_ARGUMENTS}"
            yield from value_steps(tool.parameters)
            yield CALL_CLOSING
            return False
        if self.schema is None:
            return True
        yield from value_steps(self.schema)
        return False


class Guide:
    """Where one answer is in its form. Kept while its sequence is preempted."""

    def __init__(self, steps: Steps, tokenizer: Tokenizer = Tokenizer.CHARACTERS) -> None:
        self._steps = steps
        self._tokenizer = tokenizer
        self._chosen: Any = None
        self._choices = 0
        self._due: deque[int] = deque()
        self._open = ""  # text that belongs to a piece which may go on
        self._is_over = self._is_free = False

    def next_token(self, chain: AnswerChain) -> int | None:
        """The end-of-answer token once the form is complete; None where any text may follow."""
        while not self._due and not self._is_over:
            self._advance(chain)
        if self._due:
            return self._due.popleft()
        return None if self._is_free else TURN_END

    def _advance(self, chain: AnswerChain) -> None:
        try:
            step = self._steps.send(self._chosen)
        except StopIteration as end:
            self._is_over, self._is_free = True, bool(end.value)
            self._settle(self._tokenizer.tokens(self._open))
            return
        self._chosen = None
        if isinstance(step, str):
            self._write(step)
            return
        self._chosen = chain.choose(step, self._choices)
        self._choices += 1

    def _write(self, text: str) -> None:
        """What the tokeniser would make of the whole answer, so that it is the same tokens as a prompt's."""
        if self._tokenizer is Tokenizer.CHARACTERS:
            self._due.extend(map(ord, text))
            return
        tokens = self._tokenizer.tokens(self._open + text)
        self._open = decode(tokens[-1:])
        self._settle(tokens[:-1])

    def _settle(self, tokens: list[int]) -> None:
        """A value that holds the mark of an answer's end does not end it."""
        for token in tokens:
            self._due.extend(map(ord, decode((token,))) if token == TURN_END else (token,))
