"""Ways that a rule forbids stand behind those that were judged; and the least miss is named so."""

from __future__ import annotations

from dataclasses import replace as replace_worker

import pytest
from msgspec.structs import replace

from ppd.proxy.config import Mode
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.laws.targets import SloTargets
from ppd.proxy.policy import Decision, Excluded, Rules, Turn
from ppd.proxy.policy.ways import RECORDED
from tests.support.decisions import D1, D2, FIRST, NEXT, P1, P2, R1, SameLaws, held, run, view

LATER = replace(NEXT, prompt_tokens=20_100, held_tokens=20_000, held=held(D2, 20_000))
BUSY = replace(D2, inflight=4)
OTHER = replace(D2, worker=replace_worker(D2.worker, engine_version="other"))


def decided(
    turn: Turn,
    *fleet: WorkerView,
    mode: Mode = Mode.SLO,
    unknown: tuple[WorkerView, ...] = (),
    worker_limit: int = 0,
    avoid: Excluded = (),
    blocked: Excluded = (),
) -> Decision:
    by = Rules(mode=mode, laws=SameLaws(*unknown), worker_limit=worker_limit)
    return run(turn, fleet, by, avoid, blocked)


def forbidden(decision: Decision) -> list[tuple[str, str, str]]:
    assert decision.candidates[0].excluded == ""
    return [
        (one.route, one.decode.name if one.prefill is None else f"{one.prefill.name} > {one.decode.name}", one.excluded)
        for one in decision.candidates
        if one.excluded
    ]


@pytest.mark.parametrize(
    ("decision", "rules"),
    [
        (decided(LATER, P1, D1, D2), []),
        (decided(LATER, P1, D1, BUSY, worker_limit=4), [("LOCAL", "D2", "full")]),
        (decided(LATER, P1, D1, replace(D2, up=False)), [("LOCAL", "D2", "down")]),
        (decided(LATER, P1, D1, replace(D2, draining=True)), [("LOCAL", "D2", "draining")]),
        (decided(LATER, P1, D1, D2, blocked={D2.id}), [("LOCAL", "D2", "failed")]),
        (decided(LATER, P1, D1, D2, avoid={D2.id}), [("LOCAL", "D2", "failed")]),
        (decided(LATER, P1, D1, D2, unknown=(D2,)), [("LOCAL", "D2", "no_profile")]),
        (decided(LATER, P1, D1, OTHER, avoid={(P1.id, D1.id)}), [("SPLIT", "P1 > D1", "failed")]),
        (decided(FIRST, P1, D1, D2, unknown=(P1,)), [("SPLIT", "P1 > D1", "no_profile")]),
        (decided(FIRST, replace(P1, inflight=4), P2, D1, R1, worker_limit=4), []),  # nobody expected that P
        (
            decided(replace(LATER, held=held(P1, 20_000)), replace(P1, inflight=4), P2, D1, worker_limit=4),
            [("SPLIT", "P1 > D1", "full")],
        ),
    ],
)
def test_the_rule_is_named_that_forbids_a_way(decision: Decision, rules: list[tuple[str, str, str]]) -> None:
    assert forbidden(decision) == rules


def test_they_are_few_and_behind_those_that_were_judged() -> None:
    decodes = [view("D", number) for number in range(1, 9)]
    failed = {one.id for one in decodes[:6]}
    found = decided(replace(LATER, held={}), P1, P2, *decodes, R1, blocked=failed).candidates
    assert len(found) <= RECORDED
    assert [bool(one.excluded) for one in found] == [False] * (len(found) - 2) + [True, True]
    assert all(one.prediction is None and not one.terms for one in found[-2:])


def test_modes_that_judge_no_ways_name_none() -> None:
    assert decided(LATER, P1, D1, BUSY, mode=Mode.ALWAYS_LOCAL, worker_limit=4).candidates == ()


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (SloTargets(), "slo"),
        (SloTargets(ttft_s=1e-4, ttft_factor=1e-4), "least_miss"),
        (SloTargets(ttft_s=1e-4, ttft_factor=3.0), "slo"),  # that of an idle engine counts
        (SloTargets(tpot_s=1e-4), "least_miss"),
    ],
)
def test_where_no_way_meets_the_targets_the_least_miss_is_taken_and_named_so(targets: SloTargets, reason: str) -> None:
    usual, decision = decided(LATER, P1, D1, D2), decided(replace(LATER, slo=targets), P1, D1, D2)
    assert decision.reason == reason
    assert decision.decode.name == usual.decode.name == "D2"
    assert decided(replace(LATER, slo=targets), P1, D1, D2, mode=Mode.LEAST_TTFT).reason == "least_ttft"
