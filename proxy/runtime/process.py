"""What each serving process begins with: its event loop, its log, and the signals that end it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from ..config import LogFormat, ProxyConfig
from .line_writer import DescriptorSink, DirectLines, Lines, LineWriter
from .log_output import LogOutput, start_log

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STDERR = 2


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop where it is installed, which is not on Windows: it saves a third of a request's time."""
    try:
        from .uv_loop import UvLoop
    except ImportError:
        return asyncio.new_event_loop()
    return UvLoop()


def log_to_stderr(config: ProxyConfig, *, has_threads: bool = True) -> LogOutput:
    """has_threads: False for a process that forks."""
    return start_log(
        _threaded if has_threads else _direct,
        level=logging.getLevelNamesMapping()[config.log_level.upper()],
        as_json=config.log_format is LogFormat.JSON,
        most_a_minute=config.log_lines_per_minute,
    )


def _threaded(lost_line: Callable[[int], bytes], tick: Callable[[], None]) -> Lines:
    return LineWriter(DescriptorSink(STDERR), lost_line, tick)


def _direct(lost_line: Callable[[int], bytes], tick: Callable[[], None]) -> Lines:
    return DirectLines(STDERR, lost_line)


def ignore_hangups() -> None:
    """They have other servers read their files or open their logs again, which this one does by itself; unheeded they
    would cut all streams."""
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def stop_on_signals(*, twice_ends: bool) -> asyncio.Event:
    """Set by SIGTERM or SIGINT. twice_ends: a second one ends the process at once, by the default handler."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def signalled() -> None:
        stop.set()
        if twice_ends:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL)
            log.info("draining; a second signal ends the process at once")

    for number in SIGNALS:
        loop.add_signal_handler(number, signalled)
    return stop
