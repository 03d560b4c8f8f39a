"""How often a LOCAL turn finds less in D's cache than was believed: agents whose sessions do not all fit.

    python -m benchmarks.small.residency --capacity 800000 1500000 2000000

The proxy's own routing in virtual time; the engines' caches are LRU, in tokens. `--sessions` agents a D talk at once,
each with prompts that grow from 65,000 to some 170,000 tokens. Every later turn asks for LOCAL. A turn is harmed that
ran LOCAL and found less than half of what was believed to be there. Prints one JSON line per capacity.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from msgspec.structs import replace

from ppd.offline.experiment.plan import Conversation, PlannedTurn
from ppd.offline.experiment.records import Record
from ppd.offline.experiment.run import Topology
from ppd.offline.simulation.clients import ClientPool, Clients
from ppd.offline.simulation.fleet import SimulatedFleet
from ppd.offline.simulation.routing import PolicyRouting, Routed
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.timeline import Timeline
from ppd.proxy.policy import Route
from ppd.servers.engine_profile.profile_file import find

PROFILE = "h100-llama-3.1-8b"
HARM = 0.5


@dataclass
class ClaimsOfRouting:
    """A routing, and what it believed of each turn."""

    routing: PolicyRouting
    claimed: dict[tuple[int, int], int] = field(default_factory=dict)

    def route(self, conversation: Conversation, turn: int, prompt_tokens: int) -> Routed:
        routed = self.routing.route(conversation, turn, prompt_tokens)
        self.claimed[conversation.number, turn] = routed.claimed_tokens
        return routed


def agent(number: int, turns: int, seed: int) -> Conversation:
    """Tools answer in seconds; now and then a person is asked, which takes a minute."""
    random = Random(f"{seed} {number}")
    planned = [PlannedTurn(random.randint(40_000, 90_000), 100, 0.0, Route.SPLIT)]
    for _ in range(turns - 1):
        think_s = random.expovariate(1 / (60.0 if random.random() < 0.2 else 3.0))
        new = int(random.expovariate(1 / 2500)) + 50
        planned.append(PlannedTurn(new, random.randint(50, 300), think_s, Route.LOCAL))
    return Conversation(number, number * 2.0, True, 0, tuple(planned))


def play(conversations: list[Conversation], topology: str, capacity: int) -> tuple[list[Record], ClaimsOfRouting]:
    profile = replace(find(PROFILE), kv_capacity_tokens=capacity)
    timeline, setup = Timeline(), Setup(profile=profile)
    fleet = SimulatedFleet(timeline, Topology.parse(topology), setup)
    routing = ClaimsOfRouting(
        PolicyRouting(timeline, fleet, heartbeat_s=setup.heartbeat_s, heartbeat_delay_s=setup.heartbeat_delay_s)
    )
    clients = Clients(timeline, fleet, routing, ClientPool(timeline, None), retokenised_replies=False)
    clients.play(conversations)
    timeline.run(until=lambda: clients.open_conversations == 0)
    return clients.records, routing


def figures(records: list[Record], claims: ClaimsOfRouting) -> dict[str, object]:
    later = [record for record in records if record.turn > 1]
    local = [record for record in later if record.route is Route.LOCAL]

    def share(found: list[Record]) -> float:
        return round(len(found) / len(later), 4)

    def claimed(record: Record) -> int:
        return claims.claimed[record.conversation, record.turn]

    held = {id(record): record.cached_tokens or 0 for record in local}
    return {
        "later_turns": len(later),
        "local": share(local),
        "harmed": share([record for record in local if held[id(record)] < HARM * claimed(record)]),
        "claimed_less_true": round(
            sum(max(0, claimed(record) - held[id(record)] - 16) for record in local)
            / max(1, sum(record.prompt_tokens for record in local)),
            4,
        ),
        "reuse": round(sum(record.cached_tokens or 0 for record in later) / sum(r.prompt_tokens for r in later), 3),
        "first_turns": dict(sorted(Counter(record.decode for record in records if record.turn == 1).items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.small.residency", description="LOCAL turns that find less than was believed."
    )
    parser.add_argument("--capacity", type=int, nargs="+", default=[800_000, 1_500_000, 2_000_000])
    parser.add_argument("--topology", default="2P_2D")
    parser.add_argument("--sessions", type=int, default=16, help="agents a D")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    count = args.sessions * Topology.parse(args.topology).decodes
    for capacity in args.capacity:
        records, claims = play([agent(n, args.turns, args.seed) for n in range(count)], args.topology, capacity)
        print(json.dumps({"capacity": capacity, **figures(records, claims)}), flush=True)


if __name__ == "__main__":
    main()
