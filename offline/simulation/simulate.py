"""One run from its first arrival to its last answer, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from ppd.proxy.errors import ConfigError
from ppd.servers.fleet.topology import Topology

from ..experiment.plan import plan
from ..experiment.records import Record, in_order
from ..experiment.run import Run
from .clients import ClientPool, Clients
from .playback import Loss, Playback, Window, traced_sessions
from .published_routing import PublishedRouting
from .routing import PolicyRouting, ProxySetup, Routing
from .sessions import planned_sessions
from .setup import Setup
from .timeline import Timeline
from .traced_prompts import TracedPrompts
from .workers.fleet import SimulatedFleet

HORIZON_S = 7 * 86400.0  # of virtual time


def simulate(
    run: Run, setup: Setup, trace: Sequence[float] | None = None, proxy: ProxySetup | None = None
) -> tuple[Record, ...]:
    """The records of one run, by conversation and turn; the same run and setup give the same records.

    proxy: its rules decide, and not the run's `x`; None: every turn is forced, as a sweep does it with a live proxy.
    ConfigError for a run that does not end within `HORIZON_S`.
    """
    if proxy is not None and setup.published_routing:
        raise ConfigError("published_routing: its routes are the plan's, so rules cannot decide", param="proxy")
    timeline = Timeline()
    fleet = SimulatedFleet(timeline, Topology.parse(run.topology), setup)
    routing: Routing
    if setup.published_routing:
        routing = PublishedRouting(fleet, run, unrecognised=setup.unrecognised)
    else:
        routing = PolicyRouting(timeline, fleet, proxy or ProxySetup(), setup)
    clients = Clients(timeline, fleet, routing, ClientPool(timeline, setup.connections))
    conversations = plan(run, trace)
    told = _retokenised(run, setup)
    clients.play(planned_sessions(conversations, count(1), is_retokenised=told, forced=proxy is None))
    timeline.run(until=lambda: clients.open_sessions == 0 or timeline.now_s > HORIZON_S)
    if clients.open_sessions:
        raise ConfigError(
            f"run {run.id}: {clients.open_sessions} conversations have no end in {HORIZON_S / 86400:g} days of "
            "virtual time: the load is far beyond this fleet"
        )
    return in_order(clients.records)


def play(
    prompts: TracedPrompts,
    playback: Playback,
    topology: str,
    setup: Setup,
    proxy: ProxySetup | None = None,
    window: Window | None = None,
) -> Window:
    """Plays a trace's sessions until the window is full and its turns have ended; then the rest is given up.

    window: None: of the playback, after its warm-up. The same playback gives the same turns. ConfigError where the
    window cannot be filled by this trace.
    """
    if setup.published_routing:
        raise ConfigError("published_routing: its routes are a plan's, and a trace has none", param="setup")
    if setup.retokenised_replies:
        raise ConfigError("retokenised_replies: a trace itself says which answers come back", param="setup")
    if playback.later_turns and not prompts.later_turns:
        raise ConfigError("the trace has no later turns: later_turns must be 0", param="later_turns")
    timeline = Timeline()
    fleet = SimulatedFleet(timeline, Topology.parse(topology), setup)
    routing = PolicyRouting(timeline, fleet, proxy or ProxySetup(), setup)
    window = window or Window(playback, playback.warm_up(prompts))
    clients = Clients(timeline, fleet, routing, ClientPool(timeline, setup.connections), window)
    for loss in playback.losses:
        _plan_loss(loss, window.begins_s + loss.at_s, timeline, fleet)
    clients.play_endless(traced_sessions(playback, prompts, window))
    timeline.run(until=lambda: window.is_over(timeline.now_s) or timeline.now_s > HORIZON_S)
    clients.give_up()
    window.moved_bytes = sum(worker.sends.bytes for worker in fleet.workers)
    window.played.sort(key=lambda one: (one.record.conversation, one.record.turn))
    return window


def _plan_loss(loss: Loss, at_s: float, timeline: Timeline, fleet: SimulatedFleet) -> None:
    worker = next((one for one in fleet.workers if one.name == loss.worker), None)
    if worker is None:
        names = ", ".join(one.name for one in fleet.workers)
        raise ConfigError(f"losses: worker {loss.worker!r} must be one of {names}", param="losses")
    timeline.at(at_s, fleet.lose, worker)
    if loss.back_after_s is not None:
        timeline.at(at_s + loss.back_after_s, fleet.restart, worker)


def _retokenised(run: Run, setup: Setup) -> Callable[[], bool]:
    if not setup.retokenised_replies:
        return lambda: False
    random = np.random.default_rng([run.seed, 0x7E])
    return lambda: bool(random.random() < setup.retokenised_replies)
