"""Whatever the workload, the fleet and the mode: each turn ends once, each token is computed once, nothing is left."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any

import msgspec
import pytest

from ppd.offline.experiment.plan import plan
from ppd.offline.experiment.records import Record
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.goodput.modes import modes_on, proxy_setup
from ppd.offline.simulation.attempt import MODEL
from ppd.offline.simulation.clients import ClientPool, Clients
from ppd.offline.simulation.routing import PolicyRouting, ProxySetup
from ppd.offline.simulation.sessions import planned_sessions
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.timeline import Timeline
from ppd.offline.simulation.workers.fleet import SimulatedFleet
from ppd.offline.simulation.workers.links import Work
from ppd.proxy.laws.profile_file import Transfers
from ppd.proxy.laws.step_time import EngineProfile, step_time_s
from ppd.servers.fleet.topology import Topology
from tests.support.stepped_engine import profile_of

LEASE_S = 30.0
AMPLE = 400_000  # tokens of KV: no sequence is preempted


@dataclass(slots=True)
class Ended:
    """Of each request, its record and what it took."""

    all: list[tuple[Record, Work]] = field(default_factory=list)

    def sent(self, turn: int, now_s: float) -> None: ...

    def ended(self, record: Record, known_tokens: int, work: Work) -> None:
        self.all.append((record, work))


def drawn(random: Random, topology: str) -> tuple[Run, Setup, ProxySetup]:
    fleet = Topology.parse(topology)
    first, later = (
        Profile(name=name, new_tokens=random.randint(1, most), output_tokens=random.randint(1, 100))
        for name, most in (("first", 1500), ("later", 200))
    )
    workload = Workload(first=first, later=later, turns=random.randint(1, 4), think_s=random.choice((0.0, 1.0)))
    run = Run(
        topology=topology,
        workload=workload,
        qps=random.choice((0.5, 2.0, 10.0)),
        x=0.5 if fleet.has_choice else None,
        seed=random.randrange(1000),
        seconds=2.0,
        conversations=8,
    )
    costs = EngineProfile(
        max_batched_tokens=random.choice((8, 512, 8192)),
        long_prefill_tokens=random.choice((0, 32)),
        transfer_bytes_per_s=random.choice((1e8, 16e9)),
        send_s=random.choice((0.0, 0.05)),
    )
    longest = max(16, workload.longest_context)
    profile = profile_of(
        costs=costs,
        kv_capacity_tokens=random.choice((longest, 2 * longest, AMPLE)),
        max_num_seqs=random.choice((1, 4, 256)),
        transfers=random.choice([*Transfers]),
    )
    proxy = proxy_setup(random.choice(modes_on(fleet)), fleet)
    flags = {name: random.random() < 0.3 for name in ("prefills_answer", "moves_kv", "fetches_kv")}
    settings: dict[str, Any] = {name: random.random() < 0.3 for name in ("queues", "reads_back", "first_turns_split")}
    rules = msgspec.structs.replace(proxy.rules, **flags)
    events_s = random.choice((None, 0.0, 1.0))
    return (
        run,
        Setup(profile=profile, lease_s=LEASE_S),
        replace(proxy, rules=rules, kv_events_delay_s=events_s, **settings),
    )


def check_memory(fleet: SimulatedFleet) -> None:
    for worker in fleet.workers:
        cache = worker.engine.cache
        assert min(cache.used_tokens, cache.kept_tokens) >= 0
        assert cache.used_tokens + cache.kept_tokens <= cache.capacity_tokens


@pytest.mark.parametrize("topology", ["1P_1D", "1P_3D", "2P_2D", "4R", "1P_1D_1R", "1P_1D_1pD", "1E_1P_2D"])
@pytest.mark.parametrize("seed", range(8))
def test_what_goes_in_comes_out_once(topology: str, seed: int) -> None:
    run, setup, proxy = drawn(Random(f"{topology} {seed}"), topology)
    timeline, ended = Timeline(), Ended()
    fleet = SimulatedFleet(timeline, Topology.parse(topology), setup)
    routing = PolicyRouting(timeline, fleet, proxy, setup)
    clients = Clients(timeline, fleet, routing, ClientPool(timeline, None), ended)
    conversations = plan(run, None)
    clients.play(planned_sessions(conversations, count(1), is_retokenised=lambda: False, forced=False))

    def is_over() -> bool:
        check_memory(fleet)
        return clients.open_sessions == 0

    timeline.run(until=is_over)
    turns = Counter((record.conversation, record.turn) for record, _ in ended.all)
    assert turns == Counter((one.number, turn) for one in conversations for turn in range(1, len(one.turns) + 1))
    for record, work in ended.all:
        check_turn(record, work, setup.profile.costs, is_once=setup.profile.kv_capacity_tokens == AMPLE)
    until_s = timeline.now_s + 2 * LEASE_S
    timeline.run(until=lambda: timeline.now_s > until_s)
    assert all(not one.engine.cache.used_tokens and not one.handoffs and not one.sending for one in fleet.workers)
    for view in routing._registry.fleet(MODEL).views.values():
        assert (view.inflight, view.decoding, view.prefills) == (0, 0, 0)
        assert (view.context_tokens, view.queued_prefill_tokens, view.reserved_tokens) == (0, 0, 0)


def check_turn(record: Record, work: Work, costs: EngineProfile, *, is_once: bool) -> None:
    """is_once: memory is never short, so nothing is computed again."""
    assert not record.error
    assert record.cached_tokens is not None
    assert record.first_token_s is not None
    assert record.last_token_s is not None
    # Behind a P, D computes the last token once more.
    least = record.prompt_tokens - record.cached_tokens + bool(record.prefill)
    assert (work.computed_tokens == least) if is_once else (work.computed_tokens >= least)
    contexts = range(record.prompt_tokens + 1, record.prompt_tokens + record.output_tokens)
    alone_s = sum(step_time_s(costs, 1, context, 0, 0) for context in contexts)
    if work.computed_tokens == least:
        assert record.last_token_s - record.first_token_s >= alone_s - 1e-9
