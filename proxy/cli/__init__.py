"""The commands `ppd serve`, `picker`, `envoy-config`, `table`, `keys`, `doctor` and `why`."""

from __future__ import annotations

import errno
import math
import os
import sys
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


class Program(click.Group):
    """Says in one line which file cannot be used, or that there is no room for its output. A reader that has gone
    (`| head`) is no error."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as exc:
            if exc.filename is None and exc.errno not in _NO_ROOM:
                raise
            what = exc.filename
            if what is None:
                _drop_output()
                what = "the output cannot be written"
            click.echo(f"Error: {what}: {exc.strerror}", err=True)
            sys.exit(1)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _drop_output() -> None:
    """What is left in the buffer goes nowhere, or Python would fail at its end too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.__stdout__.fileno() if sys.__stdout__ is not None else 1)
    os.close(nowhere)


class CommandGroup(Program):
    """Shows the project's own errors as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PPDError as exc:
            raise click.ClickException(exc.message) from exc
