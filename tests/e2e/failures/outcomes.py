"""All that is to be seen after a failure, and how it is held against the row of the failure table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ppd.proxy.beliefs.held import PromptEntry
from ppd.proxy.failures import Cause, ClientGets, HandoffEffect, HealthEffect, Leg, OtherLeg, Phase, ResidencyEffect
from ppd.proxy.fleet.worker import PairId, Role, WorkerId
from ppd.proxy.policy import Route
from ppd.proxy.telemetry.receipts import LegRecord, Receipt
from tests.e2e.failures.faults import ODD_TEXT, Case, Provocation, Strike
from tests.e2e.failures.fleet import FaultFleet, Seen, Talk

WORDS = "Some words, so that there are blocks to move. " * 3
ROUTES = {Leg.DECODE: Route.SPLIT, Leg.LOCAL: Route.LOCAL, Leg.REPLICA: Route.REPLICA}
"""By the leg that answers."""
RETRIED = {
    Leg.PREFILL: [Leg.PREFILL, Leg.PREFILL, Leg.DECODE],
    Leg.DECODE: [Leg.PREFILL, Leg.DECODE] * 2,
    Leg.LOCAL: [Leg.LOCAL, Leg.PREFILL, Leg.DECODE],
    Leg.REPLICA: [Leg.REPLICA, Leg.REPLICA],
}
"""The legs of a turn whose first worker for this one failed, where there is another."""
PARTED = [Leg.PREFILL, Leg.DECODE] * 3
"""The same where only the pair is blamed: the D is tried with the other P first."""
NO_LEG_ERROR = (Cause.CLIENT_GONE, Cause.NO_HANDOFF, Cause.DRAINING)


@dataclass(slots=True)
class Outcome:
    """All that is to be seen after a case."""

    case: Case
    provocation: Provocation
    field: FaultFleet
    is_alone: bool
    name: str  # of the worker that failed
    first: Receipt  # of the turn before, when all was well
    believed: int  # tokens of the session to be where it failed, before it did
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


async def strike(field: FaultFleet, talk: Talk, case: Case, provocation: Provocation, *, alone: bool) -> Outcome:
    """A conversation's second turn, on workers that its first turn has chosen, one of which now fails."""
    first = await field.ask(talk.body())
    receipt = field.newest()
    assert first.is_complete
    talk.heard(first.text, WORDS)
    name = struck_by(case, receipt)
    believed = held_by(field, receipt.session, case.leg)[1]
    received = {each: len(engine.received) for each, engine in field.engines.items()}
    forced = Route.LOCAL if case.leg is Leg.LOCAL else None
    body, seen = talk.body(stream=case.stream), Seen()
    async with provocation.arm(field.engines[name]):
        field.uptime.leaps_s = list(provocation.leaps_s)
        asking = asyncio.create_task(field.ask(body, seen, forced))
        if provocation.moment is not None and provocation.act is not None:
            moment, under_way = provocation.moment, Strike(field, case, name, asking, seen, received[name])
            # Where legs run together a turn may be over before its moment is seen; what it came to is held to the row.
            await field.until(lambda: asking.done() or (field.newest() is not receipt and moment(under_way)))
            if not asking.done():
                await provocation.act(under_way)
        with suppress(asyncio.CancelledError):
            await asking
        # A D that is wedged keeps what it waits to pull, whoever has left.
        await field.until(lambda: field.at_rest() or bool(field.engines[name].faults.wedge))
    await field.until(field.at_rest)
    right = await field.right_text(body)
    traps = {each: sum(engine.counters.traps.values()) for each, engine in field.engines.items()}
    newest = field.newest()
    return Outcome(case, provocation, field, alone, name, receipt, believed, newest, body, seen, right, traps, received)


# -- what the client gets


def answered(out: Outcome) -> None:
    assert out.seen.is_complete, out.seen
    assert out.seen.text == out.right
    assert out.receipt.outcome == "completed"


def failed(out: Outcome, status: int) -> None:
    assert out.seen.status == status, out.seen
    assert set(out.seen.json["error"]) == {"message", "type", "param", "code"}
    assert out.receipt.outcome == ("rejected" if status in (400, 404, 422) else "failed")


