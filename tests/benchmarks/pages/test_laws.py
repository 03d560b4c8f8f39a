"""The curves and points of the figure of the laws."""

from __future__ import annotations

import pytest

from benchmarks.pages import scenes
from benchmarks.pages.laws import (
    HELD_TOKENS,
    PUBLISHED,
    predicted,
    published_tpot_s,
    published_ttft_s,
    tpot_s,
)
from ppd.offline.tables.published_cells import read_cells
from ppd.proxy.laws.profile_file import find
from ppd.proxy.laws.step_time import step_time_s
from ppd.proxy.policy import Route

CELLS = read_cells(PUBLISHED)


def test_a_curve_is_the_time_of_a_step_with_so_many_sequences() -> None:
    costs = find(scenes.PROFILE).costs
    for sequences, context in ((1, 500), (20, 8192)):
        assert tpot_s(sequences, context) == pytest.approx(step_time_s(costs, sequences, sequences * context, 0, 0))


@pytest.mark.parametrize(("x", "route", "within"), [(0.0, Route.SPLIT, 0.25), (1.0, Route.LOCAL, 0.25)])
def test_published_times_lie_by_their_curve(x: float, route: Route, within: float) -> None:
    found = published_ttft_s(CELLS, x)
    assert list(found) == [16, 32, 64, 128, 256, 512, 1024]
    for new, time_s in found.items():
        assert predicted(scenes.IDLE, route, HELD_TOKENS, new).ttft_s == pytest.approx(time_s, rel=within)


def test_published_tpot_lies_by_the_curve_of_its_context() -> None:
    points = list(published_tpot_s(CELLS))
    assert len(points) > 100
    for sequences, time_s in points:
        assert tpot_s(max(1, round(sequences)), 500) == pytest.approx(time_s, rel=0.2)
