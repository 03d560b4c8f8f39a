"""The goodput of simulated fleets: it grows with the fleet, and holds at the rate that was found."""

from __future__ import annotations

from ppd.offline.goodput.slo import Slo
from ppd.offline.goodput.trials import Trials
from ppd.offline.simulation.playback import Playback
from ppd.offline.simulation.routing import ProxySetup
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.traced_prompts import traced_prompts
from ppd.offline.traces.turns import TracedConversation, TracedTurn
from ppd.proxy.config import Mode
from tests.support.decisions import rules
from tests.support.stepped_engine import profile_of

TURNS = (
    TracedTurn(new_tokens=800, output_tokens=50),
    *(TracedTurn(new_tokens=200, output_tokens=50, think_s=2.0) for _ in range(2)),
)
CHATS = traced_prompts([TracedConversation(str(at), None, TURNS) for at in range(20)])


def trials(topology: str) -> Trials:
    playback = Playback(rate=None, sessions=60, later_turns=60, grace_s=30.0)
    return Trials(CHATS, topology, Setup(profile=profile_of()), ProxySetup(rules=rules(Mode.ALWAYS_LOCAL)), playback)


def test_twice_the_workers_serve_about_twice_the_sessions() -> None:
    one, two = (
        trials(topology).goodput(Slo(share=0.9), first=4.0, least=0.25, most=256.0, precision=0.1).rate
        for topology in ("1R", "2R")
    )
    assert one > 0.25
    assert 1.5 < two / one < 3.0


def test_the_found_rate_meets_the_slo_and_the_next_one_does_not() -> None:
    tried = trials("1P_1D")
    found = tried.goodput(Slo(), first=2.0, least=0.1, most=64.0, precision=0.1)
    assert found.failed is not None
    assert tried.passes(found.rate, Slo())
    assert not tried.passes(found.failed, Slo())
