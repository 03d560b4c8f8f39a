"""Every row of the failure table, provoked through real sockets, and held against the row's own data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from failure_faults import (
    DRAINED,
    EVERY_CASE,
    ODD_TEXT,
    PROVOCATIONS,
    QUEUED,
    Case,
    Provocation,
    Strike,
    not_provoked,
)
from fault_field import Field, Seen, Talk, field_of
from ppd.proxy.config import Mode
from ppd.proxy.policy import Route
from ppd.proxy.receipts import LegRecord, Receipt
from ppd.proxy.resilience.failures import Belief, Cause, ClientGets, Fate, Leg, OtherLeg, Phase, Standing
from ppd.proxy.workers import PairId, Role, WorkerId

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORDS = "Some words, so that there are blocks to move. " * 3
NO_LEG_ERROR = (Cause.CLIENT_GONE, Cause.NO_HANDOFF, Cause.DRAINING)


class Fields:
    """Fleets by the names of their workers, each started once."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._fields: dict[str, Field] = {}
        self._talks = 0

    async def of(self, names: str) -> Field:
        if names not in self._fields:
            mode = Mode.REPLICA if names.startswith("R") else Mode.ALWAYS_SPLIT
            field = self._fields[names] = await self._stack.enter_async_context(field_of(names, mode=mode))
            await field.until_known()
        return self._fields[names]

    def talk(self) -> Talk:
        """A conversation that no other case has."""
        self._talks += 1
        return Talk([{"role": "user", "content": f"{self._talks} {WORDS}"}])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fields() -> AsyncIterator[Fields]:
    async with AsyncExitStack() as stack:
        yield Fields(stack)


@dataclass(slots=True)
class Outcome:
    """All that is to be seen after a case."""

    case: Case
    provocation: Provocation
    field: Field
    is_alone: bool
    name: str  # of the worker that failed
    first: Receipt  # of the turn before, when all was well
    receipt: Receipt
    body: dict[str, Any]  # what the client asked
    seen: Seen
    right: str  # text
    traps: dict[str, int]
    received: dict[str, int]  # requests by engine, before this turn

    def asked(self, name: str) -> list[dict[str, Any]]:
        """The bodies of this turn's requests to an engine, and of what came after it."""
        return [json.loads(one.body) for one in list(self.field.engines[name].received)[self.received[name] :]]

    @property
    def legs(self) -> list[LegRecord]:
        return self.receipt.legs

    @property
    def kinds(self) -> list[Leg]:
        return [leg.kind for leg in self.receipt.legs]

    @property
    def struck(self) -> LegRecord:
        """The record of the leg that failed, the first one if several did."""
        return next(leg for leg in self.receipt.legs if leg.kind is self.case.leg)

    @property
    def failures(self) -> list[LegRecord]:
        return [leg for leg in self.receipt.legs if leg.kind is self.case.leg and leg.error is not None]


def topology(case: Case, *, alone: bool) -> str:
    if case.leg is Leg.REPLICA:
        return "R1" if alone else "R1 R2"
    return "P1 D1" if alone else "P1 P2 D1 D2"


def struck_by(case: Case, receipt: Receipt) -> str:
    """The worker that the next turn of this conversation will ask."""
    return receipt.prefill if case.leg is Leg.PREFILL else receipt.decode


async def strike(fields: Fields, case: Case, provocation: Provocation, *, alone: bool) -> Outcome:
    """A conversation's second turn, on workers that its first turn has chosen, one of which now fails."""
    field, talk = await fields.of(topology(case, alone=alone)), fields.talk()
    first = await field.ask(talk.body())
    receipt = field.newest()
    assert first.is_complete
    talk.heard(first.text, WORDS)
    name = struck_by(case, receipt)
    received = {each: len(engine.received) for each, engine in field.engines.items()}
    forced = Route.LOCAL if case.leg is Leg.LOCAL else None
    body, seen = talk.body(stream=case.stream), Seen()
    async with provocation.arm(field.engines[name]):
        asking = asyncio.create_task(field.ask(body, seen, forced))
        if provocation.moment is not None and provocation.act is not None:
            moment, under_way = provocation.moment, Strike(field, case, name, asking, seen, received[name])
            await field.until(lambda: field.newest() is not receipt and moment(under_way), 5)
            await provocation.act(under_way)
        with suppress(asyncio.CancelledError):
            await asking
        await field.until(field.at_rest, 5)
    right = await field.right_text(body)
    traps = {each: sum(engine.counters.traps.values()) for each, engine in field.engines.items()}
    return Outcome(case, provocation, field, alone, name, receipt, field.newest(), body, seen, right, traps, received)


# -- what the client gets


def answered(out: Outcome) -> None:
    assert out.seen.is_complete, out.seen
    assert out.seen.text == out.right
    assert out.receipt.outcome == "completed"


def failed(out: Outcome, status: int) -> None:
    assert out.seen.status == status, out.seen
    assert set(out.seen.json["error"]) == {"message", "type", "param", "code"}
    assert out.receipt.outcome == "failed"


