"""The commands `ppd serve`, `table`, `keys`, `doctor` and `why`."""

from __future__ import annotations

from typing import Any

import click

from ..errors import PPDError


class CommandGroup(click.Group):
    """Shows the project's own errors as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PPDError as exc:
            raise click.ClickException(exc.message) from exc
