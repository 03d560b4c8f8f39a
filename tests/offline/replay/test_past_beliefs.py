"""What the proxy believed while it served a log's turns, made again from their receipts."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.replay.past_beliefs import KnownSession, PastBeliefs, SessionLimits
from ppd.offline.replay.past_fleet import PastFleet
from ppd.offline.replay.past_turns import PastTurn
from ppd.offline.replay.replay import Compared, replay
from ppd.offline.simulation.believed import laws_of
from ppd.offline.simulation.setup import Setup
from ppd.proxy.beliefs.held import Held
from ppd.proxy.config import Mode
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.laws.profiles import Profiles
from ppd.proxy.laws.step_time import EngineProfile
from ppd.proxy.laws.targets import USUAL
from ppd.proxy.laws.worker_laws import WorkerLaws
from ppd.proxy.policy.returns import Recomputed
from ppd.proxy.telemetry.receipts import Receipt
from tests.support.decisions import rules
from tests.support.stepped_engine import profile_of

from .receipts import BEGAN_S, log_of, receipt, taken
from .recorded import recorded

LAWS = WorkerLaws(Profiles("h100-llama-3.1-8b"))
D1, D2, P1 = WorkerId("D1:1"), WorkerId("D2:1"), WorkerId("P1:1")
CAPACITY = 2500  # tokens: two sessions of 1,050, and a bit
FULL = 2000  # tokens that are written there evict them


class Played:
    """A log played up to its end, on D1, D2 and P1, which are there all the time."""

    def __init__(self, *receipts: Receipt, limits: SessionLimits | None = None, prefills_answer: bool = False) -> None:
        there = [
            receipt("P1 D1", 0.0, session="a", outcome="failed"),
            receipt("D2", 0.0, session="b", outcome="failed"),
        ]
        turns = log_of(*there, *receipts).turns
        self.fleet = PastFleet(turns, CAPACITY)
        limits = limits or SessionLimits()
        self.beliefs = PastBeliefs(self.fleet.engine, self.fleet.when, limits, prefills_answer=prefills_answer)
        self.known: list[KnownSession] = []
        self.most_kept = 0
        for turn in turns:
            views = self.fleet.at(turn.decided_s, "m").views
            known = self.beliefs.came(turn)
            held = self.beliefs.held(turn, known, known.tokens, views)
            self.beliefs.begin(turn, known, held, known.tokens, self.fleet.begin(turn, taken(turn)))
            self.known.append(known)
            self.most_kept = max(self.most_kept, len(self.beliefs))

    def held(self, turn: PastTurn, seconds: float) -> dict[WorkerId, Held]:
        views = self.fleet.at(BEGAN_S + seconds, "m").views
        known = self.beliefs.came(turn)
        return self.beliefs.held(turn, known, known.tokens, views)

    def lost(self, seconds: float, worker: WorkerId = D1, tokens: int = FULL) -> float:
        self.fleet.at(BEGAN_S + seconds, "m")
        slow = EngineProfile(prefill_token_s=1.0)
        return self.beliefs.returns.lost(worker, "m", tokens, BEGAN_S + seconds, Recomputed(slow, USUAL))

    def back(self, seconds: float, worker: WorkerId = D1) -> float:
        """Within a second."""
        self.fleet.at(BEGAN_S + seconds, "m")
        return self.beliefs.returns.within(1.0, worker, "m", BEGAN_S + seconds)


def next_turn(seconds: float, session: str = "s") -> PastTurn:
    (turn,) = log_of(receipt("D2", seconds, session=session, turn=2, estimated_cached_tokens=0)).turns
    return turn


TWO = receipt("D1", 1.0, session="s"), receipt("D1", 3.0, session="t")


@pytest.mark.parametrize(
    ("receipts", "tokens"),
    [
        (TWO[:1], {D1: 1050}),
        ([receipt("P1 D1", 1.0)], {D1: 1050, P1: 1000}),
        ([receipt("D1", 1.0, outcome="failed")], {}),
        ([receipt("D1", 1.0, outcome="cancelled", prompt_tokens=None)], {}),
        ([receipt("D1", 1.0, prompt_tokens=None, counts_evidence="estimate")], {D1: 1050}),
        ([*TWO, receipt("D1", 5.0, session="u")], {D1: 1050 - (3 * 1050 - CAPACITY)}),
        ([*TWO, receipt("D1", 5.0, session="u"), receipt("D1", 7.0, session="v")], {}),
        ([receipt("D1", 1.0), receipt("P1 D1", 3.0, turn=2, route="READBACK")], {D1: 2050, P1: 2000}),
    ],
)
def test_what_workers_hold_is_what_their_turns_left_there(
    receipts: Sequence[Receipt], tokens: dict[WorkerId, int]
) -> None:
    held = Played(*receipts).held(next_turn(20.0), 20.0)
    assert {worker: one.tokens for worker, one in held.items()} == tokens


def test_a_session_is_awaited_on_its_worker_until_it_is_back() -> None:
    assert Played().back(5.0) == 0.0
    played = Played(*TWO)
    assert played.back(5.0) > 0.0
    assert played.back(5.0, D2) == 0.0
    back = Played(*TWO, receipt("D1", 4.5, turn=2), receipt("D1", 4.5, session="t", turn=2))
    assert back.back(5.0) == 0.0, "both are under way"


def test_what_is_evicted_costs_those_who_would_come_back() -> None:
    played = Played(*TWO)
    assert played.lost(5.0, tokens=CAPACITY - 2100) == 0.0
    assert 0.5 < played.lost(5.0) <= 2.0
    assert Played(*TWO).lost(4000.0) == 0.0, "nobody returns after an hour"
    same = {"estimated_prompt_tokens": 1000, "prompt_tokens": 1000}
    moved = Played(*TWO, *(receipt("D2", 5.0, session=name, turn=2, **same) for name in "st"))
    assert moved.lost(10.0) == 0.0, "D2 holds both too"


def test_a_turn_that_was_never_answered_takes_room_only_while_it_is_under_way() -> None:
    failed = receipt("D1", 3.0, session="t", estimated_prompt_tokens=1400, outcome="failed", prompt_tokens=None)
    failed.legs[0].first_event_s = None
    played = Played(TWO[0], failed)
    assert played.lost(3.5, tokens=1000) > 0.0
    assert played.lost(5.0, tokens=1000) == 0.0


def test_pauses_and_calls_of_tools_are_learnt() -> None:
    """Of sessions whose answer called a tool all are back within 2 s, of the others none."""
    calls = [
        receipt("D1", at_s, session=f"c{number}", turn=turn, finish_reason="tool_calls" if turn == 1 else "stop")
        for number in range(60)
        for turn, at_s in ((1, 10.0 * number), (2, 10.0 * number + 3.0))
    ]
    for reason, is_soon in (("tool_calls", True), ("tool_use", True), ("stop", False)):
        played = Played(*calls, receipt("D1", 700.0, session="new", finish_reason=reason))
        assert (played.lost(702.0, tokens=CAPACITY) > 0.9) is is_soon, reason


def test_what_a_branch_repeats_is_its_sessions_and_both_go_on() -> None:
    played = Played(receipt("D1", 1.0), receipt("D1", 3.0, turn=2, kind="branch", estimated_cached_tokens=500))
    assert played.back(9.0) > 0.0
    first, branch = played.known[-2:]
    assert branch.history != first.history
    assert (branch.source, branch.tokens, branch.decode) == (first.history, 1050, D1)
    assert played.beliefs.came(next_turn(9.0)).history == branch.history


@pytest.mark.parametrize("kind", ["first", "lost"])
def test_a_name_that_begins_anew_holds_nothing_and_prefers_its_worker(kind: str) -> None:
    *_, before, anew = Played(receipt("D1", 1.0), receipt("D2", 3.0, kind=kind)).known
    assert (anew.source, anew.tokens, anew.decode, anew.affinity) == (None, 0, None, D1)
    assert anew.history != before.history


def test_the_next_turn_may_come_within_the_millisecond_in_which_the_answer_ended() -> None:
    played = Played(receipt("D1", 0.0), receipt("D1", 1.0995, turn=2))
    assert played.known[-1].tokens == 1050


@pytest.mark.slow
def test_sessions_out_of_use_are_forgotten_by_time_and_by_number() -> None:
    chats = [receipt("D1", 20.0 * number, session=f"s{number}") for number in range(6000)]
    assert Played(*chats, limits=SessionLimits(ttl_s=100.0)).most_kept < 2000
    assert Played(*chats, limits=SessionLimits(most=10)).most_kept < 2000
    assert Played(*chats, limits=SessionLimits(ttl_s=1e9)).most_kept > 11_000


# -- logs that are not as they should be


def decided(*receipts: Receipt) -> Compared:
    return replay(log_of(*receipts).turns, rules(Mode.SLO, laws=LAWS), LAWS, capacity_tokens=CAPACITY)


def chats(at_s: float = 0.0, *, workers: str = "D1", model: str = "m", name: str = "s") -> list[Receipt]:
    return [
        receipt(workers, at_s + 1.3 * number + 9.0 * turn, session=f"{name}{number}", turn=turn, model=model)
        for number in range(12)
        for turn in range(1, 4)
    ]


MANY = 10**9
LOG = [*chats(), *chats(0.2, workers="P1 D2", name="t")]


def figures(compared: Compared) -> tuple[object, ...]:
    return compared.changes, *compared.ttft_s, *compared.missed


def test_receipts_out_of_order_repeated_or_of_several_processes_decide_alike() -> None:
    expected = figures(decided(*sorted(LOG, key=lambda one: one.at)))
    shuffled = LOG.copy()
    Random(1).shuffle(shuffled)
    for log in (shuffled, [*LOG, *LOG], [*LOG[::2], *LOG[1::2]]):
        assert figures(decided(*log)) == expected


def test_turns_of_another_model_are_on_other_workers_and_change_nothing_here() -> None:
    mixed = decided(*LOG, *chats(workers="D3", model="other", name="x"))
    alone = decided(*LOG)
    assert mixed.count == alone.count + 36
    assert mixed.changes == alone.changes


@pytest.mark.parametrize(
    "log",
    [
        [receipt("D1", 5.0 * number, session="") for number in range(9)],
        [receipt("D1", 20.0 - 5.0 * turn, turn=turn) for turn in range(1, 5)],  # the clock went back
        [receipt("D1", 0.0, turn=7), receipt("D1", 9.0, turn=9, kind="retry"), receipt("D1", 19.0, kind="branch")],
        [receipt(f"D{1 + number}", 400.0 * number, turn=1 + number) for number in range(5)],  # workers come and go
        [receipt("D1", 0.0, ended_s=1e6), receipt("D1", 5e5, turn=2)],
        [
            receipt("P1 D1", 0.0, legs=[]),
            receipt("P1 D1", 0.0, prompt_tokens=None, completion_tokens=None, ttft_s=None),
        ],
        [
            receipt(
                "D1",
                0.0,
                prompt_tokens=10**9,
                completion_tokens=10**9,
                cached_tokens=10**9,
                estimated_prompt_tokens=10**9,
            )
        ],
    ],
)
def test_whatever_a_log_says_each_turn_is_decided(log: list[Receipt]) -> None:
    turns = log_of(*log).turns
    assert decided(*log).count == len(turns) > 0


def test_turns_without_a_session_are_each_alone() -> None:
    alone = decided(*(receipt("D1", 5.0 * number, session="") for number in range(9)))
    assert [*alone.sessions] == [*range(9)]


# -- against the live policy

AGENTS = Workload(
    first=Profile(name="first", new_tokens=12_000, output_tokens=150),
    later=Profile(name="later", new_tokens=400, output_tokens=150),
    turns=5,
    think_s=15.0,
)


@pytest.mark.parametrize(("capacity_tokens", "qps", "most"), [(120_000, 0.5, 0.03), (120_000, 1.0, 0.07)])
def test_a_log_of_slo_is_decided_as_it_was_and_otherwise_without_returns(
    capacity_tokens: int, qps: float, most: float
) -> None:
    """Caches are too small for the sessions that pause. What differs is what turns taught the live proxy's laws."""
    setup = Setup(profile=profile_of(kv_capacity_tokens=capacity_tokens))
    run = Run(topology="1P_3D", workload=AGENTS, qps=qps, x=0.0, seconds=60.0, conversations=60)
    turns, laws = log_of(*recorded(run, setup)).turns, laws_of(setup)
    by = rules(Mode.SLO, laws=laws)

    def changed(*, returns: bool) -> float:
        limits = SessionLimits(returns=returns)
        compared = replay(turns, by, laws, capacity_tokens=capacity_tokens, sessions=limits)
        assert compared.count == len(turns) == 300
        return compared.changes.total() / compared.count

    assert changed(returns=True) < most
    assert changed(returns=False) > 3 * most
