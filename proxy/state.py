"""What one proxy process remembers: all of its mutable state, in one place, with the clock that dates it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .chain import Hasher
from .metrics import Metrics
from .rates import Arrivals
from .receipts import Receipts
from .registry import Registry
from .resilience.handoffs import Ledger
from .resilience.retries import RetryBudget
from .resilience.standing import Standings
from .sessions import SessionTable
from .tokens import TokenEstimator
from .traffic.admission import Admission
from .traffic.rate_limits import RateLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Changed only between awaits, by synchronous methods, so nothing here needs a lock."""

    registry: Registry
    sessions: SessionTable
    tokens: TokenEstimator
    ledger: Ledger
    receipts: Receipts
    metrics: Metrics
    standings: Standings
    retries: RetryBudget
    arrivals: Arrivals
    admission: Admission
    rate_limits: RateLimits
    hasher: Hasher
    now: Callable[[], float]  # seconds, monotonic
