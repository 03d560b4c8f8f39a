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
from .tokens import TURN_END

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

    def guide(self) -> Guide:
        return Guide(self._steps())

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

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._chosen: Any = None
        self._choices = 0
        self._due: deque[str] = deque()
        self._is_over = self._is_free = False

    def next_token(self, chain: AnswerChain) -> int | None:
        """The end-of-answer token once the form is complete; None where any text may follow."""
        while not self._due and not self._is_over:
            self._advance(chain)
        if self._due:
            return ord(self._due.popleft())
        return None if self._is_free else TURN_END

    def _advance(self, chain: AnswerChain) -> None:
        try:
            step = self._steps.send(self._chosen)
        except StopIteration as end:
            self._is_over, self._is_free = True, bool(end.value)
            return
        self._chosen = None
        if isinstance(step, str):
            self._due.extend(step)
            return
        self._chosen = chain.choose(step, self._choices)
        self._choices += 1
