"""One run from its first arrival to its last answer, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ppd.proxy.errors import ConfigError
from ppd.servers.fleet.topology import Topology

from ..experiment.plan import plan
from ..experiment.records import Record, in_order
from ..experiment.run import Run
from .clients import ClientPool, Clients
from .fleet import SimulatedFleet
from .published_routing import PublishedRouting
from .routing import PolicyRouting, Routing
from .setup import Setup
from .timeline import Timeline

HORIZON_S = 7 * 86400.0  # of virtual time


def simulate(run: Run, setup: Setup, trace: Sequence[float] | None = None) -> tuple[Record, ...]:
    """The records of one run, by conversation and turn; the same run and setup give the same records.

    ConfigError for a run that does not end within `HORIZON_S`.
    """
    timeline = Timeline()
    fleet = SimulatedFleet(timeline, Topology.parse(run.topology), setup)
    routing: Routing
    if setup.published_routing:
        routing = PublishedRouting(fleet, run, unrecognised=setup.unrecognised)
    else:
        routing = PolicyRouting(
            timeline, fleet, heartbeat_s=setup.heartbeat_s, heartbeat_delay_s=setup.heartbeat_delay_s
        )
    clients = Clients(timeline, fleet, routing, ClientPool(timeline, setup.connections), _retokenised(run, setup))
    clients.play(plan(run, trace))
    timeline.run(until=lambda: clients.open_conversations == 0 or timeline.now_s > HORIZON_S)
    if clients.open_conversations:
        raise ConfigError(
            f"run {run.id}: {clients.open_conversations} conversations have no end in {HORIZON_S / 86400:g} days of "
            "virtual time: the load is far beyond this fleet"
        )
    return in_order(clients.records)


def _retokenised(run: Run, setup: Setup) -> Callable[[], bool]:
    if not setup.retokenised_replies:
        return lambda: False
    random = np.random.default_rng([run.seed, 0x7E])
    return lambda: bool(random.random() < setup.retokenised_replies)
