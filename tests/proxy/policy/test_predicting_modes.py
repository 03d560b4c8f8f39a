"""Modes that judge each way to serve a turn by what the laws predict of it."""

from __future__ import annotations

from dataclasses import replace as replace_worker

import pytest
from msgspec.structs import replace

from ppd.proxy.config import Mode
from ppd.proxy.decision_table.score import Weights
from ppd.proxy.fleet.view import RecentPrompts, WorkerView
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.laws.prediction import EngineLaws
from ppd.proxy.laws.step_time import EngineProfile, transfer_time_s
from ppd.proxy.laws.targets import SloTargets, miss
from ppd.proxy.policy import Decision, Route, Rules, Turn
from ppd.proxy.policy.decision import Readable
from ppd.proxy.policy.modes import PREDICTING
from ppd.proxy.policy.modes.slo import EVICTED_WEIGHT
from ppd.proxy.policy.returns import Recomputed, Returns
from ppd.proxy.policy.ways import RECORDED
from tests.support.decisions import D1, D2, FIRST, NEXT, P1, P2, R1, SameLaws, held, run, view

NOW_S = 100.0  # of `run`
LONG = replace(FIRST, prompt_tokens=20_000)
LATER = replace(NEXT, prompt_tokens=20_100, held_tokens=20_000, held=held(D2, 20_000))
TALK = replace(LONG, output_tokens=500)  # as those that run: each token is delayed less
D3 = view("D", 3)


class Known(Returns):
    """Of one worker: turns that come back a second, and that are lost with each token written."""

    def __init__(self, worker: WorkerView, *, rate: float = 0.0, loss: float = 0.0) -> None:
        self._worker, self._rate, self._loss = worker.id, rate, loss

    def within(self, seconds: float, worker: WorkerId, model: str, now_s: float) -> float:
        return self._rate * seconds if worker == self._worker else 0.0

    def lost(self, worker: WorkerId, model: str, tokens: int, now_s: float, recomputed: Recomputed) -> float:
        return self._loss * tokens if worker == self._worker else 0.0


def decided(
    turn: Turn, *fleet: WorkerView, mode: Mode = Mode.SLO, unknown: tuple[WorkerView, ...] = (), **rules: object
) -> Decision:
    return run(turn, fleet, Rules(mode=mode, laws=SameLaws(*unknown), **rules))  # type: ignore[arg-type]


def streaming(view: WorkerView, sequences: int) -> WorkerView:
    return replace(view, decoding=sequences, context_tokens=sequences * 1000, inflight=sequences)


def queueing(view: WorkerView, seconds: float) -> WorkerView:
    return replace(
        view, prefills=1, queued_prefill_s=seconds, prefills_since_s=NOW_S, queued_prefill_tokens=8000, inflight=1
    )


def hurried(view: WorkerView) -> WorkerView:
    """Three prompts come there a second, and none can wait longer than 0.2 s."""
    return replace(view, recent_prompts=RecentPrompts(NOW_S, 0.1, 3.0, 3.0 / 0.2))


BUSY = (streaming(D1, 30), streaming(D2, 30))


@pytest.mark.parametrize(
    ("turn", "fleet", "route", "decodes"),
    [
        (LATER, (P1, D1, D2), Route.LOCAL, {"D2"}),  # where it is held
        (LATER, (P1, D1, queueing(D2, 9.0)), Route.LOCAL, {"D1"}),  # all of it is computed elsewhere sooner
        (LONG, (P1, *BUSY), Route.SPLIT, {"D1", "D2"}),  # it would stop streams
        (TALK, (queueing(P1, 20.0), *BUSY), Route.LOCAL, {"D1", "D2"}),  # and yet it cannot wait for so long
        (LONG, (P1, hurried(D1), hurried(D2)), Route.SPLIT, {"D1", "D2"}),  # and prompts in a hurry
        (LONG, (P1, hurried(D1), D2), Route.LOCAL, {"D2"}),  # an idle D is as quick, without a transfer
        (LONG, (queueing(P1, 20.0), *BUSY, R1), Route.REPLICA, {"R1"}),
        (LATER, (R1,), Route.REPLICA, {"R1"}),
    ],
)
def test_slo_takes_the_way_by_which_the_fewest_turns_miss_their_targets(
    turn: Turn, fleet: tuple[WorkerView, ...], route: Route, decodes: set[str]
) -> None:
    decision = decided(turn, *fleet)
    assert decision.route is route
    assert decision.reason in ("slo", "least_miss")
    assert decision.decode.name in decodes


