"""A receipt log as turns: what was known of each before it was decided, and what became of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ppd.proxy.cli.receipt_damage import Damage
from ppd.proxy.cli.table_view import printable
from ppd.proxy.laws.targets import USUAL, SloTargets

Count = Annotated[int, Meta(ge=0, le=10**9)]
Time = Annotated[float, Meta(ge=0, le=10**9)]
Name = Annotated[str, Meta(max_length=512)]


class _Leg(msgspec.Struct, gc=False):
    kind: Name
    worker: Name
    address: Name
    started_s: Time
    first_event_s: Time | None = None
    ended_s: Time | None = None


class _Line(msgspec.Struct, gc=False):
    """The part of a receipt that is read."""

    at: Annotated[datetime, Meta(tz=True)]
    model: Name
    session: Name
    turn: Count
    kind: Name
    route: Literal["", "LOCAL", "SPLIT", "REPLICA", "READBACK"] = ""
    reason: Name = ""
    forced: Name = ""
    decode: Name = ""
    prefill: Name = ""
    qps: Time = 0.0
    waited_s: Time = 0.0
    estimated_prompt_tokens: Count = 0
    estimated_new_tokens: Count = 0
    estimated_cached_tokens: Count = 0
    cached_evidence: Name = ""
    estimated_output_tokens: Count = 0
    slo: SloTargets = USUAL
    predicted_ttft_s: Time | None = None
    legs: list[_Leg] = []
    outcome: Name = ""
    finish_reason: Name | None = None
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    cached_tokens: Count | None = None
    ttft_s: Time | None = None
    tpot_s: Time | None = None
    ended_s: Time | None = None


class LegTimes(msgspec.Struct, frozen=True, gc=False):
    """Of one leg, in seconds of the log's clock. first_s: of its answer; None: not known."""

    worker: str
    address: str
    began_s: float
    first_s: float | None
    ended_s: float


class PastTurn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    arrived_s: float
    decided_s: float
    model: str
    session: str
    number: int
    kind: str
    route: str
    reason: str
    forced: str
    qps: float
    prompt_tokens: int  # estimated, as the decision knew them
    repeated_tokens: int  # of the prompt, that earlier turns of the session had; estimated
    cached_tokens: int  # believed to be held by the answering worker
    evidence: str
    output_tokens: int
    slo: SloTargets
    answering: LegTimes
    prefill: LegTimes | None
    is_completed: bool
    finish_reason: str
    prompt_counted: int | None  # by the engine, of a completed turn
    completion_counted: int | None
    cached_counted: int | None
    ttft_s: float | None  # measured from the decision on
    tpot_s: float | None
    recorded_ttft_s: float | None  # that the decision itself predicted


class PastLog(msgspec.Struct, kw_only=True):
    """In the order of decisions."""

    turns: list[PastTurn]
    damage: Damage
    undecided: int = 0  # receipts of turns that no worker took on
    repeated: int = 0  # receipts that are there once more, as where files were joined that overlap

    @property
    def is_empty(self) -> bool:
        """No receipt was there at all, not even a damaged one."""
        return not (self.turns or self.undecided or self.damage.count)


_LINE = msgspec.json.Decoder(_Line)


def read_log(lines: Iterable[tuple[int, bytes]]) -> PastLog:
    """lines: with their numbers."""
    log = PastLog(turns=[], damage=Damage())
    targets = dict[SloTargets, SloTargets]()
    for number, line in lines:
        if line.isspace():
            continue
        with log.damage.of_line(number):
            turn = _past_turn(_LINE.decode(line), targets)
            if turn is None:
                log.undecided += 1
            else:
                log.turns.append(turn)
    log.turns.sort(key=lambda turn: turn.decided_s)
    read, log.turns = len(log.turns), list(_once(log.turns))
    log.repeated = read - len(log.turns)
    return log


def _once(turns: Iterable[PastTurn]) -> Iterator[PastTurn]:
    """turns: in order. Those without a session may be alike, and be others."""
    at_once = list[PastTurn]()
    for turn in turns:
        if not at_once or at_once[0].decided_s != turn.decided_s:
            at_once = [turn]
        elif turn.session and turn in at_once:
            continue
        else:
            at_once.append(turn)
        yield turn


def _past_turn(receipt: _Line, targets: dict[SloTargets, SloTargets]) -> PastTurn | None:
    """None of a turn that no worker took on: it reached none, or was refused for what it asked."""
    arrived_s, ended_s = receipt.at.timestamp(), receipt.ended_s
    if arrived_s < 0.0:
        raise ValueError("Expected a time from 1970 on - at `$.at`")
    if receipt.outcome == "rejected":  # as a prompt beyond the model's context is: its length would count as work
        return None
    legs = [_times(leg, arrived_s, ended_s) for leg in receipt.legs]
    answering = next((leg for leg in reversed(legs) if leg.worker == receipt.decode), None)
    prefill = next((leg for leg in reversed(legs) if receipt.prefill and leg.worker == receipt.prefill), None)
    if not receipt.route or answering is None or (receipt.route in ("SPLIT", "READBACK")) is not (prefill is not None):
        return None
    decided_s = (answering if prefill is None else prefill).began_s
    is_completed = receipt.outcome == "completed"
    intern = sys.intern
    return PastTurn(
        arrived_s=arrived_s,
        decided_s=decided_s,
        model=intern(printable(receipt.model)),
        session=intern(receipt.session),
        number=receipt.turn,
        kind=intern(receipt.kind),
        route=intern(receipt.route),
        reason=intern(receipt.reason),
        forced=intern(receipt.forced),
        qps=receipt.qps,
        prompt_tokens=max(1, receipt.estimated_prompt_tokens),
        repeated_tokens=max(0, receipt.estimated_prompt_tokens - receipt.estimated_new_tokens),
        cached_tokens=receipt.estimated_cached_tokens,
        evidence=intern(receipt.cached_evidence),
        output_tokens=max(1, receipt.estimated_output_tokens),
        slo=targets.setdefault(receipt.slo, receipt.slo),
        answering=answering,
        prefill=prefill,
        is_completed=is_completed,
        finish_reason=intern(receipt.finish_reason or ""),
        prompt_counted=receipt.prompt_tokens if is_completed else None,
        completion_counted=receipt.completion_tokens if is_completed else None,
        cached_counted=receipt.cached_tokens if is_completed else None,
        ttft_s=None if receipt.ttft_s is None else max(0.0, arrived_s + receipt.ttft_s - decided_s),
        tpot_s=receipt.tpot_s,
        recorded_ttft_s=receipt.predicted_ttft_s,
    )


def _times(leg: _Leg, arrived_s: float, turn_ended_s: float | None) -> LegTimes:
    last_s = leg.ended_s if leg.ended_s is not None else turn_ended_s
    began_s = arrived_s + leg.started_s
    first_s = None if leg.first_event_s is None else arrived_s + leg.first_event_s
    ended_s = max(began_s, began_s if last_s is None else arrived_s + last_s)
    return LegTimes(sys.intern(leg.worker), sys.intern(leg.address), began_s, first_s, ended_s)


def workers_of(turns: Iterable[PastTurn]) -> Iterator[tuple[PastTurn, LegTimes]]:
    """Each leg of each turn."""
    for turn in turns:
        yield turn, turn.answering
        if turn.prefill is not None:
            yield turn, turn.prefill
