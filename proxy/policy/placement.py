"""Chooses a worker of each role. P and D are chosen independently, except that they must be able to pair."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

from ..connectors import can_pair
from ..fleet.residency import Residency, stale_reason
from ..fleet.view import WorkerView
from ..fleet.worker import Role
from .decision import Turn

KV_FULL = 0.95  # at this share of KV blocks in use, a new session would evict or preempt others
LEAST_FACTOR = 0.1  # where slow start begins: a worker that has just joined counts as ten times as loaded

AFFINITY_FACTOR = 1.25  # a preferred worker may have so many times the requests of the least loaded one

Rank = tuple[float, ...]

SlowStart = Callable[[WorkerView], float]
"""A worker's slow-start factor, in (0, 1]; its load is divided by it."""


def slow_start_factor(view: WorkerView, now_s: float, warm_up_s: float) -> float:
    """Grows linearly over `warm_up_s`: a cold engine still compiles, and its caches are empty."""
    age_s = now_s - view.since_s
    return 1.0 if warm_up_s <= 0 or age_s >= warm_up_s else max(LEAST_FACTOR, age_s / warm_up_s)


def pick_decode(turn: Turn, candidates: Sequence[WorkerView], slow_start: SlowStart) -> WorkerView | None:
    """The session's own worker if it still holds the prefix, else the least loaded one with room for its KV.

    A session whose prefix nobody holds goes to the worker that it prefers, as far as that has not much more to do.
    """
    if turn.decode is not None:
        for view in candidates:
            if view.worker.address == turn.decode.worker and stale_reason(turn.decode, view) is None:
                return view
    best = _first(candidates, lambda view: _load_rank(view, slow_start(view)), turn.session_id)
    for view in candidates:
        if view.worker.address == turn.affinity and best is not None and _has_room_beside(view, best, slow_start):
            return view
    return best


def pick_prefill(turn: Turn, candidates: Sequence[WorkerView], slow_start: SlowStart) -> WorkerView | None:
    """The P that will finish this prompt first: queued prefill tokens plus those that it must compute itself."""

    def tokens_until_done(view: WorkerView) -> tuple[float, int]:
        tokens = view.queued_prefill_tokens + turn.prompt_tokens - held_on(turn.prefill, view, turn.held_tokens)
        return (tokens / slow_start(view), view.requests)

    return _first(candidates, tokens_until_done, turn.session_id)


def held_on(residency: Residency | None, view: WorkerView, prefix_tokens: int) -> int:
    if residency is None or residency.worker != view.worker.address or stale_reason(residency, view) is not None:
        return 0
    return min(residency.tokens, prefix_tokens)


def _has_room_beside(view: WorkerView, best: WorkerView, slow_start: SlowStart) -> bool:
    requests, least = (view.requests + 1) / slow_start(view), (best.requests + 1) / slow_start(best)
    return view.load.kv_usage < KV_FULL and requests <= least * AFFINITY_FACTOR


def _load_rank(view: WorkerView, factor: float) -> tuple[bool, float, float]:
    requests = (view.requests + 1) / factor
    return (view.load.kv_usage >= KV_FULL, requests, round(view.load.kv_usage, 2))


def _first(
    candidates: Sequence[WorkerView], rank_of: Callable[[WorkerView], Rank], session_id: str
) -> WorkerView | None:
    # Only workers of equal rank are hashed, as that costs more than all the rest.
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    ranks = [rank_of(view) for view in candidates]
    least = min(ranks)
    equals = [view for view, rank in zip(candidates, ranks, strict=True) if rank == least]
    return equals[0] if len(equals) == 1 else min(equals, key=lambda view: _spread(view, session_id))


def _spread(view: WorkerView, session_id: str) -> bytes:
    # Rendezvous hashing: sessions spread evenly over equal workers, and each always gets the same one.
    return sha256(f"{view.id} {session_id}".encode()).digest()


def ways_to_serve(views: Iterable[WorkerView]) -> dict[str, bool]:
    """Which routes the fleet could take now, as `/ready` reports them."""
    able = [view for view in views if view.state == "up"]
    decodes = [view for view in able if view.role is Role.DECODE]
    prefills = [view for view in able if view.role is Role.PREFILL]
    return {
        "split": any(can_pair(p.worker, d.worker) for p in prefills for d in decodes),
        "local": bool(decodes),
        "replica": any(view.role is Role.REPLICA for view in able),
    }
