"""The process's limits: glibc's for the heap, the garbage collector's thresholds, and the number of open files.

glibc raises two thresholds as large buffers are freed: above which size it maps a buffer instead of taking it from the
heap, and how much of the heap's top it keeps. Requests of mixed sizes then leave holes, and the resident set grows by
200 bytes a request although nothing is kept. Thresholds that are set with mallopt(3) stay as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import resource
import sys
import threading
from collections.abc import Callable

from ..errors import ConfigError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
# A mapped buffer is fresh memory each time, page by page, and made turns of 600 KB a third slower. So the bodies of
# ordinary turns come from the heap, which keeps the memory that a few of them need.
_MMAP_BYTES = 2 * 1024 * 1024
_TRIM_BYTES = 8 * _MMAP_BYTES


def limit_heap() -> None:
    """Sets glibc's thresholds for the whole process; does nothing with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _TRIM_BYTES)
        mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)


def collect_garbage_less() -> None:
    """A turn's objects have no cycles: reference counts free them, while the collector took a sixth of a turn's time.

    Objects that exist at the start live as long as the process and are never collected. To look at 10,000
    new ones takes 10 ms; 50,000 would save nothing, and keep all turns waiting for 80 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


NO_FILES = (errno.EMFILE, errno.ENFILE)  # of an OSError: this process, or the whole machine, can open no more files
_RESERVE = 128  # listening sockets, probes of workers, files, what Python has open
_A_TURN_NEEDS = 3  # its client's connection, and its legs'


THREADS = 12  # of one process: uvloop's, ZeroMQ's, and those that write the logs; more come, but need not


def check_threads(start: Callable[[threading.Thread], None] = threading.Thread.start) -> None:
    """ConfigError for a process that may not have its threads: libraries would end it without a word."""
    may_end, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(THREADS):
            thread = threading.Thread(target=may_end.wait, daemon=True)
            start(thread)
            started.append(thread)
    except RuntimeError as exc:
        raise ConfigError(
            f"the proxy needs {THREADS} threads for each of its processes, and may not start as many: raise the limit "
            "of its user (ulimit -u), service (TasksMax) or container (pids)"
        ) from exc
    finally:
        may_end.set()
        for thread in started:
            thread.join()


def raise_open_files_limit() -> None:
    """Raises the soft limit of open files to the hard one. The usual 1024 is for programs that use select().

    ConfigError where not one client's turn could have its files.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS names a hard limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if (limit := open_files_limit()) < (least := _RESERVE + _A_TURN_NEEDS):
        raise ConfigError(
            f"the proxy may have {limit} files open, and needs {least} at least, and {_A_TURN_NEEDS} more for each "
            "further client: raise the limit of its user (ulimit -n) or service (LimitNOFILE)"
        )


def open_files_limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def share_of_clients(limit: int) -> int:
    """How many connections of clients leave enough files for each one's turn."""
    return max(1, (limit - _RESERVE) // _A_TURN_NEEDS)


def share_of_gateways(limit: int) -> int:
    """How many connections of gateways to a picker: each has many turns, whose legs are the gateway's own."""
    return max(1, share_of_clients(limit) // 4)
