"""Whether prompts are tokenised as engines do it: each answer's count of prompt tokens says.

A tokenizer of another model, or a template with other settings than the engine's, counts otherwise. Its tokens would
match nothing, or too little, or the prompts of others; so tokens are used only for forms of requests whose counts have
been right, several times in a row.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from ..kv_events.block_tokens import PromptTokens

log = logging.getLogger(__name__)

FORMS_LIMIT = 1024
PROVEN, _MOST, _LEAST = 3, 8, -8
_RIGHT, _WRONG = 1, -4

Form = tuple[str, ...]
"""Model, endpoint, and the members of the body that change how it is rendered."""

_RENDERED = (
    *("tools", "documents", "chat_template_kwargs", "reasoning_effort", "reasoning", "thinking", "output_config"),
    *("add_special_tokens", "add_generation_prompt", "continue_final_message"),
)


def form_of(model: str, endpoint: str, members: Iterable[str]) -> Form:
    given = set(members)
    return (model, endpoint, *(name for name in _RENDERED if name in given))


class CountCheck(msgspec.Struct, frozen=True, gc=False):
    """To be compared with what the answer says."""

    form: Form
    tokens: int


class CountedPrompt(msgspec.Struct, frozen=True):
    tokens: PromptTokens
    check: CountCheck
    is_proven: bool


class CountChecks:
    def __init__(self, on_result: Callable[[str], None] = lambda result: None) -> None:
        self._on_result = on_result
        self._scores = OrderedDict[Form, int]()

    def is_proven(self, form: Form) -> bool:
        return self._scores.get(form, 0) >= PROVEN

    def of(self, tokens: PromptTokens, form: Form) -> CountedPrompt:
        return CountedPrompt(tokens, CountCheck(form, tokens.count), self.is_proven(form))

    def learn(self, check: CountCheck, reported: int) -> None:
        """reported: the prompt's tokens, by the worker that answered."""
        form, counted = check.form, check.tokens
        is_right, was = counted == reported, self._scores.get(form, 0)
        self._on_result("right" if is_right else "wrong")
        now = min(_MOST, max(_LEAST, was + (_RIGHT if is_right else _WRONG)))
        self._scores[form] = now
        self._scores.move_to_end(form)
        if len(self._scores) > FORMS_LIMIT:
            self._scores.popitem(last=False)
        if not is_right and now < 0 <= was:
            log.warning(
                "model %s, %s: the tokenizer counts %d tokens in a prompt where the worker counts %d; it is not used "
                "for such requests until they agree (is it another model's, or has the engine another template?)",
                *(form[0], form[1], counted, reported),
            )
