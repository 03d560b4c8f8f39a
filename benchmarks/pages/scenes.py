"""Small fleets in a known state, and turns to decide on: what the maps of the modes are made of.

The registry, its books and `decide` are the proxy's own, and the profile is a shipped one. D1 holds the session as far
as a turn says, and D2 none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from ppd.proxy.beliefs.held import BeliefEvidence, Held
from ppd.proxy.fleet.ledger import LegWork
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import Fleet
from ppd.proxy.fleet.worker import Announcement, Load, Role, Source, Worker, WorkerId
from ppd.proxy.laws.prediction import prefill_time_s
from ppd.proxy.laws.profile_file import find
from ppd.proxy.laws.profiles import Profiles
from ppd.proxy.laws.worker_laws import WorkerLaws
from ppd.proxy.policy import Decision, Route, Rules, Turn, decide

PROFILE = "h100-llama-3.1-8b"
MODEL = "m"
SESSION = "5e55" * 4
NOW_S = 100.0
OUTPUT_TOKENS = 200
STREAMS, STREAM_TOKENS = 32, 8192  # of a busy D, and context of each
QUEUED_TOKENS = 8192  # of each prompt that waits


class Destination(Enum):
    """Where a turn is computed and answered. Elsewhere: not on the D that holds the session."""

    LOCAL = 0
    LOCAL_ELSEWHERE = 1
    SPLIT = 2
    SPLIT_ELSEWHERE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a fleet of P1, D1 and D2 does as the turn comes, and what is known of the turn."""

    title: str
    streams: tuple[int, int] = (0, 0)  # that decode on D1 and D2
    stream_tokens: int = STREAM_TOKENS  # context of each
    queued: tuple[int, int] = (0, 0)  # prompts on P1 and D1
    p_holds: bool = False  # whether P1 holds what D1 holds
    output_tokens: int = OUTPUT_TOKENS  # of the turn, as far as known
    qps: float = 1.0


BOTH = (STREAMS, STREAMS)
IDLE = Scene(title="all idle")
BUSY_D = Scene(title=f"each D: {STREAMS} streams of {STREAM_TOKENS // 1024}k", streams=BOTH)
BUSY_P = Scene(title="P: 64k tokens queued", queued=(8, 0))
BUSY_BOTH = Scene(title=f"{BUSY_D.title};\n{BUSY_P.title}", streams=BOTH, queued=(8, 0))
BUSY_OWN_D = Scene(
    title=f"its D: {STREAMS} streams, 16k queued;\nP holds all that it holds",
    streams=(STREAMS, 0),
    queued=(0, 2),
    p_holds=True,
)


def laws() -> WorkerLaws:
    return WorkerLaws(Profiles(PROFILE))


def workers(prefills: int, decodes: int, replicas: int) -> list[Worker]:
    counts = (Role.PREFILL, prefills), (Role.DECODE, decodes), (Role.REPLICA, replicas)
    return [
        Worker(role=role, address=f"{role.value}{number}:80", models=(MODEL,), source=Source.AGENT)
        for role, count in counts
        for number in range(1, count + 1)
    ]


P1, D1, D2 = (worker.id for worker in workers(1, 2, 0))


def registry_of(members: list[Worker]) -> Registry:
    registry = Registry()
    for worker in members:
        registry.apply(Announcement(worker, Load()), 0.0)
    return registry


def fleet_in(scene: Scene, x: float | None = None) -> Fleet:
    """x: of D1."""
    members = [replace(worker, x=x) if worker.id == D1 else worker for worker in workers(1, 2, 0)]
    registry, costs = registry_of(members), find(PROFILE).costs
    prompt = LegWork(prefill_tokens=QUEUED_TOKENS, prefill_s=prefill_time_s(costs, QUEUED_TOKENS, 0))
    stream = LegWork(context_tokens=scene.stream_tokens)
    legs = zip((D1, D2, P1, D1), (*scene.streams, *scene.queued), (stream, stream, prompt, prompt), strict=True)
    for worker, count, leg in legs:
        for _ in range(count):
            registry.begin(worker, leg, NOW_S)
    return registry.fleet(MODEL)


def turn_in(scene: Scene, held_tokens: int, new_tokens: int) -> Turn:
    """held_tokens: of its prompt, on D1; 0: a first turn."""
    holders = (D1, P1) if scene.p_holds else (D1,)
    held: Mapping[WorkerId, Held] = {worker: Held(held_tokens, BeliefEvidence.OWN_TURNS) for worker in holders}
    return Turn(
        model=MODEL,
        session_id=SESSION,
        number=2 if held_tokens else 1,
        prompt_tokens=held_tokens + new_tokens,
        held_tokens=held_tokens,
        output_tokens=scene.output_tokens,
        held=held if held_tokens else {},
        decode=D1 if held_tokens else None,
    )


def decided(turn: Turn, fleet: Fleet, rules: Rules, scene: Scene) -> Decision:
    return decide(turn, fleet, rules, qps=scene.qps, now_s=NOW_S)


def destination(turn: Turn, decision: Decision) -> Destination:
    """A first turn has no D of its own: none is elsewhere."""
    elsewhere = turn.number > 1 and decision.decode.id != D1
    if decision.route is Route.LOCAL:
        return Destination.LOCAL_ELSEWHERE if elsewhere else Destination.LOCAL
    return Destination.SPLIT_ELSEWHERE if elsewhere else Destination.SPLIT
