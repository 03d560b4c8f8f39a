"""The process's log: off the event loop, each kind of line at most so often, as text or as JSON."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from .line_writer import Lines

WINDOW_S = 60.0
LOOK_EVERY_S = 5.0
KINDS_LIMIT = 1000
FLUSH_S = 1.0
OUR_LOGS = "ppd"

MakeLines = Callable[[Callable[[int], bytes], Callable[[], None]], Lines]
"""Given what makes the line about lost ones, and what is to be done every few seconds."""

Kind = tuple[str, str]
"""Name of the logger and the message before its values are put in."""

_BIDI = (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))  # they turn a line round, or end it
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {9: "\t"}
_CONTROL |= {code: f"\\u{code:04x}" for code in _BIDI}


@dataclass(slots=True)
class _Window:
    ends_s: float
    passed: int = 0
    held_back: int = 0


class KindLimit:
    """Lets each kind of line pass `most` times a minute; 0: without a limit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._windows: dict[Kind, _Window] = {}
        self.held_back = 0  # of all kinds, ever

    def passes(self, kind: Kind, now_s: float) -> bool:
        if not self._most:
            return True
        if kind not in self._windows and len(self._windows) >= KINDS_LIMIT:
            kind = ("", "")  # messages that were made before they were logged
        window = self._windows.setdefault(kind, _Window(now_s + WINDOW_S))
        window.passed += 1
        if window.passed <= self._most:
            return True
        window.held_back += 1
        self.held_back += 1
        return False

    def ended(self, now_s: float) -> Iterator[tuple[Kind, int]]:
        """Kinds whose minute is over, each with how many lines were held back; those with none are left out."""
        for kind, window in list(self._windows.items()):
            if window.ends_s <= now_s:
                del self._windows[kind]
                if window.held_back:
                    yield kind, window.held_back


class LogOutput(logging.Handler):
    """The one handler of all loggers."""

    def __init__(
        self,
        make_lines: MakeLines,
        formatter: logging.Formatter,
        most_a_minute: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.limit = KindLimit(most_a_minute)
        self._now = now
        self._next_look_s = now()
        self.lines = make_lines(self._lost_line, self._tick)

    def emit(self, record: logging.LogRecord) -> None:
        now_s = self._now()
        self._tell_held_back(now_s)
        kind = (record.name, record.msg if isinstance(record.msg, str) else type(record.msg).__name__)
        # Whoever asks for DEBUG wants every line.
        if record.levelno <= logging.DEBUG or self.limit.passes(kind, now_s):
            self.lines.put(self._encoded(record))

    def flush(self) -> None:
        """At the end, within a second."""
        self.acquire()
        try:
            self._tell_held_back(math.inf)
        finally:
            self.release()
        self.lines.flush(FLUSH_S)

    def _tick(self) -> None:
        self.acquire()
        try:
            self._tell_held_back(self._now())
        finally:
            self.release()

    def _tell_held_back(self, now_s: float) -> None:
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_EVERY_S
        for (name, template), count in self.limit.ended(now_s):
            self._put(f"{count} more lines of this kind were held back: {template[:200]}", name)

    def _put(self, text: str, name: str = "") -> None:
        self.lines.put(self._encoded(_warning(text, name)))

    def _lost_line(self, count: int) -> bytes:
        return self._encoded(_warning(f"{count} log lines were lost: nothing took them for too long"))

    def _encoded(self, record: logging.LogRecord) -> bytes:
        try:
            text = self.format(record)
        except Exception:  # values that do not fit their text; logging's own way would write to stderr
            text = self.format(_warning(f"a line of {record.module}:{record.lineno} could not be made"))
        return text.encode(errors="backslashreplace") + b"\n"


def _warning(text: str, name: str = "") -> logging.LogRecord:
    return logging.LogRecord(name or OUR_LOGS, logging.WARNING, "", 0, text, None, None)


class TextFormatter(logging.Formatter):
    """One line, whatever was put into it; a traceback follows on lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = record.message.translate(_CONTROL)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json_line(line).decode()


def json_line(line: Mapping[str, object]) -> bytes:
    """In ASCII, so that no reader's lines end, and no terminal is steered, within it."""
    with suppress(UnicodeEncodeError):  # half a surrogate pair, as of a file name that is not UTF-8
        if (encoded := msgspec.json.encode(line)).isascii():
            return encoded
    return json.dumps(line, separators=(",", ":")).encode()


def fill_standard_streams() -> None:
    """Opens /dev/null for those that are closed: else a client's connection would get their number, and log lines."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number


def start_log(lines: MakeLines, *, level: int, as_json: bool, most_a_minute: int) -> LogOutput:
    """Replaces what the root logger had.

    DEBUG is for our own loggers only: libraries would log their data, such as hpack every header, keys included.
    """
    output = LogOutput(lines, JsonFormatter() if as_json else TextFormatter(), most_a_minute)
    logging.basicConfig(level=max(level, logging.INFO), handlers=[output], force=True)
    logging.getLogger(OUR_LOGS).setLevel(level)
    logging.captureWarnings(True)
    sys.unraisablehook = _unraisable
    return output


def _unraisable(found: sys.UnraisableHookArgs) -> None:
    """Python would write it to stderr, which may be full."""
    kind, value, trace = found.exc_type, found.exc_value, found.exc_traceback
    exc_info = (kind, value, trace) if value is not None else None
    logging.getLogger(OUR_LOGS).error("%s: %s", found.err_msg or "ignored", found.object.__class__, exc_info=exc_info)
