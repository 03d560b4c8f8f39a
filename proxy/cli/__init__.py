"""The commands `ppd serve`, `picker`, `envoy-config`, `table`, `keys`, `doctor` and `why`."""

from __future__ import annotations

import math
from typing import Any

import click

from ..errors import PPDError


class NumberRange(click.FloatRange):
    """click's own lets "nan" pass, as no comparison with it holds, and "inf", for which nobody can wait."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def host_and_port(ctx: click.Context, param: click.Parameter, value: str | tuple[str, ...] | None) -> Any:
    """A callback of options: host and port of `host:port`, with brackets around an IPv6 address; or of several."""
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple([host_and_port(ctx, param, each) for each in value])
    host, _, port = value.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16):
        raise click.BadParameter(f"{value} is not HOST:PORT, with a port from 1 to 65535")
    return host.strip("[]"), int(port)


class CommandGroup(click.Group):
    """Shows the project's own errors as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PPDError as exc:
            raise click.ClickException(exc.message) from exc
