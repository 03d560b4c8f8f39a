"""The objects of one sidecar, and its life: the proxy's data plane, with a router that reads heads."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ppd.proxy import plane
from ppd.proxy.app.client_routes import turn_app
from ppd.proxy.assembly import (
    check_log,
    make_body_memory,
    make_poller,
    make_upstream,
    new_state,
    open_access_log,
    open_log,
)
from ppd.proxy.bodies.body_memory import BodyMemory
from ppd.proxy.bodies.body_reader import BodyReader
from ppd.proxy.config import ProxyConfig
from ppd.proxy.connectors import usual_engine
from ppd.proxy.downstream.serve import Site, serve_site
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Announcement, Role, Worker
from ppd.proxy.peers.channels import Member
from ppd.proxy.routing.legs.dispatch import Dispatcher
from ppd.proxy.routing.legs.handoff_release import HandoffRelease
from ppd.proxy.routing.service import TurnService
from ppd.proxy.routing.state import State
from ppd.proxy.runtime.tasks import Background, Drain
from ppd.proxy.runtime.tls import Tls, client_tls, worker_tls
from ppd.proxy.runtime.watched_files import watch
from ppd.proxy.telemetry.access_log import AccessLog
from ppd.proxy.telemetry.receipts import ReceiptLog
from ppd.proxy.upstream.client import Upstream

from .allow_list import AllowList
from .decisions import Decisions
from .encoders import Encoders
from .engine import EngineRequests
from .failed_legs import FailedLegs, FailurePolicy
from .prefills import Prefills
from .records import Records, explained
from .reporter import Reporter
from .router import HeaderRouter

# Keys of the proxy's config that are not the operator's here.
FIXED: dict[str, Any] = {
    "breaker_failures": 2**53,  # whom to avoid is the picker's business
    "receipts_kept": 100,  # nobody asks for them
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarOptions:
    """config: of the data plane; see `FIXED`."""

    config: ProxyConfig
    engine: str  # host:port
    engine_tls: bool = False
    role: Role = Role.DECODE  # or REPLICA: how the turns that it computes alone are called
    connector: str = "nixl"
    coordinates: Mapping[str, str] = field(default_factory=dict)  # the engine's, that the connector must know
    prefills: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # of P that may be named, by host:port
    allow_list: AllowList = field(default_factory=AllowList)
    prefill_tls: bool = False
    sample_prefill: bool = False
    encoder_list: AllowList = field(default_factory=lambda: AllowList(kind="encoder"))
    encoder_tls: bool = False
    policy: FailurePolicy = field(default_factory=FailurePolicy)
    report: str = ""  # the picker's host:port; empty: it is told nothing
    curve: tuple[bytes, bytes, bytes] | None = None  # towards it; see `Reporter`


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    config: ProxyConfig
    state: State
    turns: TurnService
    requests: EngineRequests
    allow_lists: tuple[AllowList, ...]
    upstream: Upstream
    handoff_release: HandoffRelease
    bodies: BodyReader
    body_memory: BodyMemory
    drain: Drain
    tls: Tls  # towards the engine and P
    poller: plane.Poller | None
    access_log: AccessLog | None
    receipt_log: ReceiptLog | None
    reporter: Reporter | None


def assemble(
    options: SidecarOptions,
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Sidecar:
    """The objects of a sidecar, wired; no socket is open yet. ConfigError if an option names an unusable file."""
    config = options.config
    state, drain, tls = new_state(config, Member(), now), Drain(), worker_tls(config)
    poller = make_poller(config, tells=True)
    upstream = make_upstream(config, state, tls, poller)
    handoff_release = HandoffRelease(state, upstream)
    bodies = BodyReader(config, state.hasher)
    check_log(config.receipt_log)
    receipt_log = open_log(config, state.metrics)
    reporter = Reporter(options.report, options.curve) if options.report else None
    state.metrics.watch(lambda: chain(() if reporter is None else (reporter.counter(),), state.handoffs.gauges(now())))
    dispatcher = Dispatcher(config, upstream, handoff_release, state, bodies)
    log, report = (receipt_log.write if receipt_log else None), (reporter.send if reporter else None)
    decisions = _decisions(options, _engine(options, state))
    failed_legs = FailedLegs(decisions, options.policy, pause)
    router = HeaderRouter(state, dispatcher, Records(state.metrics, drain, log, report), decisions, failed_legs)
    return Sidecar(
        config=config,
        state=state,
        turns=TurnService(config, state, router, None, bodies=bodies, may_force=False, explained=explained),
        requests=EngineRequests(config, upstream, bodies, decisions.engine.worker),
        allow_lists=(options.allow_list, options.encoder_list),
        upstream=upstream,
        handoff_release=handoff_release,
        bodies=bodies,
        body_memory=make_body_memory(config),
        drain=drain,
        tls=tls,
        poller=poller,
        access_log=open_access_log(config),
        receipt_log=receipt_log,
        reporter=reporter,
    )


def _engine(options: SidecarOptions, state: State) -> WorkerView:
    """It is taken to be up, as there is no other: each turn finds out for itself."""
    worker = Worker(
        role=options.role,
        address=options.engine,
        connector=options.connector,
        engine=usual_engine(options.connector),
        coordinates=dict(options.coordinates),
        tls=options.engine_tls,
    )
    state.registry.apply(Announcement(worker), state.now())
    view = state.registry.view(worker.id)
    assert view is not None, "it was added"
    return view


def _decisions(options: SidecarOptions, engine: WorkerView) -> Decisions:
    host, port = options.config.host, options.config.port
    own = frozenset((engine.worker.address, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"))
    prefills = Prefills(
        options.allow_list,
        connector=options.connector,
        known=options.prefills,
        tls=options.prefill_tls,
        samples=options.sample_prefill,
    )
    encoders = Encoders(options.encoder_list, tls=options.encoder_tls, own=own)
    return Decisions(prefills, encoders, engine, own)


async def serve(sidecar: Sidecar, listening: socket.socket, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then drains as the proxy does. ConfigError if a certificate can't be used."""
    app = turn_app(sidecar.config, sidecar.turns)
    sidecar.requests.add_routes(app, sidecar.drain, sidecar.state.metrics)

    @app.while_serving
    async def lifespan() -> AsyncGenerator[None, None]:
        background = Background()
        for number, allow_list in enumerate(sidecar.allow_lists):
            background.start(f"allow list {number}", allow_list.watch)
        background.start("certificates", lambda: watch(sidecar.tls.look, sidecar.state.metrics.reloaded))
        yield
        await background.close()
        await sidecar.handoff_release.close(sidecar.drain.left_s(sidecar.config.shutdown_timeout_s))
        await sidecar.upstream.close()
        await sidecar.bodies.close()
        if sidecar.reporter is not None:
            sidecar.reporter.close()
        if sidecar.receipt_log is not None:
            await sidecar.receipt_log.close()
        if sidecar.access_log is not None:
            await sidecar.access_log.close()

    site = Site(
        config=sidecar.config,
        app=app,
        turns=sidecar.turns,
        state=sidecar.state,
        drain=sidecar.drain,
        body_memory=sidecar.body_memory,
        access_log=sidecar.access_log,
        poller=sidecar.poller,
    )
    await serve_site(site, listening, stop, client_tls(sidecar.config))
