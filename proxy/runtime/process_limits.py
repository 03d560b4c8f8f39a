"""Keeps the process's memory from growing with its traffic, and from being searched for garbage that is not there.

glibc raises two of its limits as large buffers are freed: what it takes from the heap instead of mapping it, and what
it keeps of the heap's top instead of giving it back. Requests of mixed sizes then leave holes, and the resident set
creeps up by 200 bytes a request although nothing is kept. Set by hand the limits stay (mallopt(3)).
"""

from __future__ import annotations

import ctypes
import gc
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
