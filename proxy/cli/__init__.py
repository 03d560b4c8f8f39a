"""The commands `ppd serve`, `table`, `keys`, `doctor` and `why`."""

from __future__ import annotations

import math
from typing import Any

import click

from ..errors import PPDError


class NumberRange(click.FloatRange):
    """click's own lets "nan" pass, as no comparison with it holds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


class CommandGroup(click.Group):
    """Shows the project's own errors as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PPDError as exc:
            raise click.ClickException(exc.message) from exc
