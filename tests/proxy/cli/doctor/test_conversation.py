"""The doctor's checks of its probe conversation, as tables of (facts, findings)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppd.proxy.cli.doctor.checks import Check
from ppd.proxy.cli.doctor.conversation import (
    follow_ups_hit_the_cache,
    handoff_works,
    nothing_is_lost,
    prefill_computes,
    turns_are_answered,
)
from ppd.proxy.cli.doctor.values import (
    ConfigFact,
    EngineCounts,
    Facts,
    Level,
    ProbeConversation,
    ProxyFact,
    TurnFact,
    WorkerFact,
)
from ppd.proxy.fleet.worker import Role, Worker

OK, WARN, FAIL, SKIP = Level.OK, Level.WARN, Level.FAIL, Level.SKIP
Said = list[tuple[Level, str]]  # a level, and words that the message must hold

P1, D1, R1, _ = (
    WorkerFact(name=f"{role}1", worker=Worker(role=role, address=f"{role}:1", models=("m",))) for role in Role
)
PROXY = ProxyFact(address="proxy:1", ready_status=200, ways=("split",), admin_status=200, mode="table")


def check_said(check: Check, facts: Facts, expected: Said) -> None:
    found = list(check(facts))
    assert [finding.level for finding in found] == [level for level, _ in expected], found
    for finding, (level, words) in zip(found, expected, strict=True):
        assert words in finding.message
        assert finding.remedy.endswith(".") or level in (OK, SKIP)


FIRST = TurnFact(
    route="SPLIT",
    reason="first_turn",
    number=1,
    decode="D1",
    prefill="P1",
    prompt_tokens=1000,
    completion_tokens=8,
    cached_tokens=0,
    growth=(("P1", EngineCounts(1000, 0, 0, 0, 0)), ("D1", EngineCounts(0, 0, 1000, 0, 0))),
)
LOCAL = TurnFact(
    route="LOCAL",
    reason="table_local",
    number=2,
    decode="D1",
    prompt_tokens=1400,
    completion_tokens=8,
    cached_tokens=992,
    growth=(("P1", EngineCounts(0, 0, 0, 0, 0)), ("D1", EngineCounts(408, 992, 0, 0, 0))),
)
SPLIT = replace(
    LOCAL,
    route="SPLIT",
    prefill="P1",
    growth=(("P1", EngineCounts(408, 992, 0, 0, 0)), ("D1", EngineCounts(0, 992, 408, 0, 0))),
)
REPLICA = replace(LOCAL, route="REPLICA", decode="R1", growth=(("R1", EngineCounts(408, 992, 0, 0, 0)),))


def talk(*turns: TurnFact, workers: tuple[WorkerFact, ...] = (P1, D1), forced: tuple[TurnFact, ...] = ()) -> Facts:
    return Facts(proxy=PROXY, workers=workers, conversation=ProbeConversation(model="m", turns=turns, forced=forced))


TWO = tuple(replace(fact, worker=replace(fact.worker, models=("m", "n"))) for fact in (P1, D1))
LORAS = (replace(R1, worker=replace(R1.worker, models=tuple(f"a{number}" for number in range(6)))),)


def d1(*counts: int | None) -> tuple[tuple[str, EngineCounts], ...]:
    """Growth on D1: computed, local hits, transferred, expired, failed."""
    return (("D1", EngineCounts(*counts)),)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (talk(FIRST, LOCAL), [(OK, "SPLIT on P1 -> D1 (first_turn)"), (OK, "LOCAL on D1 (table_local)")]),
        (talk(replace(FIRST, status=503, error="no worker")), [(FAIL, "answered with 503: no worker")]),
        (talk(replace(FIRST, status=0, error="no answer in 120 s")), [(FAIL, "not answered: no answer in 120 s")]),
        (
            talk(replace(REPLICA, number=1, reason="no_prefill_worker", failed_legs="prefill on P1: 5xx")),
            [(WARN, "REPLICA on R1 (no_prefill_worker), 1400 prompt tokens, 992 cached; prefill on P1: 5xx")],
        ),
        (talk(FIRST, replace(LOCAL, number=1)), [(OK, "SPLIT"), (WARN, "taken for turn 1 of its session")]),
        (talk(FIRST, workers=(*TWO, *LORAS)), [(OK, "SPLIT"), (SKIP, "a0, a1, a2, a3, a4 and 2 more were not asked")]),
        (talk(FIRST, workers=TWO), [(OK, "SPLIT"), (SKIP, "n was not asked")]),
        (talk(replace(FIRST, number=0, cached_tokens=None)), [(OK, "unknown cached")]),
        (Facts(conversation=ProbeConversation(skipped="no model")), [(SKIP, "no model")]),
        (Facts(config=ConfigFact()), []),
    ],
)
def test_turns(facts: Facts, expected: Said) -> None:
    check_said(turns_are_answered, facts, expected)


NONE = tuple(replace(fact, worker=replace(fact.worker, connector="none")) for fact in (P1, D1))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (talk(FIRST, LOCAL), [(OK, "turn 1: 1000 of the 1000 tokens that D1 lacked came from P1")]),
        (talk(FIRST, SPLIT), [(OK, "turn 1"), (OK, "turn 2: 408 of the 408")]),
        (
            talk(replace(FIRST, growth=d1(1000, 0, 0, 0, 0))),
            [(FAIL, "turn 1: handoff does not work: D1 pulled nothing and computed 1000 tokens")],
        ),
        (talk(replace(FIRST, growth=d1(1000, 0, 0)), workers=NONE), [(FAIL, "does not work")]),
        (talk(replace(FIRST, growth=d1(600, 0, 400))), [(WARN, "only 400 of the 1000")]),
        (talk(replace(FIRST, growth=d1(10, 980, 0))), [(SKIP, "held nearly all")]),
        (talk(replace(FIRST, growth=())), [(SKIP, "metrics of D1 do not tell")]),
        (talk(replace(FIRST, growth=d1(1000, 0, None))), [(SKIP, "metrics of D1 do not tell")]),
        (talk(replace(FIRST, growth=d1(None, None, 0))), [(FAIL, "computed an unknown number of tokens")]),
        (talk(replace(FIRST, handoff_missing="params_missing")), [(FAIL, "no usable handoff (params_missing)")]),
        (talk(replace(LOCAL, number=1, reason="single_engine")), [(SKIP, "was SPLIT: single_engine")]),
        (talk(LOCAL, LOCAL, forced=(FIRST,)), [(OK, "a forced SPLIT: 1000 of the 1000")]),
        (talk(LOCAL, LOCAL, forced=(replace(FIRST, growth=d1(1000, 0, 0, 0, 0)),)), [(FAIL, "does not work")]),
        (talk(LOCAL, LOCAL, forced=(TurnFact(status=502, error="no P"),)), [(FAIL, "SPLIT was not answered: no P")]),
        (talk(LOCAL, LOCAL, forced=(LOCAL,)), [(SKIP, "was SPLIT")]),  # no P could hand over to a D
        (
            talk(replace(REPLICA, reason="no_prefill_worker"), workers=(P1, D1, R1)),
            [(WARN, "was SPLIT: no_prefill_worker, although P and D are up")],
        ),
        (
            replace(talk(replace(REPLICA, reason="no_decode_worker")), proxy=replace(PROXY, ways=("replica",))),
            [(SKIP, "was SPLIT: no_decode_worker")],
        ),
        (talk(REPLICA, REPLICA, workers=(R1,)), [(SKIP, "no P serves")]),
        (talk(replace(FIRST, status=500)), []),
        (Facts(config=ConfigFact()), []),
    ],
)
def test_handoff(facts: Facts, expected: Said) -> None:
    check_said(handoff_works, facts, expected)


def test_a_missing_handoff_is_explained_by_its_connector() -> None:
    turn = replace(FIRST, growth=d1(1000, 0, 0))
    (shared,) = handoff_works(talk(turn, workers=NONE))
    (pulled,) = handoff_works(talk(turn))
    assert "shared KV store" in shared.remedy
    assert "SIDE_CHANNEL_HOST" in pulled.remedy


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (talk(FIRST), [(OK, "P1 computed 1000 tokens")]),
        (talk(replace(FIRST, growth=(("P1", EngineCounts(0, 0, 0)),))), [(WARN, "computed 0 of 1000")]),
        (talk(replace(FIRST, growth=())), [(SKIP, "do not tell")]),
        (talk(REPLICA), []),
        (talk(replace(FIRST, status=0)), []),
    ],
)
def test_prefill(facts: Facts, expected: Said) -> None:
    check_said(prefill_computes, facts, expected)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (talk(FIRST, LOCAL), [(OK, "D1 found 992 of 1400")]),
        (talk(FIRST, SPLIT), [(OK, "D1 found 992")]),
        (talk(REPLICA, REPLICA), [(OK, "R1 found 992")]),
        (talk(FIRST, replace(LOCAL, growth=d1(1400, 0, 0))), [(FAIL, "D1 found 0 of the 1000")]),
        (talk(FIRST, replace(SPLIT, decode="D2")), [(OK, "P1 found 992")]),
        (talk(FIRST, replace(LOCAL, decode="D2")), [(SKIP, "none of turn 1's workers")]),
        (talk(FIRST, replace(LOCAL, growth=())), [(OK, "D1 found 992")]),
        (talk(FIRST, replace(LOCAL, growth=(), cached_tokens=None)), [(WARN, "neither metrics nor usage")]),
        (talk(FIRST, replace(SPLIT, growth=())), [(OK, "P1 found 992")]),
        (talk(FIRST, replace(SPLIT, growth=(), cached_tokens=None)), [(WARN, "neither metrics nor usage")]),
        (talk(FIRST), [(SKIP, "no second turn")]),
        (talk(FIRST, replace(LOCAL, status=500)), [(SKIP, "no second turn")]),
        (Facts(config=ConfigFact()), []),
    ],
)
def test_prefix_cache(facts: Facts, expected: Said) -> None:
    check_said(follow_ups_hit_the_cache, facts, expected)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (talk(FIRST, LOCAL), []),
        (talk(replace(FIRST, growth=d1(0, 0, 1000, 2, 0)), LOCAL), [(WARN, "2 on D1")]),
        (talk(FIRST, replace(LOCAL, growth=d1(0, 0, 0, 0, 3))), [(WARN, "3 on D1")]),
        (Facts(config=ConfigFact()), []),
    ],
)
def test_losses(facts: Facts, expected: Said) -> None:
    check_said(nothing_is_lost, facts, expected)


# -- counters


@pytest.mark.parametrize(
    ("now", "then", "growth"),
    [
        (EngineCounts(5, 4, 3, 2, 1), EngineCounts(1, 1, 1, 1, 1), EngineCounts(4, 3, 2, 1, 0)),
        (EngineCounts(5), EngineCounts(), EngineCounts(5)),
        (EngineCounts(), EngineCounts(5), EngineCounts()),
        (EngineCounts(5, 4), EngineCounts(6, 1), None),
    ],
)
def test_growth_of_counters(now: EngineCounts, then: EngineCounts, growth: EngineCounts | None) -> None:
    assert now.since(then) == growth


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "Give a key: --client-key"), (403, "Give a key"), (502, "Look up")]
)
def test_a_turn_that_is_not_let_in_wants_a_key(status: int, remedy: str) -> None:
    turn = TurnFact(status=status, error="no")
    (finding,) = turns_are_answered(Facts(proxy=PROXY, conversation=ProbeConversation(model="m", turns=(turn,))))
    assert remedy in finding.remedy
