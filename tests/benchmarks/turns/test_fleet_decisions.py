"""The decisions that fleet_decisions.py times are of first and later turns, in fleets where some workers are full."""

from __future__ import annotations

import pytest

from benchmarks.turns.fleet_decisions import DecidedTurns, count_lines, counted, decision_times_us
from ppd.proxy.config import Mode
from ppd.proxy.fleet.places import START


@pytest.mark.parametrize("workers", [(1, 3, 0), (0, 0, 4), (10, 10, 0)])
def test_fleets_decide_on_first_and_later_turns_with_full_workers(workers: tuple[int, int, int]) -> None:
    turns = DecidedTurns(Mode.SLO, *workers)
    times_us = decision_times_us(turns, 200)
    assert len(times_us) == 200
    assert min(times_us) > 0
    later = [turn for turn in turns.sessions if turn.number > 2]
    assert later
    assert any(len(turn.held) > 2 for turn in later)
    assert any(0 < view.places < START for view in turns.registry.views()), "and so it was full now and then"


def test_instructions_are_counted_by_function_and_decision() -> None:
    work = counted(DecidedTurns(Mode.SLO, 1, 3, 0), 10)
    assert work.calls["policy/decide.py: decide"] == 10
    assert work.instructions["policy/decide.py: decide"] > 100
    total, *functions = count_lines(work, 10)
    assert total == f"{work.instructions.total() / 10:.0f} instructions, {work.calls.total() / 10:.0f} calls"
    shown = [float(line.split()[0]) for line in functions]
    assert shown == sorted(shown, reverse=True)
