"""Starts the processes of one proxy, keeps them up, and ends them.

It does nothing else, so that it never dies with them: it has no event loop, no thread, and no traffic. It holds the
listening socket and the wires open, so a client that comes while a process is down is accepted by another one.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from .channels import wires
from .member import Member

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
AGAIN_S = (0.5, 10.0)  # between a process' end and its successor's start: the first time, and at most
QUICK_S = 5.0  # one that ends sooner than this has not served, and its successor is in less of a hurry
UNUSABLE = os.EX_CONFIG  # the exit code of a process that cannot begin with these settings

Work = Callable[[Member, int], int]
"""One process: its exit code. The number is a pipe's, whose other end is closed when the supervisor is gone."""


@dataclass(slots=True)
class _Child:
    member: Member
    pid: int = 0  # 0: down
    started_s: float = 0.0
    starts: int = 0
    quick_ends: int = 0  # in a row
    due_s: float = 0.0  # when to start it, while it is down


@dataclass(slots=True)
class Supervisor:
    """`run` returns when all processes have ended: 0 after a signal, else the code of the one that could not begin."""

    count: int
    work: Work
    on_stop: Callable[[], None]
    """When the end begins: closes what must take no more clients."""
    _children: list[_Child] = field(default_factory=list)
    _stopping: signal.Signals | None = None
    _code: int = 0

    def run(self) -> int:
        first = Member()
        self._children = [
            _Child(Member(index=index, ends=ends, secret=first.secret)) for index, ends in enumerate(wires(self.count))
        ]
        # Blocked but while it waits for one of them: no signal comes between a look at its children and that wait.
        watched = {*SIGNALS, signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        alive, still_here = os.pipe()
        try:
            return self._keep(alive, still_here, watched)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
            os.close(alive)
            os.close(still_here)

    def _keep(self, alive: int, still_here: int, watched: set[signal.Signals]) -> int:
        while True:
            now_s = time.monotonic()
            if self._stopping is None:
                for child in self._children:
                    if not child.pid and now_s >= child.due_s:
                        self._start(child, alive, still_here, watched)
            elif not any(child.pid for child in self._children):
                return self._code
            waits_s = [child.due_s - now_s for child in self._children if not child.pid and self._stopping is None]
            came = signal.sigtimedwait(watched, max(0.0, min(waits_s, default=3600.0)))
            if came is not None and came.si_signo in SIGNALS:
                self._stop(signal.Signals(came.si_signo))
            self._bury()

    def _start(self, child: _Child, alive: int, still_here: int, watched: set[signal.Signals]) -> None:
        child.started_s = time.monotonic()
        child.starts += 1
        child.pid = os.fork()
        if child.pid:
            return
        code = 1
        try:
            # A terminal's signals are for the supervisor, which passes them on: twice would end it without draining.
            os.setpgid(0, 0)
            os.close(still_here)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
            code = self.work(child.member, alive)
        except BaseException:
            log.exception("a process of the proxy failed")
        finally:
            logging.shutdown()
            os._exit(code)

    def _stop(self, number: signal.Signals) -> None:
        order = signal.SIGTERM
        if self._stopping is None:
            log.info("draining; a second signal ends the processes at once")
            self.on_stop()
        else:  # they may have had the first one twice, from us and from whoever sends it to all
            order = signal.SIGKILL
            self._code = 128 + number  # as a shell calls what a signal has ended
        self._stopping = number
        for child in self._children:
            if child.pid:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, order)

    def _bury(self) -> None:
        """Notes who has ended, and when a successor is due."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            child = next((child for child in self._children if child.pid == pid), None)
            if child is None:
                continue
            child.pid = 0
            if self._stopping is not None:
                continue
            now_s, code = time.monotonic(), os.waitstatus_to_exitcode(status)
            if code == UNUSABLE and child.starts == 1:  # a successor, while others serve, is tried again instead
                self._stop(signal.SIGTERM)
                self._code = code
                continue
            child.quick_ends = child.quick_ends + 1 if now_s - child.started_s < QUICK_S else 0
            first_s, most_s = AGAIN_S
            child.due_s = now_s + min(most_s, first_s * 2.0 ** min(child.quick_ends, 10))
            log.error("process %d of the proxy ended (%d) and is started again", child.member.index, code)
