"""How much of a session's prefix a worker holds, with the evidence for it."""

from __future__ import annotations

import msgspec

from .view import WorkerView
from .worker import WorkerId


class Residency(msgspec.Struct, frozen=True):
    """What one worker held when a turn of a session ended there.

    `stamp` dates the record in tokens, not seconds: it is the worker's running count of tokens written to its KV
    cache. An LRU cache that has since written more than its capacity no longer holds the prefix.
    """

    worker: WorkerId
    incarnation: str  # of the worker at that time; if it has another one now, its cache is gone
    tokens: int  # of the session's prefix, from its start
    stamp: int


def stale_reason(residency: Residency, view: WorkerView) -> str | None:
    """Why the record no longer holds: `decode_restarted` or `evicted`; None where it holds."""
    if residency.incarnation != view.incarnation:
        return "decode_restarted"
    capacity = view.load.kv_capacity_tokens  # 0: unknown, and the record is then taken to hold
    written = view.written_tokens - residency.stamp
    return "evicted" if capacity and residency.tokens + written > capacity else None
