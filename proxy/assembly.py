"""The objects that make up one proxy process, and how they are wired."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import Metric

from .chain import Hasher
from .dispatch import Dispatcher
from .errors import ConfigError
from .handoffs import Ledger
from .learning import Learner
from .listener import Listener
from .metrics import Metrics, fleet_gauges, gauge
from .passthrough import Passthrough
from .prober import Prober
from .receipts import ReceiptLog, Receipts
from .registry import Registry
from .router import Router
from .sessions import SessionTable
from .settings import Settings
from .state import State
from .tokens import TokenEstimator
from .upstream import Upstream


@dataclass(frozen=True, slots=True)
class Proxy:
    """Everything that one proxy process holds."""

    settings: Settings
    state: State
    upstream: Upstream
    router: Router
    passthrough: Passthrough
    prober: Prober
    listener: Listener
    receipt_log: ReceiptLog | None


def assemble(settings: Settings, now: Callable[[], float] = time.monotonic) -> Proxy:
    """The objects of a proxy, wired; nothing is opened yet. ConfigError where a setting names what can't be used."""
    config = settings.config
    state = State(
        registry=Registry(),
        sessions=SessionTable(ttl_s=config.session_ttl_s, capacity=config.session_limit),
        tokens=TokenEstimator(),
        ledger=Ledger(),
        receipts=Receipts(config.receipts_kept),
        metrics=Metrics(),
        hasher=Hasher(secrets.token_bytes(32)),
        now=now,
    )
    upstream = Upstream(keepalive_s=config.keepalive_s)
    receipt_log = open_log(config.receipt_log) if config.receipt_log else None
    learner = Learner(state, receipt_log.write if receipt_log else None)
    router = Router(config, settings.rules(), state, Dispatcher(config, state, upstream), learner)
    passthrough = Passthrough(config, state.registry, upstream)
    state.metrics.watch(lambda: _gauges(state))
    prober = Prober(config, state.registry, upstream, now)
    listener = Listener(config, state.registry, state.metrics, now)
    return Proxy(settings, state, upstream, router, passthrough, prober, listener, receipt_log)


def open_log(path: str) -> ReceiptLog:
    """ConfigError at the start, rather than receipts that are lost one by one."""
    try:
        Path(path).open("ab").close()
    except OSError as exc:
        raise ConfigError(
            f"receipt_log = {path!r}: must be a file that can be written ({exc.strerror})", param="receipt_log"
        ) from exc
    return ReceiptLog(Path(path))


def _gauges(state: State) -> Iterator[Metric]:
    yield from fleet_gauges(state.registry.views())
    yield from state.ledger.gauges(state.now())
    yield gauge("ppd_sessions", "Sessions known", len(state.sessions))
