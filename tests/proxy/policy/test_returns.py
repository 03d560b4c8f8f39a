"""What workers wait for, and what is lost with what they evict."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ppd.proxy.beliefs.beliefs import Beliefs
from ppd.proxy.beliefs.held import Residency
from ppd.proxy.config import Mode
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Load, Role, Worker, WorkerId
from ppd.proxy.laws.forecasts import AnswerEnded, Forecasts, SessionReturned
from ppd.proxy.laws.step_time import EngineProfile
from ppd.proxy.laws.targets import USUAL
from ppd.proxy.policy import Decision, Rules, Turn, decide
from ppd.proxy.policy.modes.slo import EVICTED_WEIGHT
from ppd.proxy.policy.returns import KEPT_S, OLDEST, Recomputed, Returns
from ppd.proxy.sessions.session import Session
from ppd.proxy.sessions.table import SessionTable
from tests.support.decisions import FIRST, SameLaws, fleet_of

MODEL, NOW_S, CAPACITY = "m", 5000.0, 1000
HERE, THERE, ON_P = WorkerId("here:8000"), WorkerId("there:8000"), WorkerId("p:8000")
ROLES = {HERE: Role.DECODE, THERE: Role.DECODE, ON_P: Role.PREFILL}


class World:
    """Sessions of 400 tokens, of which nine in ten come back 10 s after their first turn."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        load = Load(0, 0, 0.0, capacity)
        views = {
            worker: WorkerView(worker=Worker(role=role, address=worker), name=worker, incarnation="i", load=load)
            for worker, role in ROLES.items()
        }
        self.views = views
        self.beliefs = Beliefs(views.get)
        self.sessions = SessionTable(ttl_s=3600.0, capacity=10_000, beliefs=self.beliefs)
        self.forecasts = Forecasts()
        self.returns = Returns(self.sessions, self.beliefs, self.forecasts)
        for number in range(100):
            ended_s = NOW_S - 4900.0 + number
            self.forecasts.take(AnswerEnded(MODEL, 1, False, ended_s))
            if number % 10:
                self.forecasts.take(SessionReturned(MODEL, 1, False, ended_s, ended_s + 10.0))

    def answered(self, history: int, seen_s: float, worker: WorkerId = HERE, tokens: int = 400) -> Session:
        session = Session(history, None)
        session.turn, session.seen_s = 1, seen_s
        session.learn(100.0, Residency(worker, "i", tokens), None, calls_tool=False)
        self.sessions.adopt(session, None, ())
        return session

    def restart(self, worker: WorkerId) -> None:
        self.views[worker] = replace(self.views[worker], incarnation="j")

    def back(self, within_s: float = 1.0, worker: WorkerId = HERE, now_s: float = NOW_S) -> float:
        return self.returns.within(within_s, worker, MODEL, now_s)

    def lost(self, tokens: int, now_s: float = NOW_S, worker: WorkerId = HERE) -> float:
        """Where the engines are so slow that all is late which is computed again."""
        slow = EngineProfile(prefill_token_s=1.0)
        return self.returns.lost(worker, MODEL, tokens, now_s, Recomputed(slow, USUAL))

    def decided(self, turn: Turn) -> Decision:
        """Of two D; the one that is there has a stream already."""
        busier = replace(self.views[THERE], decoding=1, context_tokens=1000, inflight=1)
        by = Rules(mode=Mode.SLO, laws=SameLaws(), returns=self.returns)
        views = fleet_of((self.views[HERE], busier), MODEL)
        return decide(turn, views, by, qps=1.0, now_s=NOW_S)


def test_sessions_return_to_their_worker_after_pauses_like_those_seen() -> None:
    world = World()
    assert world.back() == 0.0
    world.answered(1, NOW_S - 10.0)
    assert world.back(worker=THERE) == 0.0
    soon = World()
    soon.answered(1, NOW_S - 10.0)
    late = World()
    late.answered(1, NOW_S - 300.0)
    assert soon.back() > 10 * late.back()


@pytest.mark.parametrize(
    ("away_s", "within_s", "expected"),
    [
        (4.0, 2.0, 0.0),  # it is sure to stay away for longer
        (4.0, 16.0, 0.9),  # and to be back by then, if at all
        (4.0, 600.0, 0.9),
        (9.8, 4.0, 0.9),  # never more than once
        (9.8, 60.0, 0.9),
        (300.0, 60.0, 0.0),  # it has gone for good
        (7200.0, 60.0, 0.0),
    ],
)
def test_how_many_come_back_depends_on_how_long_they_are_waited_for(
    away_s: float, within_s: float, expected: float
) -> None:
    world = World()
    world.answered(1, NOW_S - away_s)
    assert world.back(within_s) == pytest.approx(expected, abs=0.1)
    world.answered(2, NOW_S - away_s)
    assert world.back(within_s, now_s=NOW_S + KEPT_S) == pytest.approx(2 * expected, abs=0.2)


@pytest.mark.parametrize(
    ("away_s", "prompt_tokens", "expected"),
    [
        (None, 110_000, HERE),  # 7.6 s on an idle D
        (6.0, 110_000, THERE),  # somebody would come back before it is done
        (0.5, 110_000, HERE),
        (6.0, 20_000, HERE),  # half a second
        (300.0, 110_000, HERE),
    ],
)
def test_a_long_prompt_is_computed_where_nobody_comes_back_meanwhile(
    away_s: float | None, prompt_tokens: int, expected: WorkerId
) -> None:
    world = World(capacity=1_000_000)
    if away_s is not None:
        world.answered(1, NOW_S - away_s)
    decision = world.decided(replace(FIRST, prompt_tokens=prompt_tokens, output_tokens=500))
    assert decision.decode.id == expected


