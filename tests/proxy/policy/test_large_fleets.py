"""The order that the registry keeps changes no decision: the rules as they are over all workers, against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as replace_worker
from hashlib import sha256
from random import Random

import pytest

from ppd.proxy.beliefs.held import BeliefEvidence, Held
from ppd.proxy.config import Mode
from ppd.proxy.connectors import can_pair
from ppd.proxy.errors import NoWorkerError
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.order import Ranked, least_loaded, load_rank, prefill_rank
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import Fleet, WorkerView, taking_turns
from ppd.proxy.fleet.worker import Announcement, Load, Role, Source, Worker, WorkerId
from ppd.proxy.policy import Decision, Rules, Turn, decide
from ppd.proxy.policy.candidates import find_candidates
from ppd.proxy.policy.placement import is_overloaded, own_worker, pick_decode, pick_prefill
from tests.support.decisions import rules

MODEL = "m"
WARM_UP_S = 60.0

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


def overloaded(view: WorkerView, views: Sequence[WorkerView]) -> bool:
    return view.load.kv_usage >= 0.95 or view.requests > 1.25 * mean([each.requests for each in views]) + 1


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
    holders = [v for v in views if turn.held_by(v) and not overloaded(v, views) and v.recent_tokens <= room]
    if least is None or not holders:
        return least
    best = min(holders, key=lambda view: (work(view), rank(view, slow_start(view, now_s))))
    return best if work(best) < work(least) else least


def plain_prefill(turn: Turn, views: Sequence[WorkerView], now_s: float) -> WorkerView | None:
    def until_done(view: WorkerView) -> tuple[float, ...]:
        tokens = view.queued_prefill_tokens + turn.prompt_tokens - turn.held_by(view)
        return (tokens / slow_start(view, now_s), view.requests)

    return first(views, until_done, turn.session_id)


# -- fleets as they come and go


class RandomFleet:
    def __init__(self, seed: int) -> None:
        self.random, self.registry, self.now_s = Random(seed), Registry(), 0.0
        self.mixed = self.random.random() < 0.3  # several kinds of engines, of which not all can pair
        self.open: list[LegBooking] = []
        for number in range(self.random.randint(1, 50)):
            self.announce(number)
        self.now_s = self.random.choice((10.0, 59.0, 1000.0))

    def announce(self, number: int) -> None:
        pick, role = self.random.choice, Role("PDR"[min(2, number % 4)] if number > 1 else "D")
        worker = Worker(role=role, address=f"w{number}:1", models=(MODEL,), incarnation="i", source=Source.AGENT)
        if self.mixed:
            worker = replace_worker(
                worker, engine_version=pick(("", "0.31", "0.32")), connector=pick(("nixl", "nixl", "p2p_nccl"))
            )
        load = Load(pick((0, 0, 1, 5)), pick((0, 0, 2)), pick((0.0, 0.2, 0.2, 0.96)), pick((0, 100_000)))
        self.registry.apply(Announcement(worker, load, draining=self.random.random() < 0.05), self.now_s)

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
        elif chance < 0.4:
            self.registry.recovered(one.id, self.now_s)
        elif chance < 0.45:
            self.registry.hold_back(one.id, held_back=not one.held_back)
        elif chance < 0.5:
            self.announce(50)
        elif chance < 0.6:
            self.now_s += self.random.choice((0.5, 7.0, 61.0))


@pytest.mark.parametrize("seed", range(40))
def test_who_is_picked_is_who_the_rules_pick_among_all(seed: int) -> None:
    one = RandomFleet(seed)
    for _ in range(12):
        one.change()
        fleet, turn, ruled = one.registry.fleet(MODEL), one.turn(), rules(Mode.ALWAYS_SPLIT)
        ruled = Rules(mode=ruled.mode, warm_up_s=WARM_UP_S)
        try:
            found = find_candidates(turn, fleet, ruled, qps=1.0, now_s=one.now_s, avoid=(), blocked=())
        except NoWorkerError:
            continue
        pairs = [v for v in found.decodes if any(can_pair(p.worker, v.worker) for p in found.prefills)]
        assert list(found.pairable()) == pairs
        for views in (fleet.prefills, fleet.decodes, fleet.replicas):
            assert pick_prefill(turn, views, found.slow_start) is plain_prefill(turn, views, one.now_s)
            assert pick_decode(turn, views, found.slow_start) is plain_decode(turn, views, one.now_s)
            assert own_worker(turn, views) is own(turn, views)
            assert [is_overloaded(v, views) for v in views] == [overloaded(v, views) for v in views]
            rank_of = prefill_rank if views is fleet.prefills else load_rank
            assert list(map(rank_of, least_loaded(views, 3))) == sorted(map(rank_of, views))[:3]
        for view in found.decodes:
            paired = [each for each in found.prefills if can_pair(each.worker, view.worker)]
            assert list(found.prefills_for(view)) == paired
        one.book(turn, decide(turn, fleet, ruled, qps=1.0, now_s=one.now_s))


@pytest.mark.parametrize("mode", [Mode.ALWAYS_SPLIT, Mode.ALWAYS_LOCAL, Mode.REPLICA, Mode.ISL_OR_LOAD])
def test_a_decision_over_the_order_is_the_one_over_lists(mode: Mode) -> None:
    ruled = Rules(mode=mode, warm_up_s=WARM_UP_S)
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


def test_a_fleet_from_before_a_change_tells_of_then() -> None:
    registry = Registry()
    for number in range(20):
        worker = Worker(role=Role.DECODE, address=f"d{number}:1", models=(MODEL,), source=Source.AGENT)
        registry.apply(Announcement(worker), 0.0)
    before = registry.fleet(MODEL)
    for view in before.decodes[1:]:
        registry.reserve(view.id, 10)
    after = registry.fleet(MODEL)
    assert isinstance(before.decodes, Ranked), "so many are kept in order"
    assert [view.requests for view in least_loaded(before.decodes, 20)] == [0] * 20
    assert least_loaded(after.decodes, 1)[0].id == before.decodes[0].id
    assert not is_overloaded(before.decodes[1], before.decodes)
