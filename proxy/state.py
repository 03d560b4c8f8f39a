"""What one proxy process remembers: all of its mutable state, in one place, with the clock that dates it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .chain import Hasher
from .handoffs import Ledger
from .metrics import Metrics
from .receipts import Receipts
from .registry import Registry
from .sessions import SessionTable
from .tokens import TokenEstimator


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Changed only between awaits, by synchronous methods, so nothing here needs a lock."""

    registry: Registry
    sessions: SessionTable
    tokens: TokenEstimator
    ledger: Ledger
    receipts: Receipts
    metrics: Metrics
    hasher: Hasher
    now: Callable[[], float]  # seconds, monotonic
