"""Reasoning before an answer: how a model marks it, and how much of it one answer has. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .answer_text import AnswerChain
from .tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class Thoughts:
    """opening, closing: around reasoning; none: in place of them; forbidden: where the prompt has forbidden reasoning.

    share: of answers that begin with reasoning; each is a draw of what the engine holds.
    """

    opening: str
    closing: str
    none: str = ""
    forbidden: str = ""
    share: float = 0.0


class Thinking:
    """Where one answer is in its reasoning. Kept while its sequence is preempted."""

    def __init__(self, thoughts: Thoughts, tokenizer: Tokenizer) -> None:
        self._thoughts = thoughts
        self._tokenizer = tokenizer
        self._due: deque[int] = deque()
        self._left: int | None = None  # tokens of reasoning; None: not begun
        self.tokens = 0  # so far, with the marks

    def next_token(self, chain: AnswerChain) -> int | None:
        """None once the answer itself goes on."""
        if self._left is None:
            self._left = chain.reasoning_length(self._thoughts.share)
            self._write(self._thoughts.opening if self._left else self._thoughts.none)
        if self._due:
            self.tokens += 1
            return self._due.popleft()
        if not self._left:
            return None
        self._left -= 1
        self.tokens += 1
        if not self._left:
            self._write(self._thoughts.closing)
        return chain.next_token()

    def _write(self, text: str) -> None:
        self._due.extend(self._tokenizer.tokens(text))
