"""Starts the processes of one proxy, kills those that hang, restarts those that end, and stops them.

It has no event loop, no thread and no traffic, so that what kills a process does not kill it. It holds the listening
socket and the channels open, so another process accepts a client that connects while one is down. It also reads keys
and certificates that have changed, so a successor begins with the newest that were valid.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from ..runtime.watched_files import WATCH_EVERY_S
from . import pulse
from .channels import Member, make_ends
from .pulse import PulseWatch

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
AGAIN_S = (0.5, 10.0)  # from a process's end to its successor's start: at first, and at most
QUICK_S = 5.0  # a process that ends sooner than this has not served, and its successor waits longer
UNUSABLE = os.EX_CONFIG  # the exit code of a process that cannot begin with these settings

Work = Callable[[Member, int], int]
"""Runs one process and returns its exit code. The int is a pipe whose other end closes when the supervisor dies."""


@dataclass(slots=True)
class _Child:
    member: Member
    pid: int = 0  # 0: down
    started_s: float = 0.0
    starts: int = 0
    quick_ends: int = 0  # in a row
    due_s: float = 0.0  # when to start it, while it is down
    is_hung: bool = False  # and was killed for it
    watch: PulseWatch = field(default_factory=lambda: PulseWatch(0))


@dataclass(slots=True)
class Supervisor:
    """`run` returns when all have ended: 0 after a signal and a whole drain, else the code, as a shell tells it, of
    the process that could not start, or of the first one that did not end its drain."""

    count: int
    work: Work
    on_stop: Callable[[], None]
    """Called when the shutdown begins: closes what must accept no more clients."""
    reread: Callable[[], None] = lambda: None
    """Called every `WATCH_EVERY_S` until then: reads what has changed, for successors."""
    _children: list[_Child] = field(default_factory=list)
    _stopping: signal.Signals | None = None
    _code: int = 0
    _looked_s: float = 0.0
    _reread_s: float = 0.0

    def run(self) -> int:
        first = Member()
        self._children = [
            _Child(Member(index=index, ends=ends, secret=first.secret))
            for index, ends in enumerate(make_ends(self.count))
        ]
        # Blocked except in `sigtimedwait`, so that no signal is lost between a look at the children and that wait.
        watched = {*SIGNALS, signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        alive, still_here = os.pipe()
        try:
            return self._keep(alive, still_here, watched)
        finally:
            if self._stopping is not None:
                for number in SIGNALS:  # one that comes when all have ended must not make a whole drain a failure
                    signal.signal(number, signal.SIG_IGN)
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
            came = signal.sigtimedwait(watched, max(0.0, min([pulse.LOOK_S, *waits_s])))
            if came is not None and came.si_signo in SIGNALS:
                self._stop(signal.Signals(came.si_signo))
            self._look()
            self._reread()
            self._reap()

    def _look(self) -> None:
        """Kills the processes whose loops stand still; SIGKILL also ends one that is stopped."""
        now_s = time.monotonic()
        since_s = now_s - self._looked_s
        if since_s < pulse.LOOK_S:
            return
        self._looked_s = now_s
        for child in self._children:
            if child.pid and child.watch.hangs(child.member.pulse.beats, since_s):
                log.error("process %d of the proxy does not react and is killed", child.member.index)
                child.is_hung, child.watch.silent_looks = True, 0
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)

    def _reread(self) -> None:
        now_s = time.monotonic()
        if self._stopping is not None or now_s - self._reread_s < WATCH_EVERY_S:
            return
        self._reread_s = now_s
        try:
            self.reread()
        except Exception:  # whatever a file holds, the processes go on
            log.exception("changed files could not be read")

    def _start(self, child: _Child, alive: int, still_here: int, watched: set[signal.Signals]) -> None:
        child.started_s = time.monotonic()
        child.starts += 1
        child.is_hung = False
        child.watch = PulseWatch(child.member.pulse.beats)
        child.pid = os.fork()
        if child.pid:
            return
        code = 1
        try:
            # The supervisor passes a terminal's signals on. With them twice, the child would end without draining.
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
        else:  # not SIGTERM: a child may have had the first one twice, from us and from whoever signals the group
            order = signal.SIGKILL
            self._code = 128 + number  # a shell's exit code for a process that a signal ended
        self._stopping = number
        for child in self._children:
            if child.pid:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, order)

    def _note_drained(self, child: _Child, code: int) -> None:
        """A process that ends in the drain by anything but its end has cut its streams, which `run` tells.

        One that ends by SIGTERM had not begun to serve, and what a second signal ends is known.
        """
        if self._code or code in (0, -signal.SIGTERM):
            return
        log.error("process %d of the proxy ended (%d) before it had drained", child.member.index, code)
        self._code = code if code > 0 else 128 - code

    def _reap(self) -> None:
        """Notes which children have ended, and when their successors are due."""
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
            now_s, code = time.monotonic(), os.waitstatus_to_exitcode(status)
            if self._stopping is not None:
                self._note_drained(child, code)
                continue
            if (
                code == UNUSABLE and child.starts == 1
            ):  # at its first start; a successor is started again, as others serve meanwhile
                self._stop(signal.SIGTERM)
                self._code = code
                continue
            child.quick_ends = child.quick_ends + 1 if now_s - child.started_s < QUICK_S else 0
            first_s, most_s = AGAIN_S
            pause_s = min(most_s, first_s * 2.0 ** min(child.quick_ends, 10))
            child.due_s = now_s if child.is_hung else now_s + pause_s  # it was missed for long enough
            log.error("process %d of the proxy ended (%d) and is started again", child.member.index, code)