def test_slo_spares_the_turns_that_will_come_back() -> None:
    """Those that would wait for the prompt, and those whose KV it would evict: on D, and on a P that holds it alone."""
    fleet = (D1, D2)
    for spared, other in ((D1, "D2"), (D2, "D1")):
        assert decided(LONG, *fleet, returns=Known(spared, rate=2.0)).decode.name == other
        assert decided(LONG, *fleet, returns=Known(spared, loss=1e-4)).decode.name == other
    decision = decided(LONG, P1, P2, *map(hurried, fleet), returns=Known(P1, loss=1e-4))
    assert decision.prefill is not None
    assert decision.prefill.name == "P2"
    at_home = decided(LATER, *fleet, returns=Known(D2, loss=1e-3))
    assert at_home.decode.name == "D2", "little is written where the history is"


def test_slo_explores_as_many_turns_as_it_may_where_that_is_nearly_as_good() -> None:
    fleet = (D1, streaming(D2, 1))
    turns = [replace(TALK, session_id=f"{number:016x}") for number in range(400)]
    assert {decided(turn, *fleet).decode.name for turn in turns} == {"D1"}
    decisions = [decided(turn, *fleet, explore_share=0.25) for turn in turns]
    explored = [one for one in decisions if one.reason == "explored"]
    assert 60 <= len(explored) <= 140
    assert all(one is d for one, d in zip(explored, (d for d in decisions if d.decode.name == "D2"), strict=True))
    assert all(one.candidates[0].decode is one.decode for one in explored)
    assert decisions == [decided(turn, *fleet, explore_share=0.25) for turn in turns]
    bad = (D1, streaming(D2, 200))
    assert {decided(turn, *bad, explore_share=1.0).decode.name for turn in turns[:20]} == {"D1"}
    assert decided(LONG, D1, explore_share=1.0).reason == "slo"


class Trusted(SameLaws):
    """TTFTs of one worker are as predicted."""

    def __init__(self, worker: WorkerView) -> None:
        super().__init__()
        self._worker = worker.id

    def of(self, view: WorkerView) -> EngineLaws | None:
        return EngineLaws(costs=EngineProfile(), ttft_spread=0.1 if view.id == self._worker else 1.0)


@pytest.mark.parametrize("trusted", [P1, D1])
def test_slo_trusts_a_ttft_as_far_as_turns_on_the_worker_that_computes_have_shown(trusted: WorkerView) -> None:
    turn = replace(LONG, slo=SloTargets(ttft_s=2.0, ttft_factor=1.0))
    decision = run(turn, (P1, D1), Rules(mode=Mode.SLO, laws=Trusted(trusted)))
    assert len(decision.candidates) == 2
    for way in decision.candidates:
        assert way.prediction is not None
        spread = 0.1 if (way.prefill or way.decode).id == trusted.id else 1.0
        assert way.terms["ttft"] == pytest.approx(miss(way.prediction.ttft_s, 2.0, spread))


def test_slo_has_a_session_that_begins_find_room_to_grow() -> None:
    loss = 1e-6
    begins, later = (decided(turn, D1, returns=Known(D1, loss=loss)) for turn in (LONG, LATER))
    written = 3 * LONG.prompt_tokens + LONG.output_tokens, LATER.prompt_tokens + LATER.output_tokens
    assert [one.candidates[0].terms["evicted"] for one in (begins, later)] == pytest.approx(
        [EVICTED_WEIGHT * loss * tokens for tokens in written]
    )


@pytest.mark.parametrize(("sequences", "least", "most"), [(1, 0.0, 0.01), (130, 5.0, 13.0), (2000, 0.0, 0.01)])
def test_streams_lose_by_one_more_where_they_are_near_their_target(sequences: int, least: float, most: float) -> None:
    (way,) = decided(TALK, streaming(D1, sequences)).candidates
    assert least <= way.terms["batch"] <= most


def test_what_was_explored_is_not_said_to_miss_the_least() -> None:
    hopeless = replace(TALK, slo=SloTargets(ttft_s=1e-4, ttft_factor=1e-4, tpot_s=1e-4))
    best, explored = (decided(hopeless, D1, D2, explore_share=share) for share in (0.0, 1.0))
    assert (best.reason, explored.reason) == ("least_miss", "explored")
    assert explored.decode is not best.decode


