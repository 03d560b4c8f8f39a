"""A group of commands whose mistakes are the project's own errors, shown as one line."""

from __future__ import annotations

from typing import Any

import click

from ..errors import PPDError


class CommandGroup(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PPDError as exc:
            raise click.ClickException(exc.message) from exc
