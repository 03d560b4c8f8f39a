"""What turns read and change in one process, and the clock that dates it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..admission.arrival_rate import Arrivals
from ..admission.gate import Admission
from ..admission.rate_limits import RateLimits
from ..beliefs.beliefs import Beliefs
from ..encoders.encoder_chooser import EncoderChooser
from ..fleet.booking import OpenHandoffs
from ..fleet.registry import Registry
from ..fleet.view import BareViews
from ..health.circuit_breaker import RetryBudget
from ..health.poisoned_prompts import PoisonedPrompts
from ..health.worker_health import WorkerHealth
from ..kv_events.engine_caches import EngineCaches
from ..laws.forecasts import Forecasts
from ..laws.worker_laws import WorkerLaws
from ..readback.handles import Handles
from ..sessions.hasher import Hasher
from ..sessions.table import SessionTable
from ..sessions.templates import TemplateOrder
from ..sessions.token_estimates import TokenEstimator
from ..telemetry.metrics import Metrics
from ..telemetry.receipts import Receipts
from ..tokenizer.count_checks import CountChecks


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Changed only between awaits, by synchronous methods, so nothing here needs a lock."""

    registry: Registry
    sessions: SessionTable
    beliefs: Beliefs
    tokens: TokenEstimator
    templates: TemplateOrder
    handoffs: OpenHandoffs
    receipts: Receipts
    metrics: Metrics
    health: WorkerHealth
    retries: RetryBudget
    poisoned: PoisonedPrompts
    arrivals: Arrivals
    encoders: EncoderChooser
    admission: Admission
    rate_limits: RateLimits
    hasher: Hasher
    engine_caches: EngineCaches
    count_checks: CountChecks
    handles: Handles
    laws: WorkerLaws
    forecasts: Forecasts
    bare_views: BareViews = field(default_factory=BareViews)
    now: Callable[[], float]  # seconds, monotonic