@pytest.mark.parametrize("mode", sorted(PREDICTING))
def test_the_best_way_is_carried_out_and_told_with_its_terms(mode: Mode) -> None:
    decision = decided(LATER, P1, P2, D1, D2, D3, R1, mode=mode)
    best = decision.candidates[0]
    assert (best.route, best.decode, best.prefill) == (decision.route, decision.decode, decision.prefill)
    assert best.prediction == decision.prediction
    assert decision.prediction is not None
    assert len(decision.candidates) <= RECORDED
    scores = [one.score for one in decision.candidates]
    assert scores == sorted(scores)
    assert all(one.score == pytest.approx(sum(one.terms.values())) for one in decision.candidates)


def test_modes_weigh_otherwise() -> None:
    fleet = (P1, *BUSY)
    assert decided(LONG, *fleet, mode=Mode.LEAST_TTFT).route is Route.LOCAL
    assert decided(LONG, *fleet, mode=Mode.SLACK).route is Route.SPLIT
    light = (P1, streaming(D1, 3), D2)
    assert decided(LATER, P1, D1, streaming(D2, 3), mode=Mode.LMETRIC).decode.name == "D2"
    assert decided(LONG, *light, mode=Mode.LMETRIC).decode.name == "D2"
    for weights, chosen in ((Weights(1.0, 0.0), "D1"), (Weights(0.0, 1.0), "D2")):
        decision = decided(TALK, streaming(D1, 40), queueing(D2, 9.0), mode=Mode.WEIGHTS, weights=weights)
        assert decision.decode.name == chosen


def test_kv_is_fetched_where_that_may_be_and_pays() -> None:
    fleet = (D1, queueing(D2, 9.0))
    assert decided(LATER, *fleet).source is None
    decision = decided(LATER, *fleet, fetches_kv=True)
    assert (decision.route, decision.decode.name) == (Route.LOCAL, "D1")
    assert decision.source is not None
    assert (decision.source.name, decision.fetched_tokens) == ("D2", 20_000)
    assert decision.prediction is not None
    assert decision.prediction.transfer_s == transfer_time_s(EngineProfile(), 20_000)
    idle = decided(LATER, D1, D2, fetches_kv=True)
    assert (idle.decode.name, idle.source) == ("D2", None)


def lent(decision: Decision) -> tuple[str, str] | None:
    """Who lends itself to whom."""
    return None if decision.lender is None else (decision.lender.name, decision.decode.name)


def crowded(view: WorkerView) -> WorkerView:
    """One stream more there would be too slow."""
    return replace(view, decoding=100, context_tokens=1_500_000, inflight=100)


R2 = view("R", 2)
ON_R1 = replace(LATER, held=held(R1, 20_000), decode=R1.id)
_LIKE_NO_OTHER = replace_worker(D2.worker, connector="p2p_nccl", coordinates={"takes_plain": "true"})
LIKE_NO_OTHER = replace(D2, worker=_LIKE_NO_OTHER)


@pytest.mark.parametrize(
    ("turn", "fleet", "expected"),
    [
        (LATER, (D1, crowded(D2)), ("D2", "D1")),  # the session moves, and its streams there need not wait
        (LATER, (P1, D1, crowded(D2)), ("D2", "D1")),  # P holds nothing
        (replace(LATER, held={**held(D2, 20_000), **held(P1, 20_000)}), (P1, D1, crowded(D2)), None),  # P hands over
        (ON_R1, (crowded(R1), R2), ("R1", "R2")),
        (ON_R1, (crowded(R1), D1), ("R1", "D1")),
        (LATER, (R1, crowded(D2)), ("D2", "R1")),
        (LATER, (D1, D2), None),  # it does not pay
        (LATER, (D1, queueing(D2, 9.0)), None),  # the holder would compute too late
        (replace(LATER, held=held(D2, 200)), (D1, crowded(D2)), None),  # as good as nothing
        (LATER, (D1, replace(crowded(D2), places=100)), None),  # it is full
        (replace(LATER, single_engine="n"), (D1, crowded(D2)), None),
        (LATER, (D1, crowded(LIKE_NO_OTHER)), None),
        (LATER, (replace(D1, worker=LIKE_NO_OTHER.worker, name="D1"), crowded(LIKE_NO_OTHER)), None),
        (LATER, (replace(D1, draining=True), crowded(D2)), None),
    ],
)
def test_who_holds_the_history_lends_itself_where_that_may_be_and_pays(
    turn: Turn, fleet: tuple[WorkerView, ...], expected: tuple[str, str] | None
) -> None:
    assert lent(decided(turn, *fleet)) is None
    decision = decided(turn, *fleet, moves_kv=True)
    assert lent(decision) == expected
    if expected:
        assert decision.route is Route.SPLIT
        assert decision.prediction is not None
        assert decision.prediction.transfer_s == transfer_time_s(EngineProfile(), 20_100)
        estimates = decision.estimates(turn)
        assert (estimates.is_lent, estimates.new_on_prefill_tokens) == (True, 100)


