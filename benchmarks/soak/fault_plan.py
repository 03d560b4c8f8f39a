"""Which faults happen when, and what a client may notice of each. Pure: everything follows from a seed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from random import Random
from typing import Any, Final

import msgspec

from .engines import SPARE, SoakEngines
from .records import FINE, ClientOutcome, Disturbance, FleetFault, RequestRecord

PROXY: Final = "proxy"
ENGINES: Final = "engines"  # whichever gets the poisoned prompt

# What a client may notice of each fault. All others are hidden by another worker or a retry before the first byte.
COSTS: Final[dict[FleetFault, frozenset[ClientOutcome]]] = {
    FleetFault.KILL: frozenset({ClientOutcome.BROKEN}),
    FleetFault.CUT: frozenset({ClientOutcome.BROKEN}),
    FleetFault.EVENT: frozenset({ClientOutcome.BROKEN}),
    FleetFault.HANG: frozenset(
        {ClientOutcome.TIMED_OUT}
    ),  # for an answer that is not streamed, no time is left to retry
    FleetFault.WEDGE: frozenset({ClientOutcome.TIMED_OUT}),
    # asyncio forgets a connection that it accepts while its server closes.
    FleetFault.DEAF: frozenset({ClientOutcome.TIMED_OUT}),
    # A turn that was aboard both engines that die is a suspect too: it ends with 502, and is refused for a while.
    FleetFault.POISON: frozenset({ClientOutcome.BROKEN, ClientOutcome.FAILED}),
    # Time goes on meanwhile: limits for reading and answering are over when the proxy goes on.
    FleetFault.PAUSE: frozenset({ClientOutcome.BROKEN, ClientOutcome.TIMED_OUT}),
}
AFTER_S: Final = 1.0  # how long after its end a fault may still show

# The roles that a fault needs; a replica takes no part in a KV transfer.
_ROLES = {FleetFault.FLIP: "PD", FleetFault.HANDOFF: "P", FleetFault.LOAD: "D", FleetFault.WEDGE: "P"}
_MANY = 10_000  # more requests than can come during one fault
_CALM_S = (2.0, 4.0)
_LASTS_S = (2.5, 5.0)
_PAUSE_S = (1.0, 12.0)  # P keeps a handoff for 8 s
_SETTLES_S = 2.0  # until the proxy knows that a worker is back
_TWO_AT_ONCE = 0.5


def plan(seed: int, seconds: float, engines: SoakEngines) -> list[Disturbance]:
    """One or two at a time with a pause between; no kind repeats before all have come; all end before `seconds`."""
    draw = Random(f"{seed}/disturbances")
    kinds = _shuffled(draw, [kind for kind in FleetFault if kind is not FleetFault.FLIP or engines.may_change_role])
    planned: list[Disturbance] = []
    at_s = draw.uniform(*_CALM_S)
    while at_s + _PAUSE_S[1] + _SETTLES_S < seconds:
        together = [_disturbance(draw, next(kinds), at_s, engines, ())]
        if draw.random() < _TWO_AT_ONCE:
            other = _disturbance(draw, next(kinds), at_s, engines, {together[0].worker})
            alone = FleetFault.POISON in (together[0].kind, other.kind)  # it may end the other one's engine
            together.append(other)
            if alone:
                planned.append(together.pop(0))
                at_s += planned[-1].lasts_s + _SETTLES_S + draw.uniform(*_CALM_S)
                together[0] = msgspec.structs.replace(other, at_s=at_s)
        planned += together
        at_s += max(one.lasts_s for one in together) + _SETTLES_S + draw.uniform(*_CALM_S)
    return planned


def costs(request: RequestRecord, disturbances: Iterable[Disturbance]) -> frozenset[ClientOutcome]:
    """The outcomes that are no defect for this request, given the faults during it."""
    return FINE.union(*(COSTS.get(one.kind, FINE) for one in felt(request, disturbances)))


def felt(request: RequestRecord, disturbances: Iterable[Disturbance]) -> list[Disturbance]:
    return [
        one
        for one in disturbances
        if request.sent_s <= one.at_s + one.lasts_s + AFTER_S and request.ended_s >= one.at_s
    ]


def faults(one: Disturbance) -> dict[str, Any]:
    match one.kind:
        case FleetFault.REFUSE:
            return {"refuse": _MANY, "refuse_status": one.detail}
        case FleetFault.CUT:
            return {"cut": _MANY, "cut_after_events": one.detail}
        case FleetFault.HANG | FleetFault.GARBAGE:
            return {one.kind.value: _MANY}
        case FleetFault.WEDGE:
            return {"wedge": ["*"]}
        case FleetFault.DEAF:
            return {"deaf_s": one.lasts_s}
        case _:
            orders: dict[FleetFault, dict[str, Any]] = {
                FleetFault.PAGE: {"kind": "page", "status": 502},
                FleetFault.SLOW: {"kind": "slow", "delay_s": 0.05},
                FleetFault.EVENT: {"kind": "error", "phase": "events", "after_events": one.detail},
                FleetFault.ABORT: {"kind": "abort", "phase": "head"},
                FleetFault.HANDOFF: {"kind": "handoff"},
                FleetFault.LOAD: {"kind": "load"},
            }
            return {"orders": [orders[one.kind] | {"times": _MANY}]}


def _disturbance(
    draw: Random, kind: FleetFault, at_s: float, engines: SoakEngines, taken: Collection[str]
) -> Disturbance:
    one_only = {FleetFault.JOIN: SPARE, FleetFault.POISON: ENGINES}
    one_only |= dict.fromkeys((FleetFault.PAUSE, FleetFault.CONFIG, FleetFault.CLOCK), PROXY)
    roles = _ROLES.get(kind, "PDR")
    able = [one_only[kind]] if kind in one_only else [name for name in engines.names if name[0] in roles]
    events = draw.randint(0, 12)
    return Disturbance(
        kind=kind,
        worker=draw.choice([name for name in able if name not in taken] or able),
        at_s=at_s,
        lasts_s=draw.uniform(*(_PAUSE_S if kind is FleetFault.PAUSE else _LASTS_S)),
        detail={FleetFault.REFUSE: draw.choice((429, 500, 503)), FleetFault.CUT: events, FleetFault.EVENT: events}.get(
            kind, 0
        ),
    )


def _shuffled(draw: Random, kinds: Sequence[FleetFault]) -> Iterator[FleetFault]:
    last: FleetFault | None = None
    while True:
        deck = list(kinds)
        draw.shuffle(deck)
        if deck[0] is last:  # some have only one target, and two may come at once
            deck.reverse()
        yield from deck
        last = deck[-1]
