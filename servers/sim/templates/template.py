"""The templates by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..core.config import SimConfig, TemplateName
from ..core.reasoning import Thoughts
from . import glm, plain, qwen
from .conversation import Conversation, Text, encoded


@dataclass(frozen=True, slots=True)
class Template:
    """thoughts: how the model writes its reasoning."""

    pieces: Callable[[Conversation], Iterable[Text]]
    thoughts: Thoughts


_TEMPLATES = {
    TemplateName.PLAIN: Template(plain.pieces, plain.THOUGHTS),
    TemplateName.QWEN: Template(qwen.pieces, qwen.THOUGHTS),
    TemplateName.GLM: Template(glm.pieces, glm.THOUGHTS),
}


def render(conversation: Conversation, config: SimConfig) -> tuple[int, ...]:
    return encoded(_TEMPLATES[config.template].pieces(conversation), config.tokenizer)


def thoughts_of(config: SimConfig, thinks: bool | None) -> Thoughts | None:
    """How an answer begins; None: at once. thinks: what the request says, to which only a reasoning model listens."""
    thoughts = _TEMPLATES[config.template].thoughts
    if thinks is False:
        thoughts = replace(thoughts, none=thoughts.forbidden)
    elif config.reasoning:
        thoughts = replace(thoughts, share=1.0 if thinks else config.reasoning)
    return thoughts if thoughts.share or thoughts.none else None
