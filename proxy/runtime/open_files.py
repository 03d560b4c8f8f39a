"""Open files: each connection is one, and a process may have a limited number of them."""

from __future__ import annotations

import contextlib
import resource
import sys

_RESERVE = 128  # sockets that listen, probes of workers, files, what Python has open
_A_TURN_NEEDS = 3  # its client's connection, and its legs'


def raise_limit() -> None:
    """To what the system allows this process: the usual soft limit of 1024 is there for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS names a hard limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int:
    """How many this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def share_of_clients(limit: int) -> int:
    """So many connections of clients leave each of them what its turn needs."""
    return max(1, (limit - _RESERVE) // _A_TURN_NEEDS)
