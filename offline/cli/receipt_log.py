"""What the commands about a receipt log have in common: it is read, and its damage named on standard error."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ppd.proxy.errors import ConfigError
from ppd.proxy.telemetry.receipts import open_receipts, receipt_lines

from ..experiment.files import UNREADABLE
from ..replay.past_turns import PastLog, read_log


class _Members(msgspec.Struct):
    """That a receipt has, and no row of a trace."""

    session: str
    turn: int
    legs: list[msgspec.Raw]


def opened(path: Path) -> PastLog:
    """ConfigError where no turn is left."""
    try:
        with open_receipts(path) as file:
            log = read_log(receipt_lines(file))
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}", param="log") from exc
    log.damage.tell(path)
    if log.is_empty:
        raise ConfigError(f"{path}: is empty: a receipt is written when its turn ends", param="log")
    if not log.turns:
        raise ConfigError(f"{path}: no line is the receipt of a turn that a worker took on", param="log")
    return log


def is_receipt_log(path: Path) -> bool:
    """By the first of its lines that is whole; ConfigError where it cannot be read."""
    try:
        with open_receipts(path) as file:
            for _, line in receipt_lines(file):
                try:
                    msgspec.json.decode(line, type=_Members)
                except UNREADABLE:
                    if line.isspace() or not _is_json(line):
                        continue
                    return False
                return True
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}", param="log") from exc
    return False


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except UNREADABLE:
        return False
    return True
