"""Workers that are lost while a trace is played: what clients get, and what the proxy knows of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppd.offline.simulation.clients import BROKEN_OFF
from ppd.offline.simulation.playback import Loss, Playback, PlayedTurn
from ppd.offline.simulation.routing import ProxySetup
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.simulate import play
from ppd.offline.simulation.traced_prompts import traced_prompts
from ppd.offline.traces.turns import TracedConversation, TracedTurn
from ppd.proxy.config import Mode
from ppd.proxy.errors import ConfigError
from tests.support.decisions import rules
from tests.support.stepped_engine import profile_of

SETUP = Setup(profile=profile_of())
CHATS = (
    TracedTurn(new_tokens=2000, output_tokens=400),
    *(TracedTurn(new_tokens=200, output_tokens=400, think_s=1.0) for _ in range(5)),
)
PROMPTS = traced_prompts([TracedConversation(str(at), None, CHATS) for at in range(20)])
PLAYBACK = Playback(rate=2.0, sessions=40, later_turns=60, warm_up_s=10.0)
LOST_S = 20.0


def played(topology: str, *losses: Loss, **proxy: object) -> list[PlayedTurn]:
    window = play(
        PROMPTS,
        replace(PLAYBACK, losses=losses),
        topology,
        SETUP,
        ProxySetup(rules=rules(Mode.ALWAYS_LOCAL), **proxy),  # type: ignore[arg-type]
    )
    assert window.is_whole
    return window.played


@pytest.mark.slow
@pytest.mark.parametrize("proxy", [{}, {"queues": True}, {"kv_events_delay_s": 0.1}])
def test_turns_without_a_token_go_to_another_worker_and_the_others_are_broken_off(proxy: dict[str, object]) -> None:
    turns = played("1P_3D", Loss(10.0, "D2"), **proxy)
    broken = [one.record for one in turns if one.record.error]
    assert {(one.error, one.decode) for one in broken} == {(BROKEN_OFF, "D2")}
    assert all(one.first_token_s is not None and one.first_token_s < LOST_S for one in broken)
    assert 0 < len(broken) < 20
    for one in turns:
        if one.record.decode == "D2" and not one.record.error:
            assert one.record.last_token_s is not None
            assert one.record.last_token_s <= LOST_S
    ended = {(one.record.conversation, one.record.turn): one.record.error for one in turns}
    after = [ended.get((one.conversation, one.turn + 1)) for one in broken]  # the sessions go on elsewhere
    assert "" in after
    assert set(after) <= {"", None}, "None: it was sent after the window"


@pytest.mark.slow
def test_what_was_held_there_is_computed_again_once() -> None:
    usual, lost = played("2P_3D"), played("2P_3D", Loss(10.0, "D2"))
    assert not any(one.record.error for one in usual)
    needed = [sum(one.record.prompt_tokens - one.known_tokens for one in turns) for turns in (usual, lost)]
    again = [sum(one.work.computed_tokens for one in turns) - n for turns, n in zip((usual, lost), needed, strict=True)]
    assert again[1] > again[0] + 4000


def test_a_worker_that_comes_back_is_used_again() -> None:
    turns = played("1P_2D", Loss(5.0, "D1", back_after_s=5.0))
    on_d1 = [one.record.scheduled_s for one in turns if one.record.decode == "D1" and not one.record.error]
    assert any(at_s < LOST_S - 5.0 for at_s in on_d1)
    assert any(at_s > LOST_S for at_s in on_d1)
    found = [one.record for one in turns if one.record.decode == "D1" and one.record.scheduled_s > LOST_S]
    assert all(one.cached_tokens is not None for one in found)


@pytest.mark.parametrize("topology", ["1P_1D", "1R"])
def test_turns_wait_for_the_only_worker_to_come_back(topology: str) -> None:
    worker = "D1" if topology == "1P_1D" else "R1"
    turns = played(topology, Loss(10.0, worker, back_after_s=3.0))
    waited = [one.record for one in turns if LOST_S < one.record.scheduled_s < LOST_S + 2.9 and not one.record.error]
    assert waited
    assert all(one.first_token_s is not None and one.first_token_s > LOST_S + 3.0 for one in waited)


def test_without_its_p_a_fleet_goes_on_and_prompts_are_computed_on_d() -> None:
    turns = played("1P_2D", Loss(10.0, "P1"))
    assert not any(one.record.error for one in turns)
    assert {one.record.prefill for one in turns if one.record.scheduled_s > LOST_S} == {""}
    late = [one.record for one in turns if one.record.turn == 1 and one.record.scheduled_s > LOST_S]
    assert {one.route for one in late} == {"LOCAL"}


@pytest.mark.slow
def test_the_same_losses_give_the_same_turns_and_none_changes_nothing() -> None:
    losses = (Loss(10.0, "D2", 4.0), Loss(10.0, "P1", 2.0), Loss(12.0, "D2", 1.0))
    assert played("1P_2D", *losses) == played("1P_2D", *losses)
    assert played("1P_2D", Loss(1e6, "D2")) == played("1P_2D")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda: Loss(-1.0, "D1"), "at_s"),
        (lambda: Loss(float("nan"), "D1"), "at_s"),
        (lambda: Loss(1.0, "D1", -1.0), "back_after_s"),
        (lambda: played("1P_2D", Loss(1.0, "D3")), "'D3' must be one of P1, D1, D2"),
    ],
)
def test_a_loss_that_cannot_be_is_one_clear_error(loss: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loss()  # type: ignore[operator]
