"""How many legs a D or R should have at once, learnt from what its engine says of its queue.

No engine tells its limit, and it depends on the requests: on `max_num_seqs`, or on the KV that they need. So a worker
starts with a few places. As long as nothing waits inside the engine, a worker whose places are all taken gets half as
many more; one that keeps a queue loses what is in it, but for a few requests that keep the next batch full. What has no
place waits in the proxy's queue, where it can still go to any worker, or be refused.
"""

from __future__ import annotations

from .worker import Load

UNKNOWN = 0  # the engine reports no load: the operator's limit holds alone
START = 16
LEAST = 2  # legs that any worker may have
MOST = 1 << 16


def learned(places: int, inflight: int, before: Load, load: Load) -> int:
    """The places of a worker with `inflight` legs after a report of its load; before: the report before that."""
    if not (load.kv_capacity_tokens or load.running or load.waiting):
        return places
    if places == UNKNOWN:
        return max(START, load.running)
    # One sample does not tell a full engine from one that is just reading a burst of prompts into its batch.
    keeps_queue = load.waiting > 0 and before.waiting > 0 and load.running <= before.running
    if keeps_queue:
        kept = max(LEAST, load.running // 8)
        surplus = load.waiting - kept
        return places if surplus <= 0 else max(load.running + kept, min(places, inflight - surplus))
    if load.waiting == 0 and inflight >= places:
        return min(MOST, places + places // 2)
    return places
