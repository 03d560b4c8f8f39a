"""What is known of the chat templates of models, as far as it decides which prompts begin alike."""

from __future__ import annotations

import re
from fnmatch import translate
from functools import lru_cache

import msgspec


class Template(msgspec.Struct, frozen=True, gc=False):
    tools_first: bool = False  # it renders the tools before the system's text
    prints_call_ids: bool = False


PLAIN = Template()


class Templates(msgspec.Struct, frozen=True):
    """Of all models. A helper process is sent it."""

    with_call_ids: tuple[str, ...] = ()  # patterns of models' names, `*` standing for any characters
    tools_first: frozenset[str] = frozenset()  # models

    def of(self, *names: str) -> Template:
        """names: all by which one model is known."""
        return Template(
            not self.tools_first.isdisjoint(names),
            any(_matches(self.with_call_ids, name) for name in names),
        )


NO_TEMPLATES = Templates()


@lru_cache(256)
def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return _pattern(patterns).match(name.casefold()) is not None


@lru_cache(8)
def _pattern(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(translate(one.casefold()) for one in patterns) or r"(?!)")
