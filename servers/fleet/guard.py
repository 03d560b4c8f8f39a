"""Runs one program and makes sure that it does not outlive the process that started it.

`python guard.py FD GRACE_S PROGRAM ARGS...`; FD is the reading end of a pipe whose writing end the starter keeps.
Bytes on the pipe are orders: `T` (SIGTERM to the program) and `K` (SIGKILL to its whole group). The end of the pipe
means that the starter is gone: the program gets a SIGTERM and, GRACE_S seconds later, a SIGKILL. When the program ends,
the rest of its group is killed and its exit code is returned, 128 + signal if a signal ended it.

A pipe, not PR_SET_PDEATHSIG: that follows the thread that forked, reaches one process instead of the group, and can
only be set between fork and exec, where Python code is not safe. Standard library only, so that it starts at once.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time


def guard(orders: int, grace_s: float, program: list[str]) -> int:
    """`orders`: the file descriptor. Returns the exit code."""
    ended, notify = os.pipe()
    for end in (ended, notify):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(notify, warn_on_full_buffer=False)
    # The starter handles Ctrl-C and a service manager's SIGTERM, and sends an order.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    try:
        child = subprocess.Popen(program, stdin=subprocess.DEVNULL, process_group=0)
    except OSError as exc:
        print(f"cannot start {program[0]}: {exc}", file=sys.stderr)
        return 127
    watched = [orders, ended]
    deadline: float | None = None
    while child.poll() is None:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select(watched, [], [], left_s)
        if ended in ready:
            os.read(ended, 4096)
        order = os.read(orders, 1) if orders in ready else b""
        if orders in ready and not order:
            watched.remove(orders)
            deadline = time.monotonic() + grace_s
            child.terminate()
        elif order == b"T":
            child.terminate()
        if order == b"K" or (deadline is not None and time.monotonic() >= deadline):
            kill_group(child.pid)
    kill_group(child.pid)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
