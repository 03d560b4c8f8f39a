"""What a process knows of another's turns in the very round of its loop in which they run.

Each test is one round of process 1, which has looked for news already when process 0 does something.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ppd.proxy.admission.keys import Client
from ppd.proxy.admission.queue import Ticket
from ppd.proxy.assembly import Proxy
from ppd.proxy.errors import RateLimited
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint, ReadingRules, Request, parse_request
from ppd.proxy.peers import membership, turn_replication
from ppd.proxy.peers.events import SessionLearned
from ppd.proxy.routing.stream import tell
from ppd.proxy.sessions.hasher import Hasher
from ppd.proxy.sessions.table import MatchKind, SessionMatch, TurnOutcome
from tests.support.processes import R1, Pair, worker

pytestmark = pytest.mark.slow

PROMPT_TOKENS = 100
HASHER = Hasher(b"a secret of both processes")


@asynccontextmanager
async def pair_of(**settings: int) -> AsyncIterator[Pair]:
    one = Pair(**settings)
    try:
        await one.join()
        yield one
    finally:
        await one.hush()
        one.close()


def asked(*texts: str) -> Request:
    """A conversation: what the client says and what it heard, by turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    return parse_request(Endpoint.CHAT, body, {}, ReadingRules(hasher=HASHER, tenant=""))


def find(one: Proxy, request: Request) -> SessionMatch:
    return one.state.sessions.find(request.prompt, one.state.now())


def finish(one: Proxy, place: SessionMatch, request: Request, reply: str, *, prefill: WorkerId | None = None) -> None:
    key = ReplyKey(request)
    key.add_text(reply)
    outcome = TurnOutcome(
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=1,
        reply_key=key.key(),
        prefill=None if prefill is None else one.state.beliefs.residency(prefill, PROMPT_TOKENS),
    )
    one.state.sessions.finish(place, request.prompt, outcome, one.state.now())
    tell(one.state)


def looks(one: Proxy) -> None:
    """As each turn does before it is placed."""
    assert one.state.sessions.replicated is not None
    one.state.sessions.replicated.catch_up()


@pytest.mark.slow
async def test_a_newcomer_serves_when_it_knows_the_newest_sessions_and_is_told_the_others_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 200
    monkeypatch.setattr(turn_replication, "FIRST_SESSIONS", 2)
    monkeypatch.setattr(turn_replication, "BATCH_SESSIONS", 1)
    monkeypatch.setattr(membership, "SNAPSHOT_S", 0.0)
    async with pair_of() as pair:
        for number in range(count):
            request = asked(f"{number}")
            finish(pair.ones[1], find(pair.ones[1], request), request, "yo")
        known = [session.history for session in pair.ones[1].state.sessions.all()]
        batches = list(pair.ones[1].membership._replication.snapshot())
        told = [event.session.history for batch in batches for event in batch if isinstance(event, SessionLearned)]
        assert told == [*known[-2:], *known]
        looks(pair.ones[0])
        pair.ones[0].membership._channels.close()
        pair.ones[0] = successor = pair.begin(0)
        await successor.membership.join()
        assert len(successor.state.sessions) < count, "it need not wait"
        assert not successor.membership._has_state, "so that it sends nobody a part for the whole"
        while not successor.membership._has_state:
            await asyncio.sleep(0)
            successor.membership.catch_up()
        assert [session.history for session in successor.state.sessions.all()] == known


async def test_of_two_turns_that_go_on_from_one_neither_is_lost() -> None:
    async with pair_of() as pair:
        zero, one = pair.ones
        opening = asked("hi")
        finish(zero, find(zero, opening), opening, "yo")
        left, right = asked("hi", "yo", "left"), asked("hi", "yo", "right")
        places = find(zero, left), find(one, right)
        assert [place.turn for place in places] == [2, 2]
        finish(zero, places[0], left, "one")
        finish(one, places[1], right, "two")
        pair.clock += 1.0
        for process in pair.ones:
            process.membership.catch_up()
            for said, heard in (("left", "one"), ("right", "two")):
                place = find(process, asked("hi", "yo", said, heard, "more"))
                assert (place.kind, place.turn) == (MatchKind.NEXT, 3), (said, process)


