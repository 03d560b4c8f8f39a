"""Linear interpolation between scattered points."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.decision_table.interpolation import Mix, Point, Triangulation

PAPER = [(4, 5), (5, 8), (5, 9), (6, 10), (6, 6), (7, 7), (8, 6), (9, 6), (10, 5)]  # two to the power of these
SQUARES = [(float(x), float(y)) for x in range(4) for y in range(3)]  # every circle has four points on it
LINE = [(3.0, 2.0), (1.0, 1.0), (5.0, 3.0)]
NEARLY_A_LINE = [(0.0, 0.0), (1.0, 1e-13), (2.0, 0.0)]
PAIR = [(0.0, 0.0), (2.0, 2.0)]
LAYOUTS: list[list[Point]] = [
    [(float(x), float(y)) for x, y in PAPER],
    SQUARES,
    LINE,
    PAIR,
    NEARLY_A_LINE,
    [(1.0, 1.0)],
]

POINTS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda p: (p[0] / 4, p[1] / 4)),
    min_size=1,
    max_size=12,
    unique=True,
)
PLACE = st.tuples(st.floats(-5, 20), st.floats(-5, 20))


def value_of(mix: Mix, points: list[Point], slope: tuple[float, float]) -> float:
    return sum(share * (slope[0] * points[number][0] + slope[1] * points[number][1]) for number, share in mix.shares)


def place_of(mix: Mix, points: list[Point]) -> Point:
    return value_of(mix, points, (1, 0)), value_of(mix, points, (0, 1))


@pytest.mark.parametrize("points", LAYOUTS)
def test_on_a_point_the_mix_is_that_point_alone(points: list[Point]) -> None:
    triangulation = Triangulation(points)
    for number, point in enumerate(points):
        assert triangulation.mix(*point) == Mix(((number, 1.0),), True)


@pytest.mark.parametrize(
    ("points", "place", "shares", "is_inside"),
    [
        (PAIR, (0.5, 0.5), {0: 0.75, 1: 0.25}, True),
        (PAIR, (0.0, 1.0), {0: 0.75, 1: 0.25}, False),
        (PAIR, (9.0, 9.0), {1: 1.0}, False),
        (LINE, (2.0, 1.5), {0: 0.5, 1: 0.5}, True),
        (LINE, (4.0, 2.5), {0: 0.5, 2: 0.5}, True),
        ([(1.0, 1.0)], (3.0, 0.0), {0: 1.0}, False),
        ([(0.0, 0.0), (4.0, 0.0), (0.0, 4.0)], (1.0, 1.0), {0: 0.5, 1: 0.25, 2: 0.25}, True),
        ([(0.0, 0.0), (4.0, 0.0), (0.0, 4.0)], (2.0, 2.0), {1: 0.5, 2: 0.5}, True),
        ([(0.0, 0.0), (4.0, 0.0), (0.0, 4.0)], (3.0, 3.0), {1: 0.5, 2: 0.5}, False),
        ([(0.0, 0.0), (4.0, 0.0), (0.0, 4.0)], (1.0, -7.0), {0: 0.75, 1: 0.25}, False),
        ([(0.0, 0.0), (4.0, 0.0), (0.0, 4.0)], (-1.0, -1.0), {0: 1.0}, False),
    ],
)
def test_places_by_hand(points: list[Point], place: Point, shares: dict[int, float], is_inside: bool) -> None:
    mix = Triangulation(points).mix(*place)
    assert dict(mix.shares) == pytest.approx(shares)
    assert mix.is_inside is is_inside


@given(POINTS, PLACE)
def test_shares_are_positive_and_sum_to_one(points: list[Point], place: Point) -> None:
    mix = Triangulation(points).mix(*place)
    assert 1 <= len(mix.shares) <= 3
    assert all(share > 0 for _, share in mix.shares)
    assert sum(share for _, share in mix.shares) == pytest.approx(1)


@given(POINTS, PLACE)
def test_within_the_points_the_mean_place_is_the_place_itself(points: list[Point], place: Point) -> None:
    """So whatever is linear in the coordinates comes out exact."""
    mix = Triangulation(points).mix(*place)
    if mix.is_inside:
        assert place_of(mix, points) == pytest.approx(place, abs=1e-6)


@given(POINTS, st.data())
def test_a_mean_of_points_lies_within_them(points: list[Point], data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.floats(0.01, 1), min_size=len(points), max_size=len(points)))
    x = sum(part * point[0] for part, point in zip(parts, points, strict=True)) / sum(parts)
    y = sum(part * point[1] for part, point in zip(parts, points, strict=True)) / sum(parts)
    found = place_of(Triangulation(points).mix(x, y), points)
    assert found == pytest.approx((x, y), abs=1e-6)


@given(POINTS, PLACE)
def test_beyond_the_points_the_nearest_place_of_their_hull_is_meant(points: list[Point], place: Point) -> None:
    mix = Triangulation(points).mix(*place)
    found = place_of(mix, points)
    if mix.is_inside:
        return
    away = (place[0] - found[0], place[1] - found[1])
    # No point lies on this side of the line through the found place, square to the way there.
    assert all((px - found[0]) * away[0] + (py - found[1]) * away[1] <= 1e-6 for px, py in points)


@given(POINTS, st.data(), st.floats(0, 1), st.floats(0, 2 * math.pi))
def test_a_step_across_the_line_between_two_points_is_no_jump(
    points: list[Point], data: st.DataObject, share: float, angle: float
) -> None:
    triangulation, step = Triangulation(points), 1e-8
    (ax, ay), (bx, by) = (data.draw(st.sampled_from(points)) for _ in range(2))
    x, y = share * ax + (1 - share) * bx, share * ay + (1 - share) * by
    dx, dy = step * math.cos(angle), step * math.sin(angle)
    values = [px * px - 3 * py for px, py in points]

    def mean(mix: Mix) -> float:
        return sum(share * values[number] for number, share in mix.shares)

    change = abs(mean(triangulation.mix(x - dx, y - dy)) - mean(triangulation.mix(x + dx, y + dy)))
    # Points on a lattice of quarters make no triangle that is flatter than 0.003, and values differ by 300 at most.
    assert change <= 2 * step * 1e5


def test_of_two_ways_to_halve_four_points_the_shorter_diagonal_is_taken() -> None:
    mix = Triangulation([(0.0, 0.0), (4.0, 1.0), (8.0, 0.0), (4.0, -1.0)]).mix(4.0, 0.0)
    assert dict(mix.shares) == pytest.approx({1: 0.5, 3: 0.5})


@pytest.mark.parametrize("side", [2, 3, 5])
def test_a_lattice_is_covered_once(side: int) -> None:
    """Each square by two triangles: every place has one mix, and the ones on a diagonal two points only."""
    points = [(math.log2(16 * 3**x), math.log2(32 * 5**y)) for x in range(side) for y in range(side)]
    triangulation = Triangulation(points)
    step_x, step_y = math.log2(3), math.log2(5)
    for x in range(side - 1):
        for y in range(side - 1):
            centre = (4 + (x + 0.5) * step_x, 5 + (y + 0.5) * step_y)
            assert [share for _, share in triangulation.mix(*centre).shares] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("side", [2, 3, 5])
def test_on_a_lattice_neighbouring_triangles_meet_without_a_jump(side: int) -> None:
    """Four points on one circle have two diagonals; both at once would be two answers for one place."""
    points = [(float(x), float(y)) for x in range(side) for y in range(side)]
    triangulation = Triangulation(points)
    values = [(x * y) % 7 for x, y in points]
    steps = 4000
    for tilt in (0.03, 0.41):  # two ways across, that come over either diagonal of the squares
        path = [(i / steps * (side - 1), (1 - tilt) * (1 - i / steps) * (side - 1)) for i in range(steps)]
        means = [sum(share * values[number] for number, share in triangulation.mix(*place).shares) for place in path]
        assert max(abs(b - a) for a, b in pairwise(means)) <= 14 * 2 * (side - 1) / steps
