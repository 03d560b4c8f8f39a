"""The flags of `ppd serve`: one for each key of the config, with its help, under its group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from ..config import KEYS
from ..config.key import Key


class KeyType(click.types.StringParamType):
    """Passes the text on, as the config checks it with all that is wrong; completes the values of a choice."""

    def __init__(self, key: Key) -> None:
        self.name = key.type_name
        self._choices = key.choices

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(choice) for choice in self._choices if choice.startswith(incomplete)]


class KeyFlag(click.Option):
    def __init__(self, key: Key, text: str = "") -> None:
        """text: what the key is for in a program other than the proxy, if the key itself does not say so."""
        self.group = key.group
        flag = f"--{key.name.replace('_', '-')}"
        if isinstance(key.default, bool):
            super().__init__([f"{flag}/--no-{flag[2:]}", key.name], default=None, help=_help(key, text or key.text))
            return
        super().__init__(
            [flag, key.name],
            type=KeyType(key),
            metavar=f"[{'|'.join(key.choices)}]" if key.choices else key.type_name.upper(),
            multiple=isinstance(key.default, tuple),
            default=None,
            help=_help(key, text or key.text),
            envvar=key.variable if key.is_secret else None,  # all users can see a command line
        )


def _help(key: Key, text: str) -> str:
    default = ", ".join(key.default) if isinstance(key.default, tuple) else str(key.default)
    notes = [f"default: {default}"] if default and not key.is_secret else []
    notes += [f"or {key.variable}"] if key.is_secret else []
    notes += ["may be given several times"] if isinstance(key.default, tuple) else []
    text = text.replace("`", "")
    return f"{text[0].upper()}{text[1:]}." + (f"  [{'; '.join(notes)}]" if notes else "")


class ConfigCommand(click.Command):
    """A command with a flag for each key, and help in the keys' groups."""

    def __init__(self, name: str, callback: Callable[..., Any], help: str, params: list[click.Parameter]) -> None:
        super().__init__(name, callback=callback, help=help, params=[*params, *map(KeyFlag, KEYS.values())])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(param, "group", "Options"), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)