@pytest.mark.parametrize("limit", [1, 2, 4, 600])
async def test_places_that_another_process_takes_are_taken_here_at_once(limit: int) -> None:
    async with pair_of(max_worker_inflight=limit, max_inflight=10_000) as pair:
        zero, one = pair.ones
        worker(zero.state.registry)
        zero.membership._channels.flush()
        looks(one)
        for _ in range(limit):
            zero.state.registry.reserve(R1)
        looks(one)
        view = one.state.registry.view(R1)
        assert view is not None and view.inflight == limit


async def test_one_probe_is_let_through_by_all() -> None:
    async with pair_of() as pair:
        zero, one = pair.ones
        worker(zero.state.registry)
        zero.state.health.breakers.failed(R1, pair.clock, began_s=pair.clock, at_once=True)
        zero.membership._channels.flush()
        one.membership.catch_up()
        pair.clock += 1000.0
        looks(one)
        assert R1 not in one.state.health.breakers.blocked(pair.clock)
        zero.state.health.breakers.began(R1, pair.clock)
        looks(one)
        assert R1 in one.state.health.breakers.blocked(pair.clock)


async def test_a_whole_answer_ends_failures_in_a_row_for_all() -> None:
    async with pair_of(breaker_failures=3) as pair:
        zero, one = pair.ones
        worker(zero.state.registry)
        zero.membership._channels.flush()
        looks(one)
        for failing, answered in ((zero, zero), (one, zero), (zero, one)):
            failing.state.health.breakers.failed(R1, pair.clock, began_s=pair.clock)
            failing.membership._channels.flush()
            looks(answered)
            answered.state.health.breakers.succeeded(R1, pair.clock)
            answered.membership._channels.flush()
            pair.clock += 1.0
            for process in pair.ones:
                looks(process)
                circuit = process.state.health.breakers.circuits[R1]
                assert (circuit.failures, circuit.openings) == (0, 0)


async def test_an_allowance_that_another_process_used_up_is_used_up_here_at_once() -> None:
    """Also for a list of prompts, which pays before any of its turns looks for a session."""
    async with pair_of() as pair:
        zero, one = pair.ones
        client = Client(name="one", tenant="one", requests_per_minute=1)
        looks(one)
        zero.state.rate_limits.take(client, 0, pair.clock)
        with pytest.raises(RateLimited):
            one.state.rate_limits.take(client, 0, pair.clock)


async def test_each_turn_that_came_is_counted_once_by_the_others() -> None:
    async with pair_of() as pair:
        zero, one = pair.ones
        for opens in (True, False, False):
            zero.state.arrivals.count(pair.clock, opens=opens)
        for _ in range(2):
            zero.membership._channels.flush()
            one.membership.catch_up()
        rates = [
            (
                process.state.arrivals.turns.rate_rps(pair.clock),
                process.state.arrivals.conversations.rate_rps(pair.clock),
            )
            for process in pair.ones
        ]
        assert rates == [(3.0, 1.0)] * 2


async def test_that_a_turn_has_ended_is_told_with_its_session() -> None:
    """In one packet, as each wakes the others."""
    async with pair_of() as pair:
        zero, one = pair.ones
        permit = zero.state.admission.try_enter(Ticket(tenant="", arrived_s=pair.clock, fits=lambda: True))
        assert permit is not None
        zero.membership._channels.flush()
        looks(one)
        assert one.state.admission.inside_elsewhere == 1
        request = asked("hi")
        permit.release()
        finish(zero, find(zero, request), request, "yo")
        looks(one)
        assert (one.state.admission.inside_elsewhere, len(one.state.sessions)) == (0, 1)