def test_who_failed_other_turns_lends_nothing() -> None:
    fleet = (D1, crowded(D2))
    rules = Rules(mode=Mode.SLO, laws=SameLaws(), moves_kv=True)
    assert lent(run(LATER, fleet, rules)) == ("D2", "D1")
    for failed in (((D2.id, D1.id),), (D2.id,), (D2.id, D1.id)):
        assert lent(run(LATER, fleet, rules, blocked=failed)) is None


def test_a_p_hands_over_to_an_r_where_kv_may_be_moved() -> None:
    fleet = (P1, streaming(R1, 30))
    assert decided(LONG, *fleet).route is Route.REPLICA
    decision = decided(LONG, *fleet, moves_kv=True)
    assert (decision.route, decision.prefill, decision.lender) == (Route.SPLIT, fleet[0], None)


def test_of_many_holders_few_are_judged_as_lenders() -> None:
    decodes = [replace(crowded(view("D", number)), inflight=number) for number in range(1, 60)]
    turn = replace(LATER, held={one.id: held(one, 20_000)[one.id] for one in decodes[20:]}, decode=decodes[40].id)
    free = [view("D", 70), view("D", 71)]
    decision = decided(turn, *decodes, *free, moves_kv=True)
    lenders = {one.prefill.name for one in decision.candidates if one.prefill is not None}
    assert len(lenders) <= 2
    assert lenders


@pytest.mark.parametrize("mode", sorted(PREDICTING))
def test_an_engine_without_a_profile_is_asked_last(mode: Mode) -> None:
    assert decided(FIRST, P1, D1, mode=mode, unknown=(P1, D1)).reason == "first_turn", "as in mode `table`"
    assert decided(LATER, D1, D2, mode=mode, unknown=(D2,)).decode.name == "D1"
    alone = decided(LATER, P1, D2, mode=mode, unknown=(D2, P1))
    assert (alone.decode.name, alone.prediction, alone.candidates) == ("D2", None, ())


