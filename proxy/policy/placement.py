"""Choosing a worker of each role. P and D are picked independently of each other, but for what can pair."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

from ..connectors import can_pair
from ..fleet.residency import Residency, standing
from ..fleet.view import WorkerView
from ..fleet.worker import Role
from .decision import Turn

KV_FULL = 0.95  # at this share of KV blocks in use, a new session would evict or preempt others
COLDEST = 0.1  # a worker that has just come counts as ten times as loaded

Rank = tuple[float, ...]

Warmth = Callable[[WorkerView], float]
"""How much of its share of traffic a worker may have by now, in (0, 1]."""


def warmth_of(view: WorkerView, now_s: float, warm_up_s: float) -> float:
    """A worker's share grows in a line over `warm_up_s`: a cold engine compiles, and its caches are empty."""
    age_s = now_s - view.since_s
    return 1.0 if warm_up_s <= 0 or age_s >= warm_up_s else max(COLDEST, age_s / warm_up_s)


def pick_decode(turn: Turn, candidates: Sequence[WorkerView], warmth: Warmth) -> WorkerView | None:
    """The session's own worker if it still holds the prefix, else the least loaded with room for its KV."""
    if turn.decode is not None:
        for view in candidates:
            if view.worker.address == turn.decode.worker and standing(turn.decode, view) is None:
                return view
    return _first(candidates, lambda view: _load_rank(view, warmth(view)), turn.session_id)


def pick_prefill(turn: Turn, candidates: Sequence[WorkerView], warmth: Warmth) -> WorkerView | None:
    """The P that will have computed this prompt soonest: queued prefill tokens plus those it must compute itself."""

    def tokens_until_done(view: WorkerView) -> tuple[float, int]:
        tokens = view.queued_prefill_tokens + turn.prompt_tokens - held_on(turn.prefill, view, turn.held_tokens)
        return (tokens / warmth(view), view.requests)

    return _first(candidates, tokens_until_done, turn.session_id)


def held_on(residency: Residency | None, view: WorkerView, prefix_tokens: int) -> int:
    """Tokens of a prefix that this worker is believed to hold."""
    if residency is None or residency.worker != view.worker.address or standing(residency, view) is not None:
        return 0
    return min(residency.tokens, prefix_tokens)


def _load_rank(view: WorkerView, warmth: float) -> tuple[bool, float, float]:
    requests = (view.requests + 1) / warmth
    return (view.load.kv_usage >= KV_FULL, requests, round(view.load.kv_usage, 2))


def _first(
    candidates: Sequence[WorkerView], rank_of: Callable[[WorkerView], Rank], session_id: str
) -> WorkerView | None:
    """The worker of the least rank. Only equals are hashed, as that costs more than all the rest."""
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    ranks = [rank_of(view) for view in candidates]
    least = min(ranks)
    equals = [view for view, rank in zip(candidates, ranks, strict=True) if rank == least]
    return equals[0] if len(equals) == 1 else min(equals, key=lambda view: _spread(view, session_id))


def _spread(view: WorkerView, session_id: str) -> bytes:
    """Rendezvous hashing: among equals, sessions spread evenly and the same one always lands the same."""
    return sha256(f"{view.id} {session_id}".encode()).digest()


def ways_to_serve(views: Iterable[WorkerView]) -> dict[str, bool]:
    """Which routes the fleet could take now: what `/ready` answers."""
    able = [view for view in views if view.state == "up"]
    decodes = [view for view in able if view.role is Role.DECODE]
    prefills = [view for view in able if view.role is Role.PREFILL]
    return {
        "split": any(can_pair(p.worker, d.worker) for p in prefills for d in decodes),
        "local": bool(decodes),
        "replica": any(view.role is Role.REPLICA for view in able),
    }
