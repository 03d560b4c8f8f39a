"""The objects that make up one proxy process, and how they are wired."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, Metric

from . import plane
from .admission.arrival_rate import Arrivals
from .admission.gate import MESSAGES, Admission
from .admission.key_file import KeyRing
from .admission.rate_limits import RateLimits
from .beliefs.beliefs import Beliefs
from .bodies.body_memory import BodyMemory, default_limit, usable_bytes
from .bodies.body_reader import BodyReader
from .config import AccessFormat, DataPlane, ProxyConfig, convert
from .discovery.heartbeat_listener import HeartbeatListener
from .discovery.senders import HostAddresses
from .encoders.encoder_chooser import EncoderChooser
from .errors import ConfigError
from .fleet.booking import OpenHandoffs
from .fleet.registry import Registry
from .health.canary import Canary
from .health.circuit_breaker import Breakers, RetryBudget
from .health.load_watch import LoadWatch
from .health.poisoned_prompts import REASON, PoisonedPrompts
from .health.probe import probing_session
from .health.prober import Prober
from .health.worker_health import WorkerHealth
from .kv_events.engine_caches import EngineCaches
from .kv_events.subscriber import EventSubscriber
from .laws.forecasts import Forecasts
from .laws.worker_laws import WorkerLaws
from .passthrough.model_list import ModelList
from .passthrough.passthrough import Passthrough
from .passthrough.stored_responses import StoredResponses
from .peers.channels import Member
from .peers.membership import Membership
from .peers.replication import Operated, Replication
from .policy.returns import Returns
from .readback.handles import Handles
from .routing.choosing import Chooser
from .routing.learning import Learner
from .routing.legs.dispatch import Dispatcher
from .routing.legs.handoff_release import HandoffRelease
from .routing.router import Router
from .routing.service import TurnService
from .routing.state import State
from .runtime.line_writer import append_to
from .runtime.loop_watch import LoopWatch
from .runtime.tasks import Drain
from .runtime.tls import Tls, client_tls, worker_tls
from .sessions.hasher import Hasher
from .sessions.table import SessionTable
from .sessions.templates import TemplateOrder
from .sessions.token_estimates import TokenEstimator
from .settings import Settings
from .telemetry.access_log import AccessLog
from .telemetry.merged_metrics import families
from .telemetry.metrics import Metrics, data_plane_info, fleet_gauges, gauge, laws_gauges, lost_receipts
from .telemetry.receipts import ReceiptLog, Receipts
from .tokenizer.count_checks import CountChecks
from .tokenizer.folder_names import FolderNames
from .tokenizer.prompt_tokenizer import PromptTokenizer
from .upstream.client import Upstream

log = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Seconds, monotonic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFiles:
    """What a process reads from the operator's files as it begins.

    Of several processes the supervisor does, and looks on: so a successor begins with what was valid last, whatever the
    files hold when its predecessor dies.
    """

    keys: KeyRing | None  # None: clients need no key
    client_tls: Tls | None  # None: clients speak plain HTTP
    worker_tls: Tls

    @classmethod
    def read(cls, config: ProxyConfig) -> OwnFiles:
        """ConfigError if one cannot be used; also if the receipt log cannot be written."""
        check_log(config.receipt_log)
        return cls(keys=make_keys(config), client_tls=client_tls(config), worker_tls=worker_tls(config))

    def look(self) -> None:
        """Takes what has changed, as each process does; to be called every `WATCH_EVERY_S`."""
        for one in (self.keys, self.client_tls, self.worker_tls):
            if one is not None:
                one.look()


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """Everything that one proxy process holds."""

    settings: Settings
    state: State
    upstream: Upstream
    learner: Learner
    chooser: Chooser
    handoff_release: HandoffRelease
    turns: TurnService
    passthrough: Passthrough
    model_list: ModelList
    stored_responses: StoredResponses
    bodies: BodyReader
    tokenizer: PromptTokenizer | None
    body_memory: BodyMemory
    prober: Prober
    load_watch: LoadWatch
    canary: Canary
    listener: HeartbeatListener
    event_subscriber: EventSubscriber
    files: OwnFiles
    poller: plane.Poller | None
    drain: Drain
    loop_watch: LoopWatch
    receipt_log: ReceiptLog | None
    access_log: AccessLog | None
    change: Callable[[Mapping[str, object]], None]  # sets live keys of the config in this process
    membership: Membership


def assemble(
    settings: Settings, now: Clock = time.monotonic, member: Member | None = None, files: OwnFiles | None = None
) -> Proxy:
    """The objects of a proxy, wired; no socket is open yet. ConfigError if a setting names an unusable file.

    member: which of the proxy's processes this is; None: the only one. files: None: they are read.
    """
    member, config = member or Member(), settings.config
    state = new_state(config, member, now, settings.laws)
    settings.returns = Returns(state.sessions, state.beliefs, state.forecasts)
    drain, files, poller = Drain(), files or OwnFiles.read(config), make_poller(config, member.leads)
    upstream = make_upstream(config, state, files.worker_tls, poller)
    handoff_release = HandoffRelease(state, upstream)
    learner = Learner(state, drain, receipt_log := open_log(config, state.metrics))
    bodies = BodyReader(config, state.hasher, state.registry.aliases, templates=lambda: state.templates.known)
    canary, tokenizer = make_canary(config, state, upstream), make_tokenizer(config, state)
    chooser = Chooser(config, settings.rules(), state, learner, passed_over=canary.passed_over, tokenizer=tokenizer)
    router = Router(config, state, chooser, Dispatcher(config, upstream, handoff_release, state, bodies), learner)
    passthrough, body_memory = Passthrough(config, state, upstream, bodies), make_body_memory(config)
    state.metrics.watch(lambda: chain(_gauges(config, state), body_memory.gauges()))
    prober = Prober(config, state.registry, upstream, now, probing_session, files.worker_tls)
    replication = Replication(member, state, canary, prober, operated := make_operated(settings, chooser))
    return Proxy(
        settings=settings,
        state=state,
        upstream=upstream,
        learner=learner,
        chooser=chooser,
        handoff_release=handoff_release,
        turns=TurnService(config, state, router, files.keys, bodies=bodies),
        passthrough=passthrough,
        model_list=ModelList(config, upstream, passthrough.candidates, now),
        stored_responses=StoredResponses(config, state, upstream),
        bodies=bodies,
        tokenizer=tokenizer,
        body_memory=body_memory,
        prober=prober,
        load_watch=LoadWatch(config, state.registry, upstream, state.now),
        canary=canary,
        listener=HeartbeatListener(config, state.registry, state.metrics, now),
        event_subscriber=make_event_subscriber(config, state),
        files=files,
        poller=poller,
        drain=drain,
        loop_watch=LoopWatch(member.pulse.beat, state.metrics.loop_lag.observe),
        receipt_log=receipt_log,
        access_log=open_access_log(config),
        change=operated.change,
        membership=Membership(member, replication, lambda: families(state.metrics.registry)),
    )


def make_poller(config: ProxyConfig, tells: bool, is_built: bool = plane.IS_BUILT) -> plane.Poller | None:
    """None: the event loop reads and writes all sockets itself. tells: whether it logs that another plane serves."""
    serving = config.data_plane.serving(is_built)
    if serving is not config.data_plane and tells:
        log.warning(
            "data_plane = %s is not built here, so %s serves; install PPD again on Linux with a C compiler to build it",
            config.data_plane,
            serving,
        )
    return plane.Poller() if serving is DataPlane.NATIVE else None


def make_upstream(config: ProxyConfig, state: State, tls: Tls, poller: plane.Poller | None) -> Upstream:
    def may_resend() -> bool:
        """Whether the retry budget allows a request to be sent again to the worker that closed its connection."""
        may = state.retries.take()
        state.metrics.retries.labels("resent" if may else "no_budget").inc()
        return may

    key = config.worker_api_key
    return Upstream(keepalive_s=config.keepalive_s, tls=tls, key=key, may_resend=may_resend, poller=poller)


def make_operated(settings: Settings, chooser: Chooser) -> Operated:
    def change(keys: Mapping[str, object]) -> None:
        settings.change(**convert(keys))
        chooser.rules = settings.rules()

    def adopt(in_force: Mapping[str, object], in_file: Mapping[str, object]) -> None:
        settings.adopt(convert(in_force), convert(in_file))
        chooser.rules = settings.rules()

    return Operated(settings, change, adopt)


def new_state(config: ProxyConfig, member: Member, now: Clock, laws: WorkerLaws | None = None) -> State:
    registry, retries = Registry(), RetryBudget(config.retry_share, config.retry_burst)
    metrics = Metrics(refusals=(*MESSAGES, REASON))
    hasher = Hasher(member.secret)
    ttl_s, limit = config.session_ttl_s, config.session_limit
    beliefs = Beliefs(registry.engine, limit)
    health = WorkerHealth(Breakers(config.breaker_failures, config.breaker_open_s), registry, retries, now)
    registry.on_came = health.strangers.came
    arrivals = Arrivals(config.qps_window_s, now())
    return State(
        registry=registry,
        sessions=SessionTable(ttl_s=ttl_s, capacity=limit, serials=member.serials, beliefs=beliefs),
        beliefs=beliefs,
        tokens=TokenEstimator(),
        templates=TemplateOrder(config.templates_with_call_ids, config.processes),
        handoffs=OpenHandoffs(),
        receipts=Receipts(config.receipts_kept),
        metrics=metrics,
        health=health,
        retries=retries,
        poisoned=PoisonedPrompts(config.poison_s, lambda reason: metrics.refused.labels(reason).inc()),
        arrivals=arrivals,
        encoders=EncoderChooser(config, registry, health, arrivals, now),
        admission=Admission(
            max_inflight=config.max_inflight,
            queue_limit=config.queue_limit,
            queue_timeout_s=config.queue_timeout_s,
            queue_wait_s=config.queue_wait_s,
            now=now,
            on_refused=lambda reason: metrics.refused.labels(reason).inc(),
            on_waited=metrics.queue_wait.observe,
        ),
        rate_limits=RateLimits(),
        hasher=hasher,
        # A key of a key, so that whoever reads events learns none of a prompt.
        engine_caches=EngineCaches(
            lambda history: hasher.key(b"X", f"{history:x}"), reads_tokens=bool(config.tokenizer)
        ),
        count_checks=CountChecks(lambda result: metrics.token_counts.labels(result).inc()),
        handles=Handles(),
        laws=laws or WorkerLaws(),
        forecasts=Forecasts(),
        now=now,
    )


def make_body_memory(config: ProxyConfig) -> BodyMemory:
    limit = config.body_memory_bytes or default_limit(config.processes, usable_bytes(), config.body_limit_bytes)
    return BodyMemory(limit, config.head_timeout_s)


def make_tokenizer(config: ProxyConfig, state: State) -> PromptTokenizer | None:
    if not config.tokenizer:
        return None
    folders = FolderNames(config.tokenizer)
    return PromptTokenizer(folders, state.metrics, config.tokenizer_wait_s, state.registry.aliases)


def make_event_subscriber(config: ProxyConfig, state: State) -> EventSubscriber:
    hosts = HostAddresses(state.now)
    return EventSubscriber(config, state.registry, state.engine_caches, state.metrics, hosts)


def make_keys(config: ProxyConfig) -> KeyRing | None:
    if not config.keys_file:
        return None
    return KeyRing(Path(config.keys_file), config.admin_key, config.share_prefixes)


def make_canary(config: ProxyConfig, state: State, upstream: Upstream) -> Canary:
    return Canary(
        config,
        upstream,
        registry=state.registry,
        health=state.health,
        handoffs=state.handoffs,
        now=state.now,
        on_result=lambda result: state.metrics.canaries.labels(result).inc(),
    )


def open_access_log(config: ProxyConfig) -> AccessLog | None:
    if config.access_log is AccessFormat.OFF:
        return None
    return AccessLog(as_json=config.access_log is AccessFormat.JSON)


def check_log(path: str) -> None:
    """ConfigError if the file can't be written: at the start, not when the first receipt is lost. Empty: no file."""
    try:
        if path:
            append_to(Path(path)).close()
    except OSError as exc:
        raise ConfigError(
            f"receipt_log = {path!r}: must be a file that can be written ({exc.strerror})", param="receipt_log"
        ) from exc