def told(out: Outcome) -> None:
    """What the client is told of the turn is how it was answered in the end."""
    last = out.legs[-1]
    headers = out.seen.headers
    assert (headers["X-PPD-Route"], headers["X-PPD-Decode"]) == (ROUTES[last.kind], last.worker)
    assert headers.get("X-PPD-Prefill") == (out.legs[-2].worker if last.kind is Leg.DECODE else None)
    assert out.receipt.route == ROUTES[last.kind]


def is_last_hope(out: Outcome) -> bool:
    """Nobody else could answer; without a P the D does it alone."""
    return out.is_alone and out.case.leg is not Leg.PREFILL


def another(out: Outcome) -> None:
    if is_last_hope(out):
        failed(
            out, {Cause.TIMEOUT: 504, Cause.UNKNOWN_MODEL: 404, Cause.UNKNOWN_RESPONSE: 404}.get(out.case.cause, 502)
        )
        return
    answered(out)
    used = {leg.worker for leg in out.legs if leg.error is None}
    assert out.name not in used
    retried = PARTED if out.case.row.health is HealthEffect.PAIR else RETRIED[out.case.leg]
    assert out.kinds == ([Leg.PREFILL, Leg.LOCAL] if out.is_alone else retried)
    told(out)


def another_or_queue(out: Outcome) -> None:
    if not is_last_hope(out):
        another(out)
        return
    failed(out, 429 if out.provocation.variant == "429" else 503)
    assert int(out.seen.headers["Retry-After"]) >= 1


def relayed(out: Outcome) -> None:
    failed(out, 422)
    own = json.loads(out.provocation.own)
    if out.field.view(out.name).worker.engine != "vllm":  # whose errors have no member `error` around them
        own, out.seen.body = own["error"]["message"], json.dumps(out.seen.json["error"]["message"]).encode()
    assert out.seen.json == own, "in the worker's own words"
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
    errors = [event for event in out.seen.events if "error" in event]
    assert errors == [json.loads(out.provocation.own)]


def nothing(out: Outcome) -> None:
    if out.case.phase is Phase.AFTER:
        assert (out.seen.events[-1], out.seen.text, out.receipt.outcome) == ("[DONE]", out.right, "completed")
    else:
        assert out.receipt.outcome == "cancelled"
        assert b"error" not in out.seen.body


def afresh(out: Outcome) -> None:
    answered(out)
    assert out.kinds == [Leg.PREFILL, Leg.DECODE] * 2
    assert out.legs[0].worker == out.legs[2].worker, "which has the prompt in its cache"
    told(out)


