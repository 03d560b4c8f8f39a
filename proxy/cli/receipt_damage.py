"""What of a receipt log cannot be read: counted, and the first few lines named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click
import msgspec

LINES_TOLD: Final = 5
REASON_LIMIT: Final = 200  # characters


@dataclass(slots=True)
class Damage:
    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)  # numbers of lines, and why

    @contextmanager
    def of_line(self, number: int) -> Iterator[None]:
        """What is left of the block is skipped where its line cannot be read."""
        try:
            yield
        except (msgspec.DecodeError, RecursionError, OverflowError, ValueError) as exc:
            self.count += 1
            if len(self.first) < LINES_TOLD:
                self.first.append((number, str(exc)[:REASON_LIMIT]))

    def tell(self, path: Path) -> None:
        """On standard error."""
        for number, why in self.first:
            click.echo(f"{path}: line {number} is skipped: {why}", err=True)
        if (more := self.count - len(self.first)) > 0:
            click.echo(f"{path}: {more} more damaged {'line is' if more == 1 else 'lines are'} skipped", err=True)