def is_last_hope(out: Outcome) -> bool:
    """Nobody else could answer; without a P the D does it alone."""
    return out.is_alone and out.case.leg is not Leg.PREFILL


def another(out: Outcome) -> None:
    if is_last_hope(out):
        failed(out, 504 if out.case.cause is Cause.TIMEOUT else 502)
        return
    answered(out)
    used = {leg.worker for leg in out.legs if leg.error is None}
    assert out.name not in used
    if out.is_alone:
        assert out.kinds == [Leg.PREFILL, Leg.LOCAL]


def another_or_queue(out: Outcome) -> None:
    if not is_last_hope(out):
        another(out)
        return
    failed(out, 503)
    assert int(out.seen.headers["Retry-After"]) >= 1


def relayed(out: Outcome) -> None:
    failed(out, 422)
    assert out.seen.json["error"]["code"] == 422
    assert len(out.failures) == 1, "a client's own mistake is not tried elsewhere"


def timed_out(out: Outcome) -> None:
    failed(out, 504)
    assert len(out.failures) == 1, "it is not computed twice"


def goes_on(out: Outcome) -> None:
    if out.case.cause is Cause.MALFORMED:
        assert (out.seen.is_complete, out.seen.text) == (True, ODD_TEXT)
        assert any(event == "{odd" for event in out.seen.events), "what can't be read is not for the proxy to judge"
    else:
        answered(out)


def broken_off(out: Outcome) -> None:
    *others, last = out.seen.events
    assert (out.seen.status, out.seen.is_whole, out.receipt.outcome) == (200, True, "broken")
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert "[DONE]" not in others
    assert out.right.startswith(out.seen.text)
    assert out.struck.events, "the receipt says where"


def passed_on(out: Outcome) -> None:
    broken_off(out)
    errors = [event["error"]["message"] for event in out.seen.events if "error" in event]
    assert errors == ["Refused on request."]


def nothing(out: Outcome) -> None:
    if out.case.phase is Phase.AFTER:
        assert (out.seen.events[-1], out.seen.text, out.receipt.outcome) == ("[DONE]", out.right, "completed")
    else:
        assert out.receipt.outcome == "cancelled"
        assert b"error" not in out.seen.body


GETS: dict[ClientGets, Callable[[Outcome], None]] = {
    ClientGets.ANOTHER: another,
    ClientGets.ANOTHER_OR_QUEUE: another_or_queue,
    ClientGets.RELAYED: relayed,
    ClientGets.TIMED_OUT: timed_out,
    ClientGets.GOES_ON: goes_on,
    ClientGets.BROKEN_OFF: broken_off,
    ClientGets.PASSED_ON: passed_on,
    ClientGets.NOTHING: nothing,
}


# -- what becomes of the other leg


def check_other_leg(out: Outcome) -> None:
    kinds, at = out.kinds, out.legs.index(out.struck)
    before, after = kinds[:at], kinds[at + 1 : at + 2]
    plain = [body for each in out.received if each[0] == "D" for body in out.asked(each) if _handoff(body) is None]
    match out.case.row.other_leg:
        case OtherLeg.NONE:
            assert before == []
        case OtherLeg.NOT_ASKED:
            assert (before, Leg.DECODE in after) == ([], False)
        case OtherLeg.ENDED:
            assert kinds == [Leg.PREFILL]
            assert _takers(out) == [out.receipt.decode]
        case OtherLeg.ASKED:
            assert kinds == [Leg.PREFILL, Leg.DECODE]
            assert len(plain) == 1
            assert out.receipt.handoff_missing
        case OtherLeg.REDONE:
            assert (before, out.legs[0].error) == ([Leg.PREFILL], None)
            retries = out.case.row.client_gets(stream=out.case.stream) is not ClientGets.TIMED_OUT
            assert after == ([Leg.PREFILL] if retries and not out.is_alone else after)
        case OtherLeg.DONE:
            assert (kinds, out.legs[0].error) == ([Leg.PREFILL, Leg.DECODE], None)
        case other:
            raise AssertionError(f"{other} is not checked here")


# -- the handoff


def _handoff(body: dict[str, Any]) -> str | None:
    params = body.get("kv_transfer_params") or {}
    return params.get("remote_request_id") if params.get("do_remote_prefill") else None


async def check_handoff(out: Outcome) -> None:
    field, fate = out.field, out.case.row.handoff
    released = fate is Fate.RELEASED and not out.is_alone
    if fate in (Fate.NONE, Fate.ABORTED, Fate.TAKEN) or released:
        await field.until(lambda: field.outstanding() == 0, 5)
    elif fate is Fate.LEFT:
        assert field.outstanding() == len(out.failures), "one for each D that failed"
    else:
        assert field.outstanding() == 1
    # A P that fails as it answers has pinned the KV, and nobody knows: only its lease frees that.
    is_known = out.case.phase is not Phase.HEADERS or out.case.leg is not Leg.PREFILL
    is_freed = fate in (Fate.NONE, Fate.ABORTED, Fate.TAKEN) or released
    if is_freed and is_known and out.provocation.is_freed:
        await field.until(lambda: field.pinned() == 0, 5)
    used = [used for each in field.engines for body in out.asked(each) if (used := _handoff(body))]
    assert len(used) == len(set(used)), "no handoff is used twice"
    if released:
        await field.until(lambda: _takers(out) != [], 5)
        assert _takers(out) != [out.name]
    field.end_leases()
    assert field.outstanding() == field.pinned() == 0
    assert not any(out.traps.values())


