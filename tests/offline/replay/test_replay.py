"""Turns decided again: what the policy is told of the past, and what is said of the difference."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.offline.replay.past_fleet import PastFleet
from ppd.offline.replay.replay import Compared, replay
from ppd.offline.replay.summary import summary
from ppd.proxy.config import Mode
from ppd.proxy.failures import Leg
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.laws.profiles import Profiles
from ppd.proxy.laws.targets import GivenTargets, SloTargets
from ppd.proxy.laws.worker_laws import WorkerLaws
from ppd.proxy.policy import Route
from ppd.proxy.telemetry.receipts import Receipt
from tests.support.decisions import rules

from .receipts import BEGAN_S, leg, log_of, receipt, taken

LAWS = WorkerLaws(Profiles("h100-llama-3.1-8b"))
D1, P1 = WorkerId("D1:1"), WorkerId("P1:1")


def again(*receipts: Receipt, mode: Mode = Mode.SLO, capacity_tokens: int = 400_000, **options: Any) -> Compared:
    by = rules(mode, laws=LAWS, **options.pop("by", {}))
    return replay(log_of(*receipts).turns, by, LAWS, capacity_tokens=capacity_tokens, **options)


def fleet_at(seconds: float, *receipts: Receipt) -> Any:
    turns = log_of(*receipts).turns
    fleet = PastFleet(turns, 400_000)
    for turn in turns:
        if turn.decided_s - BEGAN_S <= seconds:
            fleet.at(turn.decided_s, "m")
            fleet.begin(turn, taken(turn))
    return fleet.at(BEGAN_S + seconds, "m")


@pytest.mark.parametrize(
    ("seconds", "of_p", "of_d"),
    [
        (0.05, (1, 1, 0), (1, 0, 1)),  # inflight, prompts, sequences: a D counts from the decision on
        (0.15, (0, 0, 0), (1, 0, 1)),
        (1.0, (0, 0, 0), (1, 0, 1)),
        (1.3, (0, 0, 0), (0, 0, 0)),
    ],
)
def test_a_split_is_under_way_where_it_was(
    seconds: float, of_p: tuple[int, int, int], of_d: tuple[int, int, int]
) -> None:
    views = fleet_at(seconds, receipt("P1 D1"), receipt("P1 D1", 9.0)).views
    for worker, counts in ((P1, of_p), (D1, of_d)):
        view = views[worker]
        assert (view.inflight, view.prefills, view.decoding) == counts
        assert (view.queued_prefill_s > 0, view.context_tokens > 0) == (bool(counts[1]), bool(counts[2]))


@pytest.mark.parametrize(("seconds", "of_d"), [(0.01, (1, 1, 1)), (0.15, (1, 0, 1)), (1.2, (0, 0, 0))])
def test_a_local_turn_computes_and_decodes_or_will(seconds: float, of_d: tuple[int, int, int]) -> None:
    view = fleet_at(seconds, receipt("D1"), receipt("D1", 9.0)).views[D1]
    assert (view.inflight, view.prefills, view.decoding) == of_d


def test_of_an_answer_that_came_as_a_whole_the_laws_tell_how_long_its_prompt_was_computed() -> None:
    one = receipt("D1", stream=False)
    one.legs[0].first_event_s = one.legs[0].ended_s
    view = fleet_at(0.01, one, receipt("D1", 9.0)).views[D1]
    assert view.unseen_prefill_until_s - BEGAN_S == pytest.approx(0.1)
    assert (view.inflight, view.prefills, view.decoding) == (1, 0, 1)


def test_a_worker_is_there_from_about_its_first_leg_to_about_its_last() -> None:
    receipts = (receipt("D1", 0.0), receipt("D2", 500.0), receipt("D1", 1000.0), receipt("D3", 1500.0))
    for seconds, names in ((0.0, {"D1"}), (490.0, {"D1", "D2"}), (1000.0, {"D1"}), (1100.0, set()), (1500.0, {"D3"})):
        found = {view.name for view in fleet_at(seconds, *receipts).decodes}
        assert found == names, seconds


def test_a_model_goes_to_workers_that_served_it() -> None:
    receipts = (receipt("D1"), receipt("D2", model="other"), receipt("D1", 9.0), receipt("D2", 9.0, model="other"))
    assert [view.name for view in fleet_at(5.0, *receipts).decodes] == ["D1"]


CHAT = [receipt(workers, 2.0 * turn, turn=turn) for turn, workers in enumerate(("P1 D1", "D1", "D1", "D1"), start=1)]


def test_the_same_rules_change_nothing() -> None:
    compared = again(*CHAT, mode=Mode.ALWAYS_LOCAL)
    assert (compared.count, compared.changes) == (4, {})
    found = summary(log_of(*CHAT), compared)
    assert found.ttft_s.change == 0.0
    assert not found.ttft_s.is_clear


def test_of_few_sessions_there_is_no_interval() -> None:
    """Of one, all draws are alike."""
    found = summary(log_of(*CHAT), again(*CHAT, mode=Mode.ALWAYS_SPLIT))
    assert found.ttft_s.change > 0.0
    assert (found.ttft_s.low, found.ttft_s.high, found.ttft_s.is_clear) == (None, None, False)


def test_other_rules_change_what_they_say() -> None:
    compared = again(*CHAT, mode=Mode.ALWAYS_SPLIT)
    assert compared.changes == {("LOCAL", "SPLIT"): 3}
    found = summary(log_of(*CHAT), compared)
    assert (found.changed, found.sessions) == (3, 1)
    assert found.ttft_s.change > 0, "through P costs a transfer"


def test_a_session_is_believed_to_lie_where_it_ran_and_to_be_evicted_by_those_after_it() -> None:
    """A whole session fits; after two others have used the same D, nothing of it is left but what its receipt says."""
    others = [receipt("D1", 10.0 + n, session=f"other{n}") for n in range(3)]
    back = receipt("D2", 20.0, turn=2, estimated_cached_tokens=0, cached_evidence="")
    there = [receipt("D2", 0.1, session="keeps"), receipt("D1", 30.0, session="keeps too")]
    for capacity_tokens, route_stays in ((400_000, False), (2500, True)):
        compared = again(receipt("D1"), *others, back, *there, mode=Mode.LEAST_TTFT, capacity_tokens=capacity_tokens)
        moved_back = compared.ttft_s[1][-2] < compared.ttft_s[0][-2] * 0.9
        assert moved_back is not route_stays


def test_what_the_receipt_says_of_the_worker_that_answered_counts_first() -> None:
    gone = receipt("D1", 2.0, turn=2, estimated_cached_tokens=0, cached_evidence="")
    whole = again(receipt("D1"), receipt("D1", 2.0, turn=2), mode=Mode.LEAST_TTFT)
    lost = again(receipt("D1"), gone, mode=Mode.LEAST_TTFT)
    assert lost.ttft_s[0][1] > whole.ttft_s[0][1] * 1.2


@pytest.mark.parametrize("tpot_s", [1e-4, 1.0])
def test_targets_may_be_others_than_the_receipts(tpot_s: float) -> None:
    compared = again(*CHAT, targets=GivenTargets(tpot=tpot_s, ttft=60.0))
    assert [*compared.missed[0]] == [tpot_s < 1.0] * 4


def test_a_target_that_is_not_given_is_the_receipts_own() -> None:
    strict = [receipt("D1", slo=SloTargets(tpot_s=1e-4))]
    assert [*again(*strict, targets=GivenTargets(ttft=60.0)).missed[0]] == [1]


def test_workers_without_a_profile_and_turns_without_a_worker_are_counted() -> None:
    nothing = WorkerLaws()
    turns = log_of(*CHAT).turns
    compared = replay(turns, rules(Mode.ALWAYS_LOCAL), nothing, capacity_tokens=1)
    assert (compared.count, compared.unpredicted) == (0, 4)
    compared = replay(turns, rules(Mode.ALWAYS_LOCAL, worker_limit=1, laws=LAWS), LAWS, capacity_tokens=1)
    assert compared.refused == 0
    at_once = [receipt("D1", session=f"s{n}") for n in range(3)]
    compared = again(*at_once, mode=Mode.ALWAYS_LOCAL, by={"worker_limit": 2})
    assert (compared.count, compared.refused) == (2, 1)


@pytest.mark.parametrize("mode", [Mode.SLO, Mode.LEAST_TTFT, Mode.ALWAYS_LOCAL])
def test_a_readback_is_predicted_with_what_p_read(mode: Mode) -> None:
    """P held nothing. Of 20,000 tokens it computes all in a SPLIT, and a thousand where it reads the others back."""
    first = receipt("D1", estimated_prompt_tokens=19_000, prompt_tokens=19_000)
    later: dict[str, Any] = {
        "estimated_prompt_tokens": 20_000,
        "estimated_cached_tokens": 19_000,
        "prompt_tokens": 20_000,
    }
    read, split = (
        again(
            first, receipt("P1 D1", 30.0, turn=2, route=route, **later), receipt("P1 D1", 30.01, session="t"), mode=mode
        )
        for route in ("READBACK", "SPLIT")
    )
    assert read.ttft_s[0][1] < 0.4 * split.ttft_s[0][1]
    assert read.ttft_s[0][2] < 0.4 * split.ttft_s[0][2], "who waits for P waits for a thousand tokens"


def test_a_readback_is_judged_again_beside_other_ways() -> None:
    """The D has a long prompt to compute, so P had better read the history back, as it did."""
    first = receipt("D1", estimated_prompt_tokens=19_000, prompt_tokens=19_000)
    busy = receipt("D1", 29.9, session="long", estimated_prompt_tokens=100_000, prompt_tokens=100_000)
    busy.legs[0].first_event_s = busy.legs[0].ended_s = 30.0
    later: dict[str, Any] = {
        "estimated_prompt_tokens": 20_000,
        "estimated_cached_tokens": 19_000,
        "prompt_tokens": 20_000,
    }
    compared = again(first, busy, receipt("P1 D1", 30.0, turn=2, route="READBACK", **later), mode=Mode.LEAST_TTFT)
    assert compared.count == 3
    assert all(before != "READBACK" for before, _ in compared.changes)


@pytest.mark.slow
def test_the_interval_holds_the_difference_and_sessions_are_drawn_whole() -> None:
    """Ten turns of one session are no more evidence than one."""

    def width(sessions: int, turns: int) -> float:
        logged = [
            receipt(way, 30.0 * number + 2 * turn, session=f"s{number}", turn=turn)
            for number in range(sessions)
            for turn in range(1, turns + 1)
            for way in ("P1 D1" if turn == 1 or number % 2 else "D1",)
        ]
        found = summary(log_of(*logged), again(*logged, mode=Mode.ALWAYS_LOCAL))
        assert found.ttft_s.low is not None
        assert found.ttft_s.high is not None
        assert found.ttft_s.low <= found.ttft_s.change <= found.ttft_s.high
        return found.ttft_s.high - found.ttft_s.low

    assert width(40, 3) < width(10, 3)
    assert width(10, 12) > width(40, 3) * 0.8


def test_a_session_begins_where_most_kv_is_free() -> None:
    """D1 answers one of 300,000 tokens, and D2 two of 1,000."""
    long = receipt("D1", session="long", estimated_prompt_tokens=300_000, legs=[leg(Leg.LOCAL, "D1", 0.0, 0.1, 20.0)])
    short = [receipt("D2", session=f"short{n}", legs=[leg(Leg.LOCAL, "D2", 0.0, 0.1, 20.0)]) for n in range(2)]
    compared = again(long, *short, *(receipt("D1", 2.0 + 2 * n, session=f"s{n}") for n in range(8)), mode=Mode.FREE_KV)
    assert compared.changes["LOCAL", Route.LOCAL] >= 8


ODD = [
    receipt("P1 D1", 0.0),
    receipt("D1", 0.05, session="b", ended_s=None, legs=[leg(Leg.LOCAL, "D1", 0.0, None, 0.0)]),
    receipt(
        "P1 D1", 0.1, session="c", legs=[leg(Leg.PREFILL, "P1", 0.0, 0.5, 9.0), leg(Leg.DECODE, "D1", 0.2, 0.3, 0.4)]
    ),
    receipt("P1 D1", 0.2, session="d", route="READBACK", outcome="failed"),
    receipt("D1", 0.3, session="e", legs=[leg(Leg.LOCAL, "D1", 0.0, 5.0, 1.0)]),
]


def test_when_all_have_ended_nothing_is_under_way() -> None:
    """Also where a leg's times contradict each other."""
    views = fleet_at(20.0, *ODD, receipt("P1 D1", 30.0)).views
    for view in views.values():
        assert (view.inflight, view.decoding, view.context_tokens, view.reserved_tokens) == (0, 0, 0, 0)
        assert (view.prefills, view.queued_prefill_tokens, view.queued_prefill_s) == (0, 0, 0.0)
        assert max(view.sends_free_s, view.receives_free_s) <= BEGAN_S + 20.0
        assert view.load.kv_usage == 0.0