@pytest.mark.parametrize("mode", sorted(PREDICTING))
@pytest.mark.parametrize("output_tokens", [1, 100_000])
@pytest.mark.parametrize("prompt_tokens", [1, 10_000_000])
def test_no_size_is_too_small_or_too_large(mode: Mode, prompt_tokens: int, output_tokens: int) -> None:
    turn = replace(FIRST, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    decision = decided(turn, P1, *BUSY, R1, mode=mode)
    assert decision.prediction is not None
    assert 0 < decision.prediction.ttft_s < float("inf")


def test_of_many_workers_few_are_judged_the_holder_among_them() -> None:
    decodes = [replace(view("D", number), inflight=number) for number in range(1, 60)]
    holder = decodes[50]
    turn = replace(LATER, held=held(holder, 20_000), decode=holder.id)
    prefills = [view("P", number) for number in range(1, 30)]
    assert decided(turn, *prefills, *decodes).decode.id == holder.id
    first = decided(LONG, *prefills, *decodes)
    assert first.decode.name in ("D1", "D2")


def test_a_worker_that_has_just_joined_is_taken_for_slow() -> None:
    old, new = D1, replace(D2, since_s=NOW_S - 1)
    ruled = Rules(mode=Mode.LEAST_TTFT, laws=SameLaws(), warm_up_s=60.0)
    sessions = [replace(LONG, session_id=f"{number:016x}") for number in range(40)]
    assert {run(turn, (old, new), ruled).decode.name for turn in sessions} == {"D1"}
    ruled = replace(ruled, warm_up_s=0.0)
    assert {run(turn, (old, new), ruled).decode.name for turn in sessions} == {"D1", "D2"}


@pytest.mark.parametrize("mode", [Mode.SESSION_HASH, Mode.FREE_KV])
def test_sessions_begin_anywhere_and_stay(mode: Mode) -> None:
    sessions = [replace(FIRST, session_id=f"{number:016x}") for number in range(40)]
    for fleet in ((P1, D1, D2), (R1, view("R", 2))):
        first = [run(turn, fleet, Rules(mode=mode)) for turn in sessions]
        assert len({decision.decode.name for decision in first}) == 2
        for turn, before in zip(sessions, first, strict=True):
            again = replace(turn, number=2, held_tokens=90, held=held(before.decode, 90), decode=before.decode.id)
            after = run(again, fleet, Rules(mode=mode))
            assert after.decode == before.decode
            assert after.route is (Route.REPLICA if after.decode.role == "R" else Route.LOCAL)


def test_free_kv_begins_where_most_is_free() -> None:
    full = replace(D1, load=replace_worker(D1.load, kv_usage=0.5, kv_capacity_tokens=1000))
    assert run(FIRST, (full, D2), Rules(mode=Mode.FREE_KV)).decode.name == "D2"


# -- readback


def told(view: WorkerView) -> WorkerView:
    return replace(view, worker=replace_worker(view.worker, coordinates={"bidirectional_kv_xfer": "true"}))


P1_TOLD, D2_TOLD = told(P1), told(D2)
MANY = replace(LATER, prompt_tokens=24_000, readable=Readable(D2.id, 20_000))


def read_back(decision: Decision) -> tuple[str, str] | None:
    if decision.route is not Route.READBACK:
        return None
    assert decision.source is decision.decode
    assert decision.prefill is not None
    return decision.prefill.name, decision.decode.name


@pytest.mark.parametrize(
    ("turn", "fleet", "expected"),
    [
        (MANY, (P1_TOLD, hurried(streaming(D2_TOLD, 60))), ("P1", "D2")),  # D's streams and prompts are spared
        (replace(MANY, readable=None), (P1_TOLD, hurried(streaming(D2_TOLD, 60))), None),
        (MANY, (P1, hurried(streaming(D2_TOLD, 60))), None),
        (MANY, (P1_TOLD, hurried(streaming(D2, 60))), None),
        (
            replace(MANY, held={**held(D2, 20_000), **held(P1, 20_000)}),
            (P1_TOLD, hurried(streaming(D2_TOLD, 60))),
            None,
        ),
        (MANY, (P1_TOLD, D2_TOLD), None),  # an idle D computes it sooner
        (replace(MANY, prompt_tokens=20_000), (P1_TOLD, hurried(streaming(D2_TOLD, 60))), None),
    ],
)
def test_p_reads_a_history_back_where_that_is_the_best_way(
    turn: Turn, fleet: tuple[WorkerView, ...], expected: tuple[str, str] | None
) -> None:
    decision = decided(turn, *fleet)
    assert read_back(decision) == expected, decision.candidates
    if expected:
        assert decision.fetched_tokens == 20_000
        estimates = decision.estimates(turn)
        assert (estimates.new_on_prefill_tokens, estimates.fetched_tokens) == (24_000, 20_000)
        assert estimates.fetch_link_s > 0.0
        split = next(one for one in decision.candidates if one.route is Route.SPLIT)
        assert decision.prediction is not None
        assert split.prediction is not None
        assert decision.prediction.ttft_s < split.prediction.ttft_s, "P computes 4,000 tokens in place of 24,000"
        moved_s = [transfer_time_s(EngineProfile(), tokens) for tokens in (4_000, 20_000)]
        assert decision.prediction.transfer_s == sum(moved_s), "what D lacks, and what P reads back"


def test_it_is_said_why_nothing_is_read_back_where_it_could_be() -> None:
    def rules(*fleet: WorkerView, **changes: object) -> list[str]:
        turn = replace(MANY, readable=None, **changes)
        return [one.excluded for one in decided(turn, *fleet).candidates if one.route is Route.READBACK]

    assert rules(P1_TOLD, D2_TOLD) == ["no_handle"]
    assert rules(P1_TOLD, D2_TOLD, unreadable="not_a_prefix") == ["not_a_prefix"]
    assert rules(P1, D2_TOLD) == rules(P1_TOLD, D2) == rules(P1, D2) == []
    assert rules(P1_TOLD, D2_TOLD, decode=None) == []
