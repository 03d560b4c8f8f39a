"""Windows that end as soon as their verdict is certain: the same verdict as at their end, on the same turns."""

from __future__ import annotations

import pytest

from ppd.offline.goodput.slo import Slo, attainment
from ppd.offline.goodput.windows import JudgedWindow, TurnPace, bounds
from ppd.offline.simulation.playback import Playback
from ppd.offline.simulation.routing import ProxySetup
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.simulate import play
from ppd.offline.simulation.traced_prompts import traced_prompts
from ppd.offline.traces.turns import TracedConversation, TracedTurn
from ppd.proxy.config import Mode
from tests.support.decisions import rules
from tests.support.stepped_engine import profile_of

SETUP = Setup(profile=profile_of())
PROFILE = SETUP.profile.costs
FIRST = TracedTurn(new_tokens=8000, output_tokens=128)
LATER = TracedTurn(new_tokens=512, output_tokens=128, think_s=10.0)
PROMPTS = traced_prompts([TracedConversation(str(at), None, (FIRST, LATER, LATER, LATER)) for at in range(64)])
PACE = TurnPace.of(PROMPTS, PROFILE.step_s)


def window(rate: float, mode: Mode = Mode.ALWAYS_LOCAL, slo: Slo | None = None) -> JudgedWindow:
    playback = Playback(rate=rate, sessions=20, later_turns=20, grace_s=20.0)
    judged = JudgedWindow.within(bounds(PROMPTS, playback, PACE), playback, PROFILE, slo)
    play(PROMPTS, playback, "1P_1D", SETUP, ProxySetup(rules=rules(mode)), judged)
    return judged


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.98])
def test_an_early_verdict_is_that_of_the_whole_window(share: float) -> None:
    slo, verdicts = Slo(share=share), []
    for rate in (0.2, 1.0, 1.6, 4.0):
        early, whole = window(rate, slo=slo), window(rate)
        verdicts.append(whole.is_whole and attainment(whole.played, slo, PROFILE).reaches(share))
        assert early.verdict in (verdicts[-1], None)
        assert early.all_turns <= whole.all_turns
        if early.verdict is None:
            assert attainment(early.played, slo, PROFILE) == attainment(whole.played, slo, PROFILE)
    assert set(verdicts) == {True, False}, "the rates show both"


@pytest.mark.slow
def test_a_window_out_of_reach_is_given_up_early() -> None:
    early, whole = window(4.0, slo=Slo(share=0.98)), window(4.0)
    assert early.verdict is False
    assert early.all_turns < whole.all_turns


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Mode.ALWAYS_LOCAL, Mode.ALWAYS_SPLIT])
def test_first_turns_are_the_same_whatever_the_mode_and_later_ones_no_more_than_foretold(mode: Mode) -> None:
    judged = window(1.5, mode)
    assert judged.sessions == judged.first
    assert judged.is_whole
    before = sum(turn > 1 for turn in [one.record.turn for one in judged.played])
    assert before <= judged.later_turns <= judged.later_by_end