_GO_ON = (ClientGets.GOES_ON, ClientGets.AFRESH)  # the worker that failed may answer in the end
GETS: dict[ClientGets, Callable[[Outcome], None]] = {
    ClientGets.ANOTHER: another,
    ClientGets.AFRESH: afresh,
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
    released = fate is HandoffEffect.RELEASED and not out.is_alone
    if fate in (HandoffEffect.NONE, HandoffEffect.ABORTED, HandoffEffect.TAKEN) or released:
        await field.until(lambda: field.outstanding() == 0)
    elif fate is HandoffEffect.LEFT:
        assert field.outstanding() == len(out.failures), "one for each D that failed"
    else:
        assert field.outstanding() == 1
    # A P that fails as it answers has pinned the KV, and nobody knows: only its lease frees that.
    is_known = out.case.phase is not Phase.HEADERS or out.case.leg is not Leg.PREFILL
    is_freed = fate in (HandoffEffect.NONE, HandoffEffect.ABORTED, HandoffEffect.TAKEN) or released
    if is_freed and is_known and out.provocation.is_freed:
        await field.until(lambda: field.pinned() == 0)
    used = [used for each in field.engines for body in out.asked(each) if (used := _handoff(body))]
    assert len(used) == len(set(used)), "no handoff is used twice"
    if released:
        await field.until(lambda: _takers(out) != [])
        assert _takers(out) != [out.name]
    field.end_leases()
    assert field.outstanding() == field.pinned() == 0
    assert not any(out.traps.values())


def _takers(out: Outcome) -> list[str]:
    """Who took the KV that a D did not get."""
    asked = [(each, body) for each in out.received for body in out.asked(each)]
    return [each for each, body in asked if _handoff(body) and body.get("max_tokens") == 1]


# -- the worker's health


def held_against(field: FaultFleet) -> dict[WorkerId | PairId, HealthEffect]:
    """What the case has done to whom. Asking counts a failure more: two open a breaker here."""
    breakers, now_s = field.proxy.state.health.breakers, field.proxy.state.now()
    states, blocked = breakers.states(now_s), breakers.blocked(now_s)
    workers = {view.id: view.role for view in field.proxy.state.registry.views()}
    pairs = [(p, d) for p in workers for d in workers if (workers[p], workers[d]) == (Role.PREFILL, Role.DECODE)]
    found: dict[WorkerId | PairId, HealthEffect] = {}
    keys: list[WorkerId | PairId] = [*workers, *pairs]
    for key in keys:
        if key in states:
            found[key] = HealthEffect.OPENED
        elif key in blocked:
            found[key] = HealthEffect.PASSED_OVER
        if breakers.failed(key, now_s, began_s=now_s) and key not in states:
            found[key] = HealthEffect.PAIR if isinstance(key, tuple) else HealthEffect.COUNTED
    return found


def check_health(out: Outcome) -> None:
    expected: dict[WorkerId | PairId, HealthEffect] = {}
    effect, struck = out.case.row.health, out.field.worker(out.name)
    if effect is HealthEffect.PAIR:
        prefills = [out.field.worker(out.legs[at - 1].worker) for at, leg in enumerate(out.legs) if leg.error]
        expected = {(prefill, struck): effect for prefill in prefills}
    elif effect is not HealthEffect.UNTOUCHED:
        expected = {struck: effect}
    found = held_against(out.field)
    assert found == expected, (found, out.legs)


# -- what is believed of the session


def held_by(field: FaultFleet, session: str, leg: Leg) -> tuple[WorkerId, int]:
    """The worker that is believed to hold the session for such a leg, and how many of its tokens."""
    found = next(one for one in field.proxy.state.sessions.all() if one.id == session)
    residency = found.prefill_residency if leg is Leg.PREFILL else found.decode_residency
    assert residency is not None
    views = {view.id: view for view in field.proxy.state.registry.views()}
    entry = PromptEntry(found.history, found.history)
    held = field.proxy.state.beliefs.held(views, entry, residency.tokens).get(residency.worker)
    return residency.worker, 0 if held is None else held.tokens


def check_residency(out: Outcome) -> None:
    """Before the worker has returned: nothing but a turn that is complete changes a belief."""
    summary = out.field.proxy.state.sessions.summary(out.receipt.session)
    assert summary is not None
    is_complete = out.receipt.outcome == "completed"
    assert summary.turn == (2 if is_complete else 1)
    holder = out.legs[-1].worker if is_complete else out.first.decode
    assert summary.decode == out.field.worker(holder)
    goes_on = out.case.row.client in _GO_ON
    is_learnt = is_complete and holder == out.name and not goes_on
    assert (out.case.row.residency is ResidencyEffect.LEARNT) == is_learnt
    check_belief(out, ResidencyEffect.LEARNT if is_learnt else ResidencyEffect.UNCHANGED)


def check_belief(out: Outcome, residency: ResidencyEffect) -> None:
    """`residency`: what is to have become of the belief by now; nothing to see where it is another worker's."""
    worker, tokens = held_by(out.field, out.receipt.session, out.case.leg)
    if worker != out.field.worker(out.name):
        assert out.receipt.outcome == "completed", "only an answer moves a session"
        return
    if out.case.row.client in _GO_ON:
        return  # what the rest of the turn has taught stands in its place
    match residency:
        case ResidencyEffect.FALLS:
            assert tokens == 0
        case ResidencyEffect.UNCHANGED:
            assert tokens == out.believed > 0
        case ResidencyEffect.LEARNT:
            assert tokens == (out.receipt.prompt_tokens or 0) + (out.receipt.completion_tokens or 0) > out.believed


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
