"""What the simulated proxy knows, right or wrong: engines' laws, token estimates, its ledger, who holds what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.simulation.believed import drawn_factor, laws_of, slower, with_room
from ppd.offline.simulation.routing import ProxySetup
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.simulate import simulate
from ppd.proxy.config import Mode
from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.places import UNKNOWN
from ppd.proxy.fleet.view import Fleet
from ppd.proxy.fleet.worker import Role
from ppd.proxy.laws.prediction import Laws, Prediction
from ppd.proxy.laws.step_time import EngineProfile, request_time_s, step_time_s, transfer_time_s
from ppd.proxy.policy import Decision, Route, Rules, Turn, decide
from tests.support.decisions import D1, P1, fleet_of, rules
from tests.support.stepped_engine import profile_of

SETUP = Setup(profile=profile_of())
CHATS = Workload(
    first=Profile(name="first", new_tokens=512, output_tokens=64),
    later=Profile(name="later", new_tokens=128, output_tokens=128),
    turns=4,
)


@dataclass
class Seen:
    """What decisions had before them."""

    turns: list[Turn] = field(default_factory=list)
    fleets: list[Fleet] = field(default_factory=list)
    laws: Laws | None = None


Play = Callable[..., Seen]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Play:
    def run(*, foreseen: Prediction | None = None, mode: Mode = Mode.ALWAYS_LOCAL, **proxy: Any) -> Seen:
        seen = Seen()

        def watched(turn: Turn, fleet: Fleet, rules: Rules, **settings: Any) -> Decision:
            seen.turns.append(turn)
            seen.fleets.append(fleet)
            seen.laws = rules.laws
            return replace_struct(decide(turn, fleet, rules, **settings), prediction=foreseen)

        monkeypatch.setattr("ppd.offline.simulation.routing.decide", watched)
        plan = Run(topology="1P_2D", workload=CHATS, qps=4.0, x=0.0, seconds=3.0, conversations=20)
        simulate(plan, SETUP, proxy=ProxySetup(rules=rules(mode), **proxy))
        return seen

    return run


def test_the_proxy_has_the_engines_profile_by_role() -> None:
    slow_d = replace(SETUP, costs_of={Role.DECODE: EngineProfile(step_s=0.1)})
    laws = laws_of(slow_d)
    of_p, of_d = laws.of(P1), laws.of(D1)
    assert of_p is not None
    assert of_d is not None
    assert (of_p.costs, of_d.costs.step_s) == (SETUP.profile.costs, 0.1)
    assert not of_p.is_guess(1 << 20, 1 << 20)


@pytest.mark.parametrize(("proxy", "factor"), [({}, 1.0), ({"laws_factor": 2.0}, 2.0), ({"laws": False}, None)])
def test_laws_may_be_wrong_or_unknown(played: Play, proxy: dict[str, Any], factor: float | None) -> None:
    laws = played(**proxy).laws
    if factor is None:
        assert laws is None
        return
    assert laws is not None
    found = laws.of(D1)
    assert found is not None
    assert found.costs.step_s == factor * SETUP.profile.costs.step_s


@pytest.mark.parametrize(
    "time_s",
    [
        lambda costs: step_time_s(costs, 9, 5000, 100, 9999),
        lambda costs: transfer_time_s(costs, 777),
        lambda costs: request_time_s(costs, 0, 100),
    ],
)
def test_all_times_are_wrong_by_the_factor(time_s: Callable[[EngineProfile], float]) -> None:
    assert time_s(slower(EngineProfile(), 2.0)) == pytest.approx(2.0 * time_s(EngineProfile()))


@pytest.mark.parametrize("factor", [1.0, 0.5, 2.0])
def test_measured_times_correct_the_laws_of_each_worker(played: Play, factor: float) -> None:
    """A step takes about 9 ms; the proxy believes as much times the factor."""
    plain = Prediction(ttft_s=0.05, tpot_s=0.0095 * factor, prefill_s=0.0, ttft_factor=1.0, tpot_factor=1.0)
    seen = played(foreseen=plain, laws_factor=factor)
    assert seen.laws is not None
    found = seen.laws.of(seen.fleets[-1].decodes[0])
    assert found is not None
    assert found.tpot_factor * factor == pytest.approx(1.0, rel=0.25)
    assert seen.laws.version != "0.0.0"


def test_without_predictions_nothing_is_learnt(played: Play) -> None:
    laws = played().laws
    assert laws is not None
    assert laws.version == "0.0.0"


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_estimates_of_what_a_prompt_adds_may_be_wrong(played: Play, factor: float) -> None:
    right, wrong = played(mode=Mode.ALWAYS_SPLIT).turns, played(mode=Mode.ALWAYS_SPLIT, estimates_factor=factor).turns
    added = [[turn.prompt_tokens - turn.held_tokens for turn in turns if turn.number == 4] for turns in (right, wrong)]
    assert set(added[0]) == {128}
    assert set(added[1]) == {round(128 * factor)}


def test_each_session_may_have_an_error_of_its_own(played: Play) -> None:
    turns = played(estimates_spread=0.3).turns
    added = {turn.prompt_tokens - turn.held_tokens for turn in turns if turn.number == 4}
    assert len(added) > 5
    assert min(added) < 115
    assert max(added) > 140
    factors = [drawn_factor(0.3, session) for session in range(500)]
    assert 1 / 1.3 <= min(factors) < 0.8
    assert 1.25 < max(factors) <= 1.3
    assert drawn_factor(0.3, 7) == factors[7]


def test_it_may_believe_the_sessions_last_worker_alone(played: Play) -> None:
    both, last = played().turns, played(residency_elsewhere=False).turns
    assert any(len(turn.held) > 1 for turn in both)
    assert {len(turn.held) for turn in last if turn.number > 1} == {1}
    assert all(worker == turn.decode for turn in last for worker in turn.held)


def test_first_turns_may_all_be_split(played: Play) -> None:
    usual, forced = played().turns, played(first_turns_split=True).turns
    assert {turn.forced for turn in usual} == {None}
    assert {turn.forced for turn in forced if turn.number == 1} == {Route.SPLIT}
    assert {turn.forced for turn in forced if turn.number > 1} == {None}


@pytest.mark.slow
def test_it_may_be_without_its_ledger(played: Play) -> None:
    views = [
        [view for fleet in played(ledger=ledger).fleets for view in (*fleet.decodes, *fleet.views.values())]
        for ledger in (True, False)
    ]
    assert max(view.context_tokens for view in views[0]) > 1000
    for view in views[1]:
        assert (view.decoding, view.context_tokens, view.prefills, view.reserved_tokens, view.sends_free_s) == (0,) * 5
    assert max(view.inflight for view in views[1]) > 2


def test_a_fleet_with_room_is_the_same_but_for_its_places() -> None:
    full = replace_struct(D1, places=1, inflight=1)
    found = with_room(fleet_of((full, P1)))
    assert [view.places for view in found.decodes] == [UNKNOWN]
    assert found.views[D1.id] is found.decodes[0]
    assert found.prefills == [P1]


@pytest.mark.parametrize(
    "setting",
    [
        {"laws_factor": 0.0},
        {"estimates_factor": float("nan")},
        {"estimates_spread": -0.1},
        {"laws_factor": float("inf")},
    ],
)
def test_a_setting_out_of_range_is_named(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        ProxySetup(**setting)  # type: ignore[arg-type]