def _takers(out: Outcome) -> list[str]:
    """Who took the KV that a D did not get."""
    asked = [(each, body) for each in out.received for body in out.asked(each)]
    return [each for each, body in asked if _handoff(body) and body.get("max_tokens") == 1]


# -- the worker's standing


def held_against(field: Field) -> dict[WorkerId | PairId, Standing]:
    """What the case has done to whom. Asking counts a failure more: two open a breaker here."""
    breakers, now_s = field.proxy.state.standings.breakers, field.proxy.state.now()
    states, blocked = breakers.states(now_s), breakers.blocked(now_s)
    workers = {view.id: view.role for view in field.proxy.state.registry.views()}
    pairs = [(p, d) for p in workers for d in workers if (workers[p], workers[d]) == (Role.PREFILL, Role.DECODE)]
    found: dict[WorkerId | PairId, Standing] = {}
    keys: list[WorkerId | PairId] = [*workers, *pairs]
    for key in keys:
        if key in states:
            found[key] = Standing.OPENED
        elif key in blocked:
            found[key] = Standing.PASSED_OVER
        if breakers.failed(key, now_s, began_s=now_s) and key not in states:
            found[key] = Standing.PAIR if isinstance(key, tuple) else Standing.COUNTED
    return found


def check_standing(out: Outcome) -> None:
    expected: dict[WorkerId | PairId, Standing] = {}
    standing, struck = out.case.row.standing, out.field.worker(out.name)
    if standing is Standing.PAIR:
        prefills = [out.field.worker(out.legs[at - 1].worker) for at, leg in enumerate(out.legs) if leg.error]
        expected = {(prefill, struck): standing for prefill in prefills}
    elif standing is not Standing.UNTOUCHED:
        expected = {struck: standing}
    assert held_against(out.field) == expected


# -- what is believed of the session


def check_residency(out: Outcome) -> None:
    summary = out.field.proxy.state.sessions.summary(out.receipt.session)
    assert summary is not None
    is_learnt = out.receipt.outcome == "completed"
    assert summary.turn == (2 if is_learnt else 1)
    holder = out.legs[-1].worker if is_learnt else out.first.decode
    assert summary.decode == out.field.worker(holder)
    if out.case.row.residency is Belief.LEARNT:
        assert (is_learnt, holder) == (True, out.name)


# -- the receipt


def check_receipt(out: Outcome) -> None:
    record = out.struck
    assert record.worker == out.name
    row_is_error = out.case.cause not in NO_LEG_ERROR and out.case.phase is not Phase.AFTER
    if row_is_error and out.case.row.client is not ClientGets.GOES_ON:
        assert (record.phase, record.error) == (out.case.phase, out.case.cause)
    elif out.case.cause is not Cause.CLIENT_GONE:  # what a leg comes to that its client has left is of no account
        assert record.error is None
    assert all(leg.ended_s is not None for leg in out.legs)


async def test_every_failure_is_provoked_or_says_why_it_cannot_be() -> None:
    ways = (PROVOCATIONS, QUEUED, DRAINED)
    for case in EVERY_CASE:
        assert sum(case in way for way in ways) + (not_provoked(case) is not None) == 1, str(case)


def tries() -> list[Any]:
    """Each variant of each case, with another worker there and, where one is asked for, without."""
    found = []
    for case, provocations in PROVOCATIONS.items():
        needs = case.row.client_gets(stream=case.stream) in (ClientGets.ANOTHER, ClientGets.ANOTHER_OR_QUEUE)
        for provocation in provocations:
            for alone in (False, True) if needs else (False,):
                name = "-".join(filter(None, (str(case), provocation.variant, "alone" if alone else "")))
                found.append(pytest.param(case, provocation, alone, id=name))
    return found


@pytest.mark.parametrize(("case", "provocation", "alone"), tries())
async def test_what_happens_is_what_the_table_says(
    fields: Fields, case: Case, provocation: Provocation, alone: bool
) -> None:
    out = await strike(fields, case, provocation, alone=alone)
    try:
        GETS[case.row.client_gets(stream=case.stream)](out)
        check_other_leg(out)
        check_receipt(out)
        check_residency(out)
        if not alone:
            check_standing(out)
        await check_handoff(out)
    finally:
        out.field.forgive()
    again = await out.field.ask({**out.body, "stream": False})
    assert (again.is_complete, again.text) == (True, out.right), "the next turn succeeds at once"
    await out.field.until(out.field.idle, 5)
