"""Which lines are logged, and how they are written."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import pytest

from ppd.proxy.runtime.log_output import KINDS_LIMIT, JsonFormatter, KindLimit, LogOutput, TextFormatter


class Kept:
    """Lines in a list."""

    def __init__(self) -> None:
        self.lost = 0
        self.lines: list[str] = []

    def put(self, line: bytes) -> None:
        assert line.endswith(b"\n")
        self.lines.append(line.decode().rstrip("\n"))

    def flush(self, limit_s: float) -> None:
        pass


class Log:
    """A logger of its own behind a `LogOutput`, with a clock."""

    def __init__(self, formatter: logging.Formatter, most_a_minute: int = 0) -> None:
        self.now_s, self.kept = 100.0, Kept()
        self.output = LogOutput(self._lines, formatter, most_a_minute, lambda: self.now_s)
        self.to = logging.Logger("ppd.proxy.part", logging.DEBUG)
        self.to.addHandler(self.output)

    def _lines(self, lost_line: Callable[[int], bytes], tick: Callable[[], None]) -> Kept:
        self.tick = tick
        return self.kept


def test_each_kind_passes_so_often_a_minute_and_the_rest_is_told() -> None:
    log = Log(logging.Formatter("%(message)s"), most_a_minute=3)
    for number in range(10):
        log.to.warning("one %d", number)
    log.to.warning("other %d", 1)
    assert log.kept.lines == ["one 0", "one 1", "one 2", "other 1"]
    assert log.output.limit.held_back == 7
    log.now_s += 59
    log.tick()
    log.to.warning("one %d", 10)
    assert log.kept.lines[4:] == []
    log.now_s += 6
    log.tick()
    log.to.warning("one %d", 11)
    assert log.kept.lines[4:] == ["8 more lines of this kind were held back: one %d", "one 11"]


def test_at_the_end_what_was_held_back_is_told() -> None:
    log = Log(logging.Formatter("%(message)s"), most_a_minute=1)
    for _ in range(3):
        log.to.info("again")
    log.output.flush()
    assert log.kept.lines == ["again", "2 more lines of this kind were held back: again"]


def test_debug_is_never_held_back_and_zero_is_no_limit() -> None:
    for log in (Log(logging.Formatter("%(message)s"), 1), Log(logging.Formatter("%(message)s"), 0)):
        for _ in range(5):
            log.to.debug("again")
        assert len(log.kept.lines) == 5
    for _ in range(5):
        log.to.error("again")
    assert len(log.kept.lines) == 10


def test_messages_that_are_made_before_they_are_logged_fill_no_memory() -> None:
    limit = KindLimit(5)
    passed = sum(limit.passes(("l", f"message {number}"), 0.0) for number in range(KINDS_LIMIT + 100))
    assert passed == KINDS_LIMIT + 5
    assert list(limit.ended(60.0)) == [(("", ""), 95)]
    assert limit.passes(("l", "message 7"), 60.0)


@pytest.mark.parametrize("text", ["a\nb", "\x1b[2J", "a\r2026-01-01 ERROR ppd: forged", "\x85", "\u2028", "\u202ea"])
def test_a_value_makes_no_line_of_its_own(text: str) -> None:
    log = Log(TextFormatter())
    log.to.warning("from %s", text)
    assert len(log.kept.lines) == 1
    assert all(character.isprintable() for character in log.kept.lines[0])


def test_a_json_line_says_when_who_and_what() -> None:
    log = Log(JsonFormatter())
    try:
        raise ValueError("x")
    except ValueError:
        log.to.exception('%s "quoted"\n\ud800', "a")
    (line,) = map(json.loads, log.kept.lines)
    assert line.keys() == {"at", "level", "logger", "message", "exception"}
    assert (line["level"], line["logger"]) == ("error", "ppd.proxy.part")
    assert line["message"] == 'a "quoted"\n\ud800'
    assert "ValueError: x" in line["exception"]


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_line_that_cannot_be_made_says_where_it_is(formatter: logging.Formatter) -> None:
    log = Log(formatter)
    log.to.warning("%d", "no number")
    assert len(log.kept.lines) == 1
    assert "test_log_output:" in log.kept.lines[0]
    assert "no number" not in log.kept.lines[0]