def open_log(config: ProxyConfig, metrics: Metrics) -> ReceiptLog | None:
    if not config.receipt_log:
        return None
    log = ReceiptLog(Path(config.receipt_log))
    metrics.watch(lambda: (lost_receipts(log.lost),))
    return log


def _gauges(config: ProxyConfig, state: State) -> Iterator[Metric]:
    yield data_plane_info(config.data_plane, plane.IS_BUILT)
    yield from fleet_gauges(state.registry.views())
    yield from state.engine_caches.gauges(state.registry.views())
    yield from state.handoffs.gauges(state.now())
    yield from laws_gauges(state.laws.judged())
    yield gauge("ppd_sessions", "Sessions known", len(state.sessions))
    yield gauge("ppd_readback_handles", "Sessions whose D keeps KV that a P may read back", len(state.handles))
    yield gauge("ppd_inflight_turns", "Requests admitted to the fleet", state.admission.inside)
    yield gauge("ppd_queued_turns", "Requests that wait for a place", state.admission.waiting)
    limited = CounterMetricFamily("ppd_rate_limited", "Requests over their key's rate limit", labels=("reason",))
    for limit, refused in state.rate_limits.refused.items():
        limited.add_metric((limit,), refused)
    yield limited
    yield gauge("ppd_breakers_open", "Workers and pairs whose circuit breaker is open", len(open_breakers(state)))


def open_breakers(state: State) -> list[str]:
    """Workers and pairs, by address, whose breaker is not closed."""
    states = state.health.breakers.states(state.now())
    return [" -> ".join(key) if isinstance(key, tuple) else key for key in states]
