"""Goodput: which turns meet the SLO, the search for a rate, and both on the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.offline.experiment.records import Record
from ppd.offline.goodput.highest_rate import highest_rate
from ppd.offline.goodput.slo import Attainment, Slo, attainment, idle_ttft_s
from ppd.offline.goodput.trials import Trials
from ppd.offline.simulation.playback import Playback, PlayedTurn
from ppd.offline.simulation.routing import ProxySetup
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.simulate import play
from ppd.offline.simulation.traced_prompts import TracedPrompts, traced_prompts
from ppd.offline.traces.turns import TracedConversation, TracedTurn
from ppd.proxy.config import Mode
from ppd.proxy.errors import ConfigError
from ppd.proxy.laws.step_time import EngineProfile
from tests.support.decisions import rules
from tests.support.stepped_engine import profile_of

PROFILE = EngineProfile()
SETUP = Setup(profile=profile_of())
LOCAL = ProxySetup(rules=rules(Mode.ALWAYS_LOCAL))


def record(
    turn: int = 1, ttft_s: float | None = 0.1, tpot_s: float = 0.01, error: str = "", tokens: int = 11
) -> Record:
    last_s = None if error or ttft_s is None else ttft_s + tpot_s * (tokens - 1)
    return Record(0, turn, True, 0.0, 0.0, ttft_s, last_s, 100, 0, tokens, "SPLIT", "P1", "D1", 200, error)


@pytest.mark.parametrize(
    ("one", "idle_s", "met"),
    [
        (record(ttft_s=0.25), 0.01, True),
        (record(ttft_s=0.26), 0.01, False),
        (record(ttft_s=0.29), 0.1, True),  # three times what it takes alone
        (record(ttft_s=0.31), 0.1, False),
        (record(tpot_s=0.0249), 0.01, True),
        (record(tpot_s=0.0251), 0.01, False),
        (record(tpot_s=9.0, tokens=1), 0.01, True),  # has no TPOT
        (record(ttft_s=None, error="not finished"), 0.01, False),
        (record(ttft_s=0.1, error="the connection was lost"), 0.01, False),
    ],
)
def test_a_turn_meets_the_slo_by_its_ttft_and_its_mean_tpot(one: Record, idle_s: float, met: bool) -> None:
    assert Slo().is_met(one, idle_s) is met


@pytest.mark.parametrize(
    ("found", "reaches"),
    [
        (Attainment(100, 90, 100, 90), True),
        (Attainment(100, 89, 1000, 1000), False),  # 99 % of all turns
        (Attainment(1000, 1000, 100, 89), False),
        (Attainment(100, 95, 0, 0), True),
        (Attainment(0, 0, 0, 0), False),
    ],
)
def test_first_and_later_turns_must_reach_the_share_each_by_itself(found: Attainment, reaches: bool) -> None:
    assert found.reaches(0.9) is reaches


def test_turns_are_counted_by_class() -> None:
    turns = [record(1), record(1, ttft_s=9.0), record(2), record(3, tpot_s=1.0), record(4)]
    assert attainment([PlayedTurn(one, 0) for one in turns], Slo(), PROFILE) == Attainment(2, 1, 3, 2)


@given(st.floats(0.01, 100.0), st.floats(0.02, 50.0), st.sampled_from([0.01, 0.05, 0.5, 3.0]))
def test_the_search_finds_the_highest_rate_that_passes(limit: float, first: float, precision: float) -> None:
    found = highest_rate(lambda rate: rate <= limit, first=first, least=0.01, most=100.0, precision=precision)
    if found.rate:
        assert found.rate <= limit
    if found.failed is not None:
        assert limit < found.failed <= (found.rate or 0.01) * (1 + precision) * (1 + 1e-9)
    if found.rate and found.failed is None:
        assert found.rate * (1 + precision) > 100.0 * (1 - 1e-9)
    assert found.trials <= 24


@pytest.mark.parametrize(("passes", "rate", "failed"), [(lambda _: True, 64.0, None), (lambda _: False, 0.0, 0.25)])
def test_a_search_ends_at_its_bounds(passes: Callable[[float], bool], rate: float, failed: float | None) -> None:
    found = highest_rate(passes, first=1.0, least=0.25, most=64.0, precision=1.0)
    assert found.rate == pytest.approx(rate)
    assert found.failed == failed


@pytest.mark.parametrize(
    ("limit", "trials", "rate", "is_cut"),
    [
        (10.0, 1, 1.0, True),
        (10.0, 4, 8.0, True),
        (10.0, 5, 8.0, True),  # between 8 and 16
        (10.0, 99, 9.95, False),
        (0.3, 1, 0.0, True),
        (0.3, 2, 0.0, True),
        (1e9, 99, 100.0, False),
    ],
)
def test_a_late_search_ends_with_the_highest_rate_that_has_passed(
    limit: float, trials: int, rate: float, is_cut: bool
) -> None:
    asked = list[float]()

    def passes(rate: float) -> bool:
        asked.append(rate)
        return rate <= limit

    found = highest_rate(passes, first=1.0, least=0.01, most=100.0, is_late=lambda: len(asked) >= trials)
    assert found.rate == pytest.approx(rate, rel=0.03)
    assert (found.is_cut, found.trials) == (is_cut, min(trials, len(asked)))


@pytest.mark.parametrize(
    "bounds", [{"first": 0.0, "least": 0.0, "most": 1.0}, {"first": 2.0, "least": 0.1, "most": 1.0}]
)
def test_bounds_that_make_no_sense_are_named(bounds: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="first"):
        highest_rate(lambda _: True, **bounds)
    with pytest.raises(ConfigError, match="share"):
        Slo(share=90)


# -- on the simulator


def chats(sessions: int = 20, *, first: int = 800, later: int = 200, output: int = 50) -> TracedPrompts:
    turns = (
        TracedTurn(new_tokens=first, output_tokens=output),
        *(TracedTurn(new_tokens=later, output_tokens=output, think_s=2.0) for _ in range(2)),
    )
    return traced_prompts([TracedConversation(str(at), None, turns) for at in range(sessions)])


def trials(topology: str, prompts: TracedPrompts | None = None) -> Trials:
    playback = Playback(rate=None, sessions=20, later_turns=20, grace_s=30.0)
    return Trials(prompts or chats(), topology, SETUP, LOCAL, playback)


@pytest.mark.parametrize(("prompt", "known"), [(800, 0), (20_000, 0), (1_050, 850), (1_000, 999), (40_000, 15_000)])
def test_the_idle_ttft_is_that_of_a_session_that_is_alone(prompt: int, known: int) -> None:
    first = TracedTurn(new_tokens=max(1, known - 1) if known else prompt, output_tokens=1)
    turns = (first, TracedTurn(new_tokens=prompt - known, output_tokens=1, think_s=1.0)) if known else (first,)
    window = play(
        traced_prompts([TracedConversation("a", None, turns)]),
        Playback(rate=0.01, sessions=1, later_turns=len(turns) - 1, warm_up_s=0.0),
        "1R",
        SETUP,
    )
    last = window.played[len(turns) - 1]
    assert last.record.prompt_tokens == prompt
    # Where the answer before ended on the last token, its KV was never written.
    assert last.record.ttft_s == pytest.approx(idle_ttft_s(PROFILE, prompt, max(0, last.known_tokens - 1)))


@pytest.mark.slow
def test_a_stricter_slo_is_met_at_lower_rates_and_its_search_plays_no_rate_twice() -> None:
    shared = trials("1R")
    bounds: dict[str, Any] = {"first": 4.0, "least": 1.0, "most": 16.0, "precision": 1.0}
    rates = [shared.goodput(Slo(tpot_s=tpot_s), **bounds).rate for tpot_s in (0.015, 0.025, 0.05)]
    assert rates == sorted(rates)
    assert rates[0] < rates[2]
    assert shared.at(4.0) is shared.at(4.0)
