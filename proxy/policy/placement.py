"""Choosing a worker of each role. P and D are picked independently of each other, but for what can pair."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from ..residency import Residency, standing
from ..views import WorkerView, can_pair
from .values import Turn

KV_FULL = 0.95  # at this share of KV blocks in use, a new session would evict or preempt others


def pick_decode(turn: Turn, candidates: Sequence[WorkerView]) -> WorkerView | None:
    """The session's own worker if it still holds the prefix, else the least loaded with room for its KV."""
    for view in candidates:
        if turn.decode is not None and view.id == turn.decode.worker and standing(turn.decode, view) is None:
            return view
    return min(candidates, key=lambda view: _load_rank(view, turn.session_id), default=None)


def pick_prefill(turn: Turn, decode: WorkerView, candidates: Iterable[WorkerView]) -> WorkerView | None:
    """The P that will have computed this prompt soonest: queued prefill tokens plus those it must compute itself."""
    able = [view for view in candidates if can_pair(view.worker, decode.worker)]

    def tokens_until_done(view: WorkerView) -> tuple[int, int, str]:
        held = held_on(turn.prefill, view, turn.held_tokens)
        return (view.queued_prefill_tokens + turn.prompt_tokens - held, view.requests, _spread(view, turn.session_id))

    return min(able, key=tokens_until_done, default=None)


def held_on(residency: Residency | None, view: WorkerView, prefix_tokens: int) -> int:
    """Tokens of a prefix that this worker is believed to hold."""
    if residency is None or residency.worker != view.id or standing(residency, view) is not None:
        return 0
    return min(residency.tokens, prefix_tokens)


def _load_rank(view: WorkerView, session_id: str) -> tuple[bool, int, float, str]:
    return (view.load.kv_usage >= KV_FULL, view.requests, round(view.load.kv_usage, 2), _spread(view, session_id))


def _spread(view: WorkerView, session_id: str) -> str:
    """Rendezvous hashing: among equals, sessions spread evenly and the same one always lands the same."""
    return blake2b(f"{view.id} {session_id}".encode(), digest_size=8).hexdigest()
