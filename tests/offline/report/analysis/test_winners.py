from __future__ import annotations

from collections.abc import Callable

import pytest

from ppd.offline.experiment.cells import MeasuredCell
from ppd.offline.report.analysis.winners import TOKENS, TPOT, TTFT, Objective, disagreement, wins


def test_each_objective_has_its_own_winner(cell: Callable[..., MeasuredCell]) -> None:
    cells = [
        cell("4R", ttft=0.05, tpot=0.012, tokens=900.0),
        cell("2P_2D", 0.0, ttft=0.2, tpot=0.008, tokens=1000.0),
        cell("2P_2D", 0.5, ttft=0.15, tpot=0.009, tokens=1100.0),
        cell("2P_2D", 1.0, ttft=0.1, tpot=0.010, tokens=1200.0),
    ]
    found = {objective.name: wins(cells, objective) for objective in (TTFT, TPOT, TOKENS)}
    assert {name: dict(each.by_mode) for name, each in found.items() if each} == {
        "TTFT": {"replica": 1.0},
        "TPOT": {"x=0": 1.0},
        "tokens/s": {"x=1": 1.0},
    }


def test_shares_are_over_points_and_a_tie_is_split_between_modes(cell: Callable[..., MeasuredCell]) -> None:
    cells = [
        cell("2P_2D", 0.0, qps=1, ttft=0.2),
        cell("2P_2D", 1.0, qps=1, ttft=0.1),
        cell("2P_2D", 0.0, qps=2, ttft=0.1),
        cell("3P_1D", 0.0, qps=2, ttft=0.1),
        cell("2P_2D", 1.0, qps=2, ttft=0.1),
        cell("2P_2D", 1.0, qps=4, ttft=0.3),
        cell("2P_2D", 1.0, qps=8, ttft=0.3),
        cell("2P_2D", 0.0, qps=8, ttft=0.4),
    ]
    found = wins(cells, TTFT)
    assert found is not None
    assert (found.points, found.ties, found.uncontested, found.clear) == (4, 1, 1, None)
    assert found.share("x=0") == pytest.approx(0.5 / 4)
    assert found.share("x=1") == pytest.approx(3.5 / 4)
    assert found.share("replica") == 0.0


@pytest.mark.parametrize("bad", [{"failed": ("dead",)}, {"failures": 100}, {"ttft": None}, {"tpot": None}])
def test_a_cell_that_failed_cannot_win(cell: Callable[..., MeasuredCell], bad: dict[str, object]) -> None:
    best = {"ttft": 0.001, **bad}
    found = wins([cell("4R", **best), cell("2P_2D", 0.0)], TTFT)
    assert found is not None
    assert dict(found.by_mode) == {"x=0": 1.0}


def test_without_evidence_there_is_no_winner(cell: Callable[..., MeasuredCell]) -> None:
    assert wins([cell("4R", failed=("dead",))], TTFT) is None
    assert wins([cell("4R", tokens=None)], TOKENS) is None


@pytest.mark.parametrize(
    ("winner_half", "other_half", "clear"), [(0.02, 0.02, 1), (0.06, 0.05, 0), (0.02, None, 0), (None, 0.01, 0)]
)
def test_a_win_is_clear_where_the_intervals_are_apart(
    cell: Callable[..., MeasuredCell], winner_half: float | None, other_half: float | None, clear: int
) -> None:
    cells = [
        cell("2P_2D", 1.0, ttft=0.1, half=winner_half),
        cell("3P_1D", 1.0, ttft=0.11, half=0.05),  # of the same mode: it does not matter
        cell("2P_2D", 0.0, ttft=0.2, half=other_half),
    ]
    found = wins(cells, TTFT)
    assert found is not None
    assert found.clear == clear


def test_the_best_for_one_objective_may_be_the_best_for_the_other(cell: Callable[..., MeasuredCell]) -> None:
    cells = [
        cell("2P_2D", 0.0, qps=1, ttft=0.2, tpot=0.008),
        cell("2P_2D", 1.0, qps=1, ttft=0.1, tpot=0.010),
        cell("2P_2D", 0.0, qps=2, ttft=0.2, tpot=0.012),
        cell("2P_2D", 1.0, qps=2, ttft=0.1, tpot=0.010),
    ]
    assert disagreement(cells, TTFT, TPOT) == (1, 2)


def test_another_figure_can_be_the_objective(cell: Callable[..., MeasuredCell]) -> None:
    tail = Objective("p99", lambda c: c.later_ttft_s, lambda c: c.later_ttft_s.p99 if c.later_ttft_s else None)
    cells = [cell("2P_2D", 0.0, ttft=0.2, p99=0.3), cell("2P_2D", 1.0, ttft=0.1, p99=5.0)]
    found = wins(cells, tail)
    assert found is not None
    assert dict(found.by_mode) == {"x=0": 1.0}
