"""The order that the registry keeps changes no decision: the rules as they are over all workers, against it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace as replace_worker
from hashlib import sha256
from random import Random

import pytest
from msgspec.structs import replace

from ppd.proxy.beliefs.held import BeliefEvidence, Held
from ppd.proxy.config import Mode, StageOrder
from ppd.proxy.connectors import answers_alone, can_pair
from ppd.proxy.errors import AllBusy, NoWorkerError
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.order import Ranked, RankRule, first_ranked, includes, largest
from ppd.proxy.fleet.ranking import kv_rank, work_rank
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import Fleet, WorkerView, taking_turns
from ppd.proxy.fleet.worker import Announcement, Load, PairId, Role, Source, Worker, WorkerId
from ppd.proxy.laws.profiles import Profiles
from ppd.proxy.laws.worker_laws import WorkerLaws
from ppd.proxy.policy import Decision, Excluded, Rules, Turn, decide
from ppd.proxy.policy.candidates import find_candidates
from ppd.proxy.policy.placement import MOST_HASHED, SlowStart, is_overloaded, own_worker, pick_decode, pick_prefill
from ppd.proxy.policy.stage_order import OrderRules
from ppd.proxy.policy.ways import BY_WORK
from tests.support.decisions import FIRST

MODEL = "m"
WARM_UP_S = 60.0
IN_SLOW_START = SlowStart(150.0, WARM_UP_S).rule(work_rank, work_rank)

# -- the rules as plain code over all workers


def slow_start(view: WorkerView, now_s: float) -> float:
    age_s = now_s - view.since_s
    return 1.0 if age_s >= WARM_UP_S else max(0.1, age_s / WARM_UP_S)


def rank(view: WorkerView, factor: float) -> tuple[float, ...]:
    load, requests, queued = view.load, (view.requests + 1) / factor, view.queued_prefill_tokens / factor
    placed = view.placed_tokens / load.kv_capacity_tokens if load.kv_capacity_tokens else 0.0
    return (load.kv_usage >= 0.95, requests, queued, round(load.kv_usage + placed, 2), view.placed_tokens / factor)


def first(
    views: Sequence[WorkerView], rank_of: Callable[[WorkerView], tuple[float, ...]], session_id: str
) -> WorkerView | None:
    least = min((rank_of(view) for view in views), default=())
    equals = [view for view in views if rank_of(view) == least]
    return min(equals, key=lambda view: sha256(f"{view.id} {session_id}".encode()).digest(), default=None)


def mean(values: list[int]) -> float:
    return sum(values) / len(values)


def overloaded(view: WorkerView, views: Sequence[WorkerView], few: int = 1) -> bool:
    return view.load.kv_usage >= 0.95 or view.requests > 1.25 * mean([each.requests for each in views]) + few


def own(turn: Turn, views: Sequence[WorkerView]) -> WorkerView | None:
    if turn.stored_response:
        return next((view for view in views if view.id == turn.decode), None)
    if not turn.held_tokens:
        return None
    found = []
    for view in views:
        held = turn.held.get(view.id)
        is_own = held is not None and held.evidence is not BeliefEvidence.SHARED_PREFIX and not held.is_shared
        if is_own and turn.held_by(view) >= max(1.0, 0.5 * turn.held_tokens):
            found.append(view)
    return max(found, key=lambda view: (turn.held_by(view), view.id == turn.decode), default=None)


def plain_decode(turn: Turn, views: Sequence[WorkerView], now_s: float) -> WorkerView | None:
    if (session := own(turn, views)) is not None:
        return session

    def work(view: WorkerView) -> float:
        return (view.queued_prefill_tokens + turn.prompt_tokens - turn.held_by(view)) / slow_start(view, now_s)

    preferred = turn.affinity or turn.decode
    last = next((view for view in views if not turn.held_tokens and view.id == preferred), None)
    if last is not None and turn.lost != "decode_restarted" and not overloaded(last, views):
        least: WorkerView | None = last
    else:
        least = first(views, lambda view: rank(view, slow_start(view, now_s)), turn.session_id)
    room = 1.25 * mean([each.recent_tokens for each in views]) + turn.prompt_tokens if views else 0.0
    holders = [v for v in views if turn.held_by(v) and not overloaded(v, views, 2) and v.recent_tokens <= room]
    if least is None or not holders:
        return least
    best = min(holders, key=lambda view: (work(view), rank(view, slow_start(view, now_s))))
    return best if work(best) < work(least) else least


def plain_prefill(turn: Turn, views: Sequence[WorkerView], now_s: float) -> WorkerView | None:
    def until_done(view: WorkerView) -> tuple[float, ...]:
        tokens = view.queued_prefill_tokens + turn.prompt_tokens - turn.held_by(view)
        return (tokens / slow_start(view, now_s), view.requests)

    return first(views, until_done, turn.session_id)


Narrowed = tuple[list[WorkerView], list[WorkerView], list[WorkerView], set[WorkerId]]


def narrowed(turn: Turn, fleet: Fleet, limit: float, avoid: Excluded, blocked: Excluded) -> Narrowed:
    """P, D and R that may be asked, and those D and R that only lack room."""
    answering, session = (*fleet.decodes, *fleet.replicas), own(turn, (*fleet.decodes, *fleet.replicas))
    prefills = [v for v in fleet.prefills if v.id not in avoid and v.id not in blocked and v.inflight < limit]
    able = [v for v in answering if v.id not in avoid]
    free = [v for v in able if not v.is_full(limit) or (v is session and v.inflight < limit)]
    full = {v.id for v in able if v not in free}
    free = [v for v in free if v.id not in blocked] or free
    return prefills, [v for v in free if v.role is Role.DECODE], [v for v in free if v.role is Role.REPLICA], full


# -- fleets as they come and go


class RandomFleet:
    def __init__(self, seed: int) -> None:
        self.random, self.registry, self.now_s = Random(seed), Registry(), 0.0
        self.mixed = self.random.random() < 0.5  # several kinds of engines, of which not all can pair
        self.open: list[LegBooking] = []
        for number in range(self.random.randint(1, 50)):
            self.announce(number)
            if self.random.random() < 0.3:
                self.fill(WorkerId(f"w{number}:1"))
        self.now_s = self.random.choice((10.0, 59.0, 1000.0))

    def announce(self, number: int) -> None:
        pick, role = self.random.choice, Role("PDR"[min(2, number % 4)] if number > 1 else "D")
        worker = Worker(role=role, address=f"w{number}:1", models=(MODEL,), incarnation="i", source=Source.AGENT)
        if self.mixed:
            worker = replace_worker(
                worker, engine_version=pick((*5 * ("0.31",), "0.32")), connector=pick((*8 * ("nixl",), "p2p_nccl"))
            )
        load = Load(pick((0, 0, 1, 5)), pick((0, 0, 2)), pick((0.0, 0.2, 0.2, 0.96)), pick((0, 100_000)))
        self.registry.apply(Announcement(worker, load, draining=self.random.random() < 0.05), self.now_s)

    def fill(self, worker: WorkerId) -> None:
        """It keeps a queue, so that it has few places, and has as many legs or fewer."""
        for _ in range(3):
            self.registry.loaded(worker, Load(waiting=9), self.now_s)
        for _ in range(self.random.randrange(4)):
            self.registry.reserve(worker)

    def turn(self) -> Turn:
        pick, views = self.random.choice, self.registry.views()
        number, prompt_tokens = pick((1, 2)), pick((100, 5000, 20_000))
        held = {
            view.id: Held(pick((50, prompt_tokens, 2 * prompt_tokens)), pick(list(BeliefEvidence)), pick((False, True)))
            for view in self.random.sample(views, min(len(views), pick((0, 0, 1, 5))))
        }
        return Turn(
            model=MODEL,
            session_id=f"{self.random.getrandbits(64):016x}",
            number=number,
            prompt_tokens=prompt_tokens,
            held_tokens=pick((0, prompt_tokens - 50)) if number > 1 else 0,
            output_tokens=100,
            held=held,
            decode=pick((None, pick(views).id, WorkerId("gone:1"))) if number > 1 else None,
            affinity=pick((None, None, pick(views).id)),
            lost=pick((None, None, "decode_restarted")),
            stored_response=number > 1 and pick((False, False, False, True)),
        )

    def excluded(self) -> set[WorkerId | PairId]:
        ids = [view.id for view in self.registry.views()]
        some = self.random.sample(ids, min(len(ids), self.random.choice((0, 0, 0, 1, 5, 50))))
        pairs = [(a, b) for a, b in zip(some, ids, strict=False) if self.random.random() < 0.3]
        return {*pairs, *(some if not pairs else ())}

    def book(self, turn: Turn, decision: Decision) -> None:
        prefill = None if decision.prefill is None else decision.prefill.id
        self.open.append(LegBooking(self.registry, decision.decode.id, prefill, decision.estimates(turn)))
        self.open[-1].reserve(self.now_s)
        while self.open and self.random.random() < 0.45:
            self.open.pop(self.random.randrange(len(self.open))).release(self.now_s)

    def change(self) -> None:
        chance, views = self.random.random(), self.registry.views()
        one = self.random.choice(views)
        if chance < 0.3:
            self.announce(self.random.randrange(len(views)))
        elif chance < 0.35 and len(views) > 2:
            self.registry.remove(one.id)
        elif chance < 0.5:
            self.registry.recovered(one.id, self.now_s)
        elif chance < 0.55:
            self.registry.hold_back(one.id, held_back=not one.held_back)
        elif chance < 0.6:
            self.announce(50)
        elif chance < 0.7:
            self.now_s += self.random.choice((0.5, 7.0, 61.0))


def check_picks(turn: Turn, views: Sequence[WorkerView], start: SlowStart) -> None:
    assert pick_prefill(turn, views, start) is plain_prefill(turn, views, start.now_s)
    assert pick_decode(turn, views, start) is plain_decode(turn, views, start.now_s)
    assert own_worker(turn, views) is own(turn, views)
    assert [is_overloaded(v, views) for v in views] == [overloaded(v, views) for v in views]
    by_work = start.rule(lambda view: work_rank(view, start(view)), work_rank)
    assert first_ranked(views, by_work, 3) == sorted(views, key=by_work.rank_of)[:3]
    held = {worker: one.tokens for worker, one in turn.held.items()}
    holders = [view for view in views if view.id in held]
    assert largest(views, held.items(), 2) == sorted(holders, key=lambda view: -held[view.id])[:2]
    assert [worker for worker in held if includes(views, worker)] == [each for each in held if each in ids(views)]


def ids(views: Sequence[WorkerView]) -> list[WorkerId]:
    return [view.id for view in views]


@pytest.mark.parametrize("seed", range(40))
def test_who_is_picked_is_who_the_rules_pick_among_all(seed: int) -> None:
    one = RandomFleet(seed)
    for _ in range(12):
        one.change()
        fleet, turn, limit = one.registry.fleet(MODEL), one.turn(), one.random.choice((0, 0, 2, 4))
        avoid, blocked = one.excluded(), one.excluded()
        ruled, start = Rules(mode=Mode.ALWAYS_SPLIT, worker_limit=limit, warm_up_s=WARM_UP_S), one.now_s
        plain = narrowed(turn, fleet, limit or math.inf, avoid, blocked)
        for views in (fleet.prefills, fleet.decodes, fleet.replicas):
            check_picks(turn, views, SlowStart(start, WARM_UP_S))
        try:
            found = find_candidates(turn, fleet, ruled, qps=1.0, now_s=start, avoid=avoid, blocked=blocked)
        except (NoWorkerError, AllBusy):
            assert not plain[1] and not plain[2]
            continue
        assert (found.prefills, found.decodes, found.replicas, set(found.full)) == plain
        for views in (found.prefills, found.decodes, found.replicas):
            check_picks(turn, views, SlowStart(start, WARM_UP_S))
        barred = {*avoid, *blocked}
        for view in found.decodes:
            paired = [p for p in plain[0] if can_pair(p.worker, view.worker) and (p.id, view.id) not in barred]
            assert list(found.prefills_for(view)) == paired
            assert (view in found.pairable()) is bool(paired)
        with suppress(AllBusy):
            one.book(turn, decide(turn, fleet, ruled, qps=1.0, now_s=start, avoid=avoid, blocked=blocked))


@pytest.mark.parametrize(
    "mode",
    [
        *(Mode.ALWAYS_SPLIT, Mode.ALWAYS_LOCAL, Mode.REPLICA, Mode.ISL_OR_LOAD, Mode.SLO, Mode.LMETRIC),
        *(Mode.SESSION_HASH, Mode.FREE_KV),
    ],
)
def test_a_decision_over_the_order_is_the_one_over_lists(mode: Mode, order: StageOrder) -> None:
    laws = WorkerLaws(Profiles("h100-llama-3.1-8b"))
    ruled = Rules(
        mode=mode,
        warm_up_s=WARM_UP_S,
        laws=laws,
        moves_kv=True,
        prefills_answer=True,
        orders=OrderRules(usual=order),
    )
    for seed in range(100, 112):
        one = RandomFleet(seed)
        for _ in range(12):
            one.change()
            fleet, turn = one.registry.fleet(MODEL), one.turn()
            views = one.registry.views()
            lists = Fleet.of({view.id: view for view in views}, taking_turns(views, MODEL))
            decided: list[Decision | type[NoWorkerError]] = []
            for each in (fleet, lists):
                try:
                    decided.append(decide(turn, each, ruled, qps=1.0, now_s=one.now_s))
                except NoWorkerError as exc:
                    decided.append(type(exc))
            assert decided[0] == decided[1]
            if isinstance(decided[0], Decision):
                one.book(turn, decided[0])


def placed(mode: Mode, turn: Turn, views: Sequence[WorkerView]) -> WorkerView:
    """Where the modes that place sessions do so, as plain code over all D and R."""
    if mode is Mode.FREE_KV and (session := own(turn, views)) is not None:
        return session
    found = first(views, kv_rank if mode is Mode.FREE_KV else lambda view: (), turn.session_id)
    assert found is not None
    return found


@pytest.mark.parametrize("mode", [Mode.SESSION_HASH, Mode.FREE_KV])
@pytest.mark.parametrize("seed", range(20))
def test_sessions_are_placed_as_among_all(mode: Mode, seed: int) -> None:
    """Also those that have been placed before, while others are full, have failed, join or leave."""
    one = RandomFleet(seed)
    sessions = [f"{one.random.getrandbits(64):016x}" for _ in range(4)]
    for _ in range(24):
        one.change()
        turn = replace(one.turn(), session_id=one.random.choice(sessions), stored_response=False)
        fleet, limit = one.registry.fleet(MODEL), one.random.choice((0, 2))
        avoid, blocked = one.excluded(), one.excluded()
        ruled = Rules(mode=mode, worker_limit=limit)
        prefills, decodes, replicas, _ = narrowed(turn, fleet, limit or math.inf, avoid, blocked)
        with suppress(NoWorkerError):
            decision = decide(turn, fleet, ruled, qps=1.0, now_s=one.now_s, avoid=avoid, blocked=blocked)
            worker = placed(mode, turn, [*decodes, *replicas])
            paired = [view for view in prefills if can_pair(view.worker, worker.worker)]
            assert decision.decode is worker or (not answers_alone(worker.worker) and not paired)
            one.book(turn, decision)


def test_a_fleet_from_before_a_change_tells_of_then() -> None:
    registry = Registry()
    for number in range(20):
        worker = Worker(role=Role.DECODE, address=f"d{number}:1", models=(MODEL,), source=Source.AGENT)
        registry.apply(Announcement(worker), 0.0)
    before = registry.fleet(MODEL)
    for view in before.decodes[1:]:
        registry.reserve(view.id)
    after = registry.fleet(MODEL)
    assert isinstance(before.decodes, Ranked), "so many are kept in order"
    by_work = SlowStart(0.0, 0.0).rule(work_rank, work_rank)
    assert [view.requests for view in first_ranked(before.decodes, by_work, 20)] == [0] * 20
    assert first_ranked(after.decodes, by_work, 1)[0].id == before.decodes[0].id
    assert not is_overloaded(before.decodes[1], before.decodes)


@pytest.mark.parametrize(
    ("rule", "apart"), [(BY_WORK, 0), (SlowStart(150.0, 0.0).rule(work_rank, work_rank), 0), (IN_SLOW_START, 20)]
)
def test_only_workers_in_slow_start_are_looked_at_beside_the_order(rule: RankRule, apart: int) -> None:
    registry = Registry()
    for number in range(20):
        worker = Worker(role=Role.PREFILL, address=f"p{number}:1", models=(MODEL,), source=Source.AGENT)
        registry.apply(Announcement(worker), 140.0)
    views = registry.fleet(MODEL).prefills
    assert isinstance(views, Ranked)
    assert views.order is not None
    assert len(rule.set_apart(views.order, views)) == apart


def test_sessions_spread_over_many_equal_workers_and_return() -> None:
    registry, ruled = Registry(), Rules(mode=Mode.ALWAYS_LOCAL)
    for number in range(5 * MOST_HASHED):
        worker = Worker(role=Role.DECODE, address=f"d{number}:1", models=(MODEL,), source=Source.AGENT)
        registry.apply(Announcement(worker), 0.0)
    random = Random(1)
    firsts = [replace(FIRST, session_id=f"{random.getrandbits(64):016x}") for _ in range(10 * MOST_HASHED)]

    def chosen() -> list[WorkerId]:
        fleet = registry.fleet(MODEL)
        return [decide(turn, fleet, ruled, qps=1.0, now_s=0.0).decode.id for turn in firsts]

    before = chosen()
    assert max(Counter(before).values()) < 12, "two on average"
    assert len(set(before)) > 3 * MOST_HASHED
    registry.remove(WorkerId("d100:1"))
    stayed = [worker for worker, after in zip(before, chosen(), strict=True) if worker == after]
    assert len(stayed) > 0.9 * len(firsts)


def test_engines_that_are_replaced_one_by_one_hand_over_to_their_like() -> None:
    registry, ruled = Registry(), Rules(mode=Mode.ALWAYS_SPLIT)

    def join(role: Role, number: int, version: str) -> list[str]:
        address = f"{role.lower()}{number}:1"
        worker = Worker(role=role, address=address, models=(MODEL,), engine_version=version, source=Source.AGENT)
        registry.apply(Announcement(worker), 0.0)
        fleet = registry.fleet(MODEL)
        if not fleet.prefills or not fleet.decodes:
            return []
        found = find_candidates(FIRST, fleet, ruled, qps=1.0, now_s=0.0, avoid=(), blocked=())
        return [view.id for view in found.pairable()]

    each = range(10)
    all_d = [f"d{number}:1" for number in each]
    for role in (Role.DECODE, Role.PREFILL):
        for number in each:
            paired = join(role, number, "0.31")
    assert paired == all_d
    assert [len(join(Role.PREFILL, number, "0.32")) for number in each] == [10] * 9 + [0]
    assert [join(Role.DECODE, number, "0.32") for number in each] == [all_d[: number + 1] for number in each]
