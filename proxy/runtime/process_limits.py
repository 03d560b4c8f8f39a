"""Keeps the process's memory from growing with its traffic, and from being searched for garbage that is not there.

glibc raises two of its limits as large buffers are freed: what it takes from the heap instead of mapping it, and what
it keeps of the heap's top instead of giving it back. Requests of mixed sizes then leave holes, and the resident set
creeps up by 200 bytes a request although nothing is kept. Set by hand the limits stay (mallopt(3)).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
# A buffer that is mapped is fresh memory each time, page by page: turns of 600 KB took a third longer for it. So the
# bodies of ordinary turns come from the heap, and what a few of them need there stays.
_MMAP_BYTES = 2 * 1024 * 1024
_TRIM_BYTES = 8 * _MMAP_BYTES


def bound() -> None:
    """For the whole process; nothing where the C library is another one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _TRIM_BYTES)
        mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)


def look_for_cycles_less() -> None:
    """What a turn makes is freed by its references; the collector, which is for cycles, took a sixth of its time.

    What is there at the start stays for the life of the process, and need not be looked through again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


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
