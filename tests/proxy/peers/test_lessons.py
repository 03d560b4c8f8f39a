"""What one process learns of an answer the others have learned too, however it reaches them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ppd.proxy.assembly import new_state
from ppd.proxy.beliefs.held import CacheFound, Held, LegOutcome, Mark, PromptEntry, Residency, SentLeg
from ppd.proxy.beliefs.turn_touches import TurnCaches, TurnTouches
from ppd.proxy.config import ProxyConfig
from ppd.proxy.fleet.worker import Load, WorkerId
from ppd.proxy.laws.corrections import Figure, Measured
from ppd.proxy.laws.forecasts import AnswerEnded, SessionReturned
from ppd.proxy.laws.profiles import Profiles
from ppd.proxy.laws.worker_laws import TurnTimes
from ppd.proxy.peers.channels import Member
from ppd.proxy.peers.events import AnyEvent, Appliers, LegsUnderWay, TokensCounted
from ppd.proxy.peers.turn_replication import TurnReplication
from ppd.proxy.routing.state import State
from tests.proxy.peers.test_membership import catching_up
from tests.proxy.peers.test_rounds import asked, find, finish
from tests.support.processes import R1, Pair, worker

CAPACITY = 10_000
P1 = WorkerId("p1:1")
ON_R = TurnCaches(R1)
SHIPPED = "h100-llama-3.1-8b"
LIKES = f"{SHIPPED}/R/m"
SLOW = TurnTimes(
    0, [Measured(R1, "", LIKES, Figure.TTFT, 0.1, 1.0, 0.4), Measured(R1, "", LIKES, Figure.TPOT, 1, 1, 4)]
)
ADDED = (1, 3, 5, 4000)
MARK = Mark(77, 400)
POINT = Mark(71, 400)


@asynccontextmanager
async def pair_of() -> AsyncIterator[Pair]:
    """Two processes that know of one worker, whose cache has room for `CAPACITY` tokens."""
    one = Pair()
    try:
        await one.join()
        registry = one.ones[0].state.registry
        worker(registry)
        registry.loaded(R1, Load(kv_capacity_tokens=CAPACITY), 0.0)
        heard(one)
        yield one
    finally:
        await one.hush()
        one.close()


async def succeeded(pair: Pair) -> State:
    """Process 1 was killed, and another one takes its place."""
    pair.ones[1].membership._channels.close()
    pair.ones[1] = pair.begin(1)
    await asyncio.gather(pair.ones[1].membership.join(), catching_up(pair.ones[0], 20))
    heard(pair)
    return pair.ones[1].state


def heard(pair: Pair) -> None:
    for process in pair.ones:
        process.membership._channels.flush()
    for process in pair.ones:
        process.membership.catch_up()


def touches(
    state: State, history: int, tokens: int, source: int | None = None, caches: TurnCaches = ON_R
) -> TurnTouches:
    entry = PromptEntry(history, source, (MARK,))
    views = state.registry.fleet("m").views
    held = state.beliefs.held(views, entry, tokens)
    return TurnTouches(state.beliefs, entry, held, tokens, caches)


def holds(state: State, history: int) -> int:
    views = state.registry.fleet("m").views
    return state.beliefs.held(views, PromptEntry(history, history), 10**9).get(R1, Held(0, "")).tokens  # type: ignore[arg-type]


def opens(state: State) -> None:
    entry = PromptEntry(7, points=(POINT,))
    TurnTouches(state.beliefs, entry, {}, 900, TurnCaches(R1)).answering()


def begins_alike(state: State) -> int:
    """Tokens of a prompt that has no more in common with any other than a point inside of its head."""
    views = state.registry.fleet("m").views
    held = state.beliefs.held(views, PromptEntry(8, points=(POINT,)), 0).get(R1)
    return 0 if held is None else held.tokens


def missed(state: State) -> None:
    """Two prefixes that had been used just before."""
    where = state.beliefs.residency(R1, 2000)
    assert where is not None
    for history in (7, 8):
        state.beliefs.found(CacheFound(history, where, 500, 0))


def capacity(state: State) -> int:
    return state.beliefs.capacities()[R1]


def measured(state: State) -> None:
    """A worker that is slower than its profile."""
    for _ in range(20):
        state.laws.learn(SLOW, state.now())


def corrected(state: State) -> object:
    state.laws.use(Profiles(SHIPPED))
    view = state.registry.engine(R1)
    assert view is not None
    found = state.laws.of(view)
    assert found is not None
    return found.ttft_factor, found.tpot_factor, list(state.laws.judged())


def measured_too_far(state: State) -> None:
    state.laws.learn(replace(SLOW, is_guess=True), state.now())


def stayed(state: State) -> None:
    for number in range(30):
        at_s = state.now() - number
        state.forecasts.learn(AnswerEnded("m", 1, True, at_s - 5.0))
        state.forecasts.learn(SessionReturned("m", 1, True, at_s - 5.0, at_s))


def forecast(state: State) -> object:
    asked: Any = {"calls_tool": True, "idle_s": 1.0, "now_s": state.now() + 10.0}
    return state.forecasts.chance_of_return("m", 1, **asked)


TAUGHT: dict[str, tuple[Callable[[State], Any], Callable[[State], Any]]] = {
    "tokens by kind": (
        lambda state: state.tokens.learn("m", ADDED, 2000, 77),
        lambda state: (state.tokens.estimate("m", ADDED), state.tokens.expected_output("m", None, None)),
    ),
    "room in a cache": (missed, capacity),
    "a head that others share in part": (opens, begins_alike),
    "times beside the laws": (measured, corrected),
    "answers and pauses": (stayed, forecast),
    "a turn beyond the laws": (measured_too_far, lambda state: dict(state.laws.guesses)),
    "laws that an operator reset": (lambda state: state.laws.reset(), lambda state: state.laws.resets),
    "a prefix that was used": (lambda state: touches(state, 5, 900).answering(), lambda state: holds(state, 5)),
}


@pytest.mark.parametrize("lesson", TAUGHT)
@pytest.mark.parametrize("by", [0, 1])
async def test_what_one_learns_the_other_has_learned(lesson: str, by: int) -> None:
    teach, shown = TAUGHT[lesson]
    async with pair_of() as pair:
        touches(pair.ones[1 - by].state, 1, 10).answering()  # so that both have a book
        heard(pair)
        learner, other = pair.ones[by].state, pair.ones[1 - by].state
        before = shown(learner)
        assert shown(other) == before
        teach(learner)
        assert shown(learner) != before
        assert shown(other) == before
        heard(pair)
        assert shown(other) == shown(learner)


LATE = (
    *("tokens by kind", "room in a cache"),
    "answers and pauses",
    *("times beside the laws", "a turn beyond the laws", "laws that an operator reset"),
)


@pytest.mark.parametrize("lesson", LATE)
async def test_a_process_that_starts_late_is_told_what_answers_have_taught(lesson: str) -> None:
    teach, shown = TAUGHT[lesson]
    async with pair_of() as pair:
        teach(pair.ones[0].state)
        taught = shown(pair.ones[0].state)
        assert shown(await succeeded(pair)) == taught


async def test_what_an_answer_taught_is_there_before_the_next_turn_of_its_session() -> None:
    async with pair_of() as pair:
        zero, one = pair.ones
        request = asked("hi")
        place = find(zero, request)
        zero.state.tokens.learn("m", ADDED, 2000, 77)
        finish(zero, place, request, "yo")  # flushes nothing else
        assert find(one, asked("hi", "yo", "more")).turn == 2
        assert one.state.tokens.expected_output("m", None, None) == 77


# -- turns under way


@pytest.mark.parametrize("end", ["answering", "close"])
async def test_a_turn_under_way_elsewhere_takes_room_until_it_ends(end: str) -> None:
    async with pair_of() as pair:
        zero, one = (process.state for process in pair.ones)
        touches(zero, 5, 6000).answering()
        heard(pair)
        turn = touches(one, 6, 7000)
        turn.sent()
        heard(pair)
        assert (holds(zero, 5), holds(one, 5)) == (3000, 3000)  # 7,000 of 10,000 are spoken for
        getattr(turn, end)()
        heard(pair)
        assert [holds(state, 6) for state in (zero, one)] == [7000 if end == "answering" else 0] * 2
        touches(zero, 7, 6000).answering()
        heard(pair)
        assert holds(one, 5) == holds(zero, 5) == (0 if end == "answering" else 3000)


async def test_what_begins_like_a_turn_that_is_being_answered_elsewhere_is_known_at_once() -> None:
    async with pair_of() as pair:
        zero, one = (process.state for process in pair.ones)
        touches(zero, 5, 6000).answering()
        heard(pair)
        other = PromptEntry(6, None, (MARK,))
        assert one.beliefs.held(one.registry.fleet("m").views, other, 0)[R1].tokens == MARK.tokens


@pytest.mark.parametrize("comes", ["before", "after"])
async def test_turns_of_a_process_that_was_killed_take_no_room(comes: str) -> None:
    """Whether the others hear of the turn before or after the successor: its packet lies in their sockets."""
    async with pair_of() as pair:
        zero, one = (process.state for process in pair.ones)
        touches(zero, 5, 6000).answering()
        touches(one, 6, 7000).sent()
        pair.ones[1].membership._channels.flush()
        if comes == "before":
            pair.ones[0].membership.catch_up()
            assert holds(zero, 5) == 3000
        await succeeded(pair)
        touches(zero, 7, 7000).answering()
        assert [holds(zero, history) for history in (5, 6, 7)] == [3000, 0, 7000]


async def test_a_newcomer_knows_what_is_under_way_elsewhere_as_soon_as_it_knows_the_workers() -> None:
    async with pair_of() as pair:
        turn = touches(pair.ones[0].state, 6, 7000)
        turn.sent()
        newcomer = await succeeded(pair)
        touches(newcomer, 5, 1000).answering()
        assert newcomer.beliefs._books[R1].tokens == 8000
        turn.answering()
        heard(pair)
        assert holds(newcomer, 6) == 7000


# -- messages that are late, lost, repeated or nonsense

LEG = SentLeg(1, R1, 5, 3000, [MARK])
SENT, USED, LEFT = LEG, LegOutcome(1, True), LegOutcome(1, False)
NEXT = SentLeg(2, R1, 6, 4000, [])
GONE = SentLeg(3, WorkerId("r9:9"), 6, 4000, [])


@pytest.mark.parametrize(
    ("events", "held", "room"),
    [
        ([SENT], 0, 3000),
        ([SENT, SENT, SENT], 0, 3000),
        ([SENT, USED], 3000, 3000),
        ([SENT, USED, USED], 3000, 3000),
        ([SENT, LEFT], 0, 0),
        ([SENT, LEFT, USED], 0, 0),
        ([USED, SENT, LEFT], 0, 0),  # the first is of a leg that nobody has heard of
        ([SENT, SENT, LEFT, LEFT], 0, 0),
        ([SENT, NEXT, LegsUnderWay([NEXT])], 0, 4000),  # how one ended was lost
        ([SENT, LegsUnderWay([LEG, NEXT]), USED], 3000, 7000),  # and how another began
        ([SENT, LegsUnderWay([])], 0, 0),
        ([LegsUnderWay([LEG]), LegsUnderWay([LEG]), LEFT], 0, 0),
        ([SENT, GONE, LegOutcome(3, True), USED], 3000, 3000),
    ],
)
def test_events_of_legs_that_are_lost_or_repeated(events: list[AnyEvent], held: int, room: int) -> None:
    state, appliers = told()
    state.beliefs.ended(1, [Residency(R1, state.registry.views()[0].incarnation, 0)], ())  # makes the book
    for event in events:
        appliers[type(event)](1, event)
    assert (holds(state, 5), state.beliefs._books[R1].tokens) == (held, room)


def test_legs_of_two_processes_with_one_number_are_two() -> None:
    state, appliers = told()
    appliers[SentLeg](1, SENT)
    appliers[SentLeg](2, replace(LEG, history=6))
    appliers[LegOutcome](2, USED)
    assert (holds(state, 5), holds(state, 6)) == (0, 3000)
    appliers[LegOutcome](1, USED)
    assert (holds(state, 5), holds(state, 6)) == (3000, 3000)


def told() -> tuple[State, Appliers]:
    """A process alone, and how it applies what others send."""
    member = Member()
    state = new_state(ProxyConfig(), member, lambda: 1000.0)
    worker(state.registry)
    state.registry.loaded(R1, Load(kv_capacity_tokens=CAPACITY), 0.0)
    return state, TurnReplication(member, state, lambda: 100).appliers()


async def test_an_answer_of_an_engine_that_has_restarted_since_says_nothing_of_the_new_one() -> None:
    async with pair_of() as pair:
        zero, one = (process.state for process in pair.ones)
        touches(zero, 5, 6000).answering()
        missed(zero)
        one.registry._views[R1] = replace(one.registry._views[R1], incarnation="another")
        heard(pair)
        touches(one, 6, 10).answering()
        assert capacity(zero) < capacity(one) == CAPACITY


@pytest.mark.parametrize("tokens", [10**30, -(10**30)])
async def test_whatever_engines_count_the_others_hear_of_it_and_of_the_session(tokens: int) -> None:
    async with pair_of() as pair:
        zero, one = pair.ones
        touches(zero.state, 5, 600).answering()
        turn = touches(zero.state, 5, 700, source=5)
        turn.sent()
        turn.answered(max(0, tokens))
        request = asked("hi")
        place = find(zero, request)
        zero.state.tokens.learn("m", ADDED, tokens, tokens)
        finish(zero, place, request, "yo")
        assert find(one, asked("hi", "yo", "more")).turn == 2
        assert one.state.tokens.estimate("m", ADDED) == zero.state.tokens.estimate("m", ADDED)


async def test_what_cannot_be_sent_does_not_keep_the_rest_from_being_sent() -> None:
    async with pair_of() as pair:
        zero, one = pair.ones
        zero.membership._channels.queue(TokensCounted("m", (), 1 << 70, None))
        with pytest.raises(OverflowError):
            zero.membership._channels.flush()
        zero.state.tokens.learn("m", ADDED, 2000, 77)
        zero.membership._channels.flush()
        one.membership.catch_up()
        assert one.state.tokens.expected_output("m", None, None) == 77


async def test_what_a_turn_tells_is_small() -> None:
    async with pair_of() as pair:
        zero = pair.ones[0]
        turn = touches(zero.state, 5, 6000)
        turn.sent()
        turn.answering()
        turn.close()
        zero.state.tokens.learn("m", ADDED, 2000, 77)
        turn.answered(0)
        sent = zero.membership._channels._outbox
        assert [type(event) for event in sent] == [SentLeg, LegOutcome, TokensCounted]
        assert len(msgspec.msgpack.encode(sent)) < 150


async def test_a_turn_that_had_no_p_leaves_the_ps_book_as_it_was_in_all() -> None:
    """Though its session still knows which P the turn before had."""
    async with pair_of() as pair:
        zero, one = pair.ones
        worker(zero.state.registry, P1)
        heard(pair)
        request = asked("hi")
        finish(zero, find(zero, request), request, "yo", prefill=P1)
        touches(zero.state, 5, 600, caches=TurnCaches(P1)).answering()  # later than that turn
        heard(pair)
        used = newest(zero.state, P1)
        assert len(used) == 2
        request = asked("hi", "yo", "more")
        finish(zero, find(zero, request), request, "so")
        heard(pair)
        assert newest(zero.state, P1) == newest(one.state, P1) == used


def newest(state: State, address: WorkerId) -> list[int]:
    book = state.beliefs.book(address)
    assert book is not None
    return book.newest(10)