def test_of_turns_that_are_here_and_sessions_that_left_none_is_awaited() -> None:
    world = World()
    world.answered(1, NOW_S - 9.0).came_back()
    world.answered(2, NOW_S - 9.0)
    world.answered(2, NOW_S - 8.9, THERE)
    dropped = world.answered(3, NOW_S - 9.0)
    assert world.sessions.drop(dropped.id)
    assert world.back() == 0.0
    assert world.back(worker=THERE) > 0.0


def test_what_is_evicted_costs_those_who_would_have_come_back() -> None:
    world = World()
    world.answered(1, NOW_S - 8.0)
    world.answered(2, NOW_S - 4.0)
    assert world.lost(200) == 0.0  # there is room for it
    assert world.lost(600) == pytest.approx(0.9, abs=0.1)  # the first one's
    assert world.lost(400) == pytest.approx(world.lost(600) / 2)
    assert world.lost(1000) == pytest.approx(1.8, abs=0.2)
    assert World().lost(10_000) == 0.0


@pytest.mark.parametrize(
    ("tokens", "sessions", "expected"),
    [
        (500, 180, 0.0),  # many short histories are computed again in no time
        (30_000, 3, 1.6),  # it takes a second for each of these, of which two are evicted
        (30_000, 0, 0.0),
    ],
)
def test_kv_may_be_evicted_that_is_soon_computed_again(tokens: int, sessions: int, expected: float) -> None:
    """The first one's prompt, and twice as much that is still to come, take the place of all but 40,000 tokens."""
    world = World(capacity=100_000)
    for number in range(sessions):
        world.answered(number + 1, NOW_S - 1.0, tokens=tokens)
    decision = world.decided(replace(FIRST, prompt_tokens=20_000, output_tokens=500))
    terms = {one.decode.id: one.terms["evicted"] for one in decision.candidates}
    assert terms[HERE] == pytest.approx(EVICTED_WEIGHT * expected, abs=0.1)
    assert terms[THERE] == 0.0


def test_who_stays_away_for_long_is_no_loss() -> None:
    world = World()
    world.answered(1, NOW_S - 1000.0)
    world.answered(2, NOW_S - 4.0)
    assert world.lost(600) < 0.1
    assert world.lost(1000) > 0.8


def test_what_another_worker_holds_too_is_not_lost() -> None:
    world = World()
    world.answered(1, NOW_S - 8.0, THERE)
    world.answered(1, NOW_S - 7.9)
    world.answered(2, NOW_S - 4.0)
    assert world.lost(600) == 0.0


def test_where_p_answer_too_what_one_holds_is_as_good_as_a_ds() -> None:
    world = World()
    world.answered(1, NOW_S - 8.0, ON_P)
    world.answered(1, NOW_S - 7.9)
    world.answered(2, NOW_S - 4.0)
    assert world.lost(600) > 0.8
    world.returns.prefills_answer = True
    assert world.lost(600, NOW_S + KEPT_S) == 0.0


def test_what_a_p_holds_takes_no_ds_place_and_a_d_takes_a_ps() -> None:
    """A turn that comes back to its D would wait until P's KV is there; from P it needs nothing that its D has."""
    world = World()
    for session in (1, 2):
        world.answered(session, NOW_S - 8.0, ON_P)
        world.answered(session, NOW_S - 7.9)
    assert world.lost(600) == pytest.approx(0.9, abs=0.1)
    assert world.lost(600, worker=ON_P) == 0.0


def test_what_has_been_evicted_since_is_not_lost_again() -> None:
    world = World()
    world.answered(1, NOW_S - 8.0)
    world.answered(2, NOW_S - 4.0)
    whole = world.lost(1000)
    world.answered(3, NOW_S, tokens=600)  # evicts all of the first one's
    assert world.lost(400) == pytest.approx(whole - 0.9, abs=0.1)
    assert world.lost(400, NOW_S + KEPT_S) == pytest.approx(whole - 0.9, abs=0.1)


def test_beyond_what_was_asked_for_the_rest_is_taken_to_be_alike() -> None:
    world = World(capacity=400 * OLDEST * 3)
    for number in range(OLDEST * 3):
        world.answered(number + 1, NOW_S - 8.0)
    assert world.lost(400 * OLDEST * 2) == pytest.approx(2 * world.lost(400 * OLDEST))


@pytest.mark.parametrize("capacity", [0, 1])
def test_a_worker_that_is_not_known_or_says_nothing_loses_nothing(capacity: int) -> None:
    world = World(capacity)
    assert (world.back(), world.lost(10**9)) == (0.0, 0.0)
    world.answered(1, NOW_S - 8.0)
    assert world.lost(10**9) == 0.0 if not capacity else world.lost(10**9) >= 0.0


def test_a_clock_that_goes_back_is_asked_anew() -> None:
    world = World()
    world.answered(1, NOW_S - 9.0)
    assert world.back(now_s=NOW_S) > 0.0
    assert world.back(now_s=NOW_S - 100.0) >= 0.0


def test_of_an_engine_that_restarted_nothing_is_awaited() -> None:
    world = World()
    world.answered(1, NOW_S - 9.0)
    assert world.back() > 0.0
    world.restart(HERE)
    world.beliefs.ended(2, [Residency(HERE, "j", 10)], ())
    assert world.back() == 0.0
